"""A full disk: the job waits for space and goes on, or ends in good order with nothing corrupt."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mounts import memory_disk
from output_fakes import all_images, contents, make_output, make_rows, open_ledger, run_job

from offline_diffusion.data import disk_full
from offline_diffusion.data.sink import Sink
from offline_diffusion.data.verify import verify
from offline_diffusion.errors import JobError, JobInterrupted

NUM_ROWS = 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    out = tmp_path_factory.mktemp("whole")
    run_job(open_ledger(out, NUM_ROWS, 10), make_rows(NUM_ROWS))
    return contents(out)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 1 MiB."""
    with memory_disk(tmp_path / "disk", 2**20):
        yield tmp_path / "disk"


def fill(disk: Path, num_bytes_left: int) -> Path:
    """Leaves so much space on a disk; returns what takes the rest."""
    ballast = disk / ".ballast"
    free = os.statvfs(disk)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - num_bytes_left))
    return ballast


def check_whole(out: Path, expected: list[tuple[Any, ...]]) -> None:
    assert contents(out) == expected
    report = verify(out, num_threads=1)
    assert (report.problems, report.pending, report.num_leftovers) == ([], [], 0)


@pytest.mark.parametrize("num_bytes_left", [20_000, 60_000, 120_000, 180_000])
def test_a_small_disk_ends_the_job_and_the_next_run_goes_on(
    small_disk: Path, whole: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, num_bytes_left: int
) -> None:
    """The space ends at another point each time: in a partial, in tables, in a marker."""
    monkeypatch.setattr(disk_full, "PAUSE_S", 0.1)
    out, rows, lines = small_disk / "out", make_rows(NUM_ROWS), []
    ledger = open_ledger(out, NUM_ROWS, 10)
    ballast = fill(small_disk, num_bytes_left)
    with pytest.raises(JobInterrupted, match="No space left on device") as caught:
        run_job(ledger, rows, say=lines.append)
    assert caught.value.exit_code == 75
    assert str(out) in (caught.value.hint or "")
    assert "MiB are free" in caught.value.message
    assert 1 <= sum("waiting for space" in line for line in lines) <= 2  # each thread that waits says so
    assert [
        problem for problem in verify(out, num_threads=1).problems if "no published" not in str(problem)
    ] == []
    ballast.unlink()
    drawn: list[tuple[int, int]] = []
    again = open_ledger(out, NUM_ROWS, 10)
    run_job(again, rows, drawn=drawn)
    assert len(drawn) <= NUM_ROWS
    check_whole(out, whole)


def test_a_job_goes_on_as_soon_as_there_is_space(small_disk: Path, whole: list[tuple[Any, ...]]) -> None:
    out, rows, lines = small_disk / "out", make_rows(NUM_ROWS), []
    ledger = open_ledger(out, NUM_ROWS, 10)
    ballast = fill(small_disk, 60_000)

    def free_it() -> None:
        while not lines:
            time.sleep(0.01)
        ballast.unlink()

    helper = threading.Thread(target=free_it)
    helper.start()
    drawn: list[tuple[int, int]] = []
    run_job(ledger, rows, say=lines.append, drawn=drawn)
    helper.join()
    assert len(drawn) == NUM_ROWS
    assert len(lines) == 1
    assert "waiting for space, at most 60 s" in lines[0]
    check_whole(out, whole)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync", "link", "mkdir", "replace"])
def test_no_space_for_any_call_ends_or_pauses_the_job(
    tmp_path: Path, whole: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Catches a call whose error is not told as a full disk, and a torn file that is taken for whole."""
    monkeypatch.setattr(disk_full, "PAUSE_S", 0.05)
    ledger, rows = open_ledger(tmp_path, NUM_ROWS, 10), make_rows(NUM_ROWS)

    def full(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    sink = Sink(ledger, num_threads=1)
    sink.open_shard(ledger.shards[0], rows[:10])
    monkeypatch.setattr(os, call, full)

    def work() -> None:
        for image in all_images(rows[:10]):
            sink.submit(0, image, make_output(image))
        sink.close()

    with pytest.raises(JobInterrupted, match=os.strerror(code)):
        work()
    sink.close(abandon=True)
    monkeypatch.undo()
    run_job(open_ledger(tmp_path, NUM_ROWS, 10), rows)
    check_whole(tmp_path, whole)


def test_another_error_of_the_disk_stops_the_job_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, lines = make_rows(2), []
    ledger = open_ledger(tmp_path, 2, 2)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    sink = Sink(ledger, say=lines.append)
    sink.open_shard(ledger.shards[0], rows)
    monkeypatch.setattr(os, "write", broken)
    sink.submit(0, all_images(rows)[0], make_output(all_images(rows)[0]))
    with pytest.raises(JobError, match="Input/output error"):
        sink.close()
    assert lines == []


def test_a_stop_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stop that sits out the whole minute, beyond the time that a cluster leaves."""
    rows, lines = make_rows(2), []
    ledger = open_ledger(tmp_path, 2, 2)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = Sink(ledger, say=lines.append)
    sink.open_shard(ledger.shards[0], rows)
    monkeypatch.setattr(os, "write", full)
    sink.submit(0, all_images(rows)[0], make_output(all_images(rows)[0]))
    while not lines:
        time.sleep(0.01)
    started = time.monotonic()
    with pytest.raises(JobInterrupted):
        sink.close(abandon=True)
    assert time.monotonic() - started < 10
