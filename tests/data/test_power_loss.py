"""The power fails: what a disk may hold then is enough for the whole dataset, and nothing is drawn twice."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from crash_worker import AGAIN, ONCE_MORE, PUBLISHED, clear, publish
from output_fakes import check_publication
from power_loss import Disk, write_state

from offline_diffusion.data import tables
from offline_diffusion.data.files import sync_folder, write_file
from offline_diffusion.data.shard_writer import ShardWriter


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """``publish`` sets these; they are put back."""
    for name in ("ROW_GROUP_BYTES", "FILE_BYTES"):
        monkeypatch.setattr(tables, name, getattr(tables, name))


def record_publication(root: Path, kind: str, skipped_sync: int | None = None) -> tuple[Disk, int]:
    """Makes a publication; what was done to the disk, and from when on no image may be lost."""
    synced_at: list[int] = []
    root.mkdir()
    if kind == "again":
        publish(root / "out", AGAIN, parts=1)
        clear(root / "out")
    disk = Disk(root, skipped_sync)
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: gone.pid)  # scratch names tell that their process has ended
        real = ShardWriter.sync

        def sync(writer: ShardWriter) -> None:
            real(writer)
            if writer.complete:
                synced_at.append(disk.now)

        patch.setattr(ShardWriter, "sync", sync)
        disk.record(patch)
        publish(root / "out", ONCE_MORE if kind == "again" else AGAIN, parts=2)
    return disk, synced_at[0]


def check_power_losses(root: Path, kind: str, disk: Disk, synced_at: int) -> None:
    """Resumes from everything that the disk may hold after a loss at any moment."""
    failing = ONCE_MORE if kind == "again" else AGAIN
    seen = set()
    for at in range(disk.now + 1):
        for state in disk.states(at):
            is_synced = at >= synced_at
            if (found := (is_synced, frozenset(state.items()))) in seen:
                continue
            seen.add(found)
            place = root / str(len(seen))
            write_state(state, place)
            # A failure is tried again whenever `--retry-failed` goes on, so it is no loss.
            lost = set(publish(place / "out", failing, parts=2)) - failing
            assert not (is_synced and lost), f"after {at} of {disk.now} changes"
            clear(place / "out")
            check_publication(place / "out", PUBLISHED, len(failing))
    assert len(seen) > 30


@pytest.mark.parametrize("kind", ["first", "again"])
def test_a_power_loss_at_any_moment_of_a_publication_loses_nothing(root: Path, kind: str) -> None:
    """Catches a marker that is there before its tables are, partials that go before the marker or the tables
    are sure to stay, and a file of an earlier publication that comes back."""
    check_power_losses(root, kind, *record_publication(root / "work", kind))


@pytest.mark.slow
def test_a_sync_that_is_left_out_shows(root: Path) -> None:
    """Of a second publication each sync is needed, but for those of folders that the first one has synced,
    and that of images taken over from tables that are still there. Catches a model that keeps all."""
    superfluous = []
    for number in range(100):
        place = root / str(number)
        place.mkdir()
        disk, synced_at = record_publication(place / "work", "again", number)
        if disk.skipped is None:
            break
        try:
            check_power_losses(place, "again", disk, synced_at)
        except AssertionError:
            continue
        superfluous.append(disk.skipped.partition(".")[0])
    assert number > 15
    assert superfluous == ["", "out/_state", "out", "out/_state/partial/shard-00000", "out"]


def test_what_is_not_synced_may_be_lost(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model itself, by hand."""
    disk = Disk(root)
    with monkeypatch.context() as patch:
        disk.record(patch)
        for name in ("a", "b"):
            (root / name).mkdir()
        sync_folder(root)
        write_file(root / "a" / "sure", b"1")
        sync_folder(root / "a")
        write_file(root / "a" / "torn", b"2", durable=False)
        os.replace(root / "a" / "sure", root / "b" / "moved")
    before = {"a": None, "b": None, "a/sure": b"1"}
    assert {frozenset(state.items()) for state in disk.states(disk.now)} == {
        frozenset(state.items())
        for state in (
            before,
            before | {"a/torn": b""},
            {"a": None, "b": None, "b/moved": b"1"},
            {"a": None, "b": None, "a/torn": b"", "b/moved": b"1"},
        )
    }
