"""A full disk wherever a job writes: it waits for space and goes on, or ends with 75 and loses nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_fakes import SMALL, Runner, make_rows, pixels_by_key, write_jsonl

from offline_diffusion.data import card, deaths, disk_full, heartbeat, manifest_change, scan, state_files
from offline_diffusion.data import ledger as ledger_module
from offline_diffusion.errors import JobInterrupted
from offline_diffusion.progress import StopFlag

OPTIONS = SMALL | {"shard_size": 4, "max_num_seqs": 2, "device": "cpu"}

WRITERS = {
    "claim": (state_files, "create_file"),
    "books": (ledger_module, "create_file"),
    "index": (scan, "replace_file"),
    "card": (card, "replace_file"),
    "first heartbeat": (heartbeat, "replace_file"),
}
"""What is written outside of the thread that waits for space by itself, and the function that does it."""


def full(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def failing(real: Callable[..., Any], num_failures: float) -> Callable[..., Any]:
    left = [num_failures]

    def write(path: Path, *args: Any, **others: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise full(path)
        return real(path, *args, **others)

    return write


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "m.jsonl", make_rows(8))


@pytest.mark.parametrize("name", WRITERS)
def test_a_job_waits_for_space(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All images are there afterwards: a shard whose claim found no space at first is not passed over."""
    module, function = WRITERS[name]
    monkeypatch.setattr(disk_full, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(module, function, failing(getattr(module, function), 2))
    said: list[str] = []
    summary = Runner().run(manifest, tmp_path / "out", say=said.append, **OPTIONS)
    assert (summary.num_ok, summary.interrupted) == (8, False)
    assert sum("waiting for space" in line for line in said) == 1
    assert len(pixels_by_key(tmp_path / "out")) == 8


@pytest.mark.parametrize("name", WRITERS)
def test_it_ends_with_75_where_there_is_none(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, function = WRITERS[name]
    with monkeypatch.context() as patched:
        patched.setattr(disk_full, "PAUSE_S", 0.05)
        patched.setattr(module, function, failing(getattr(module, function), float("inf")))
        with pytest.raises(JobInterrupted, match="No space left on device") as caught:
            Runner().run(manifest, tmp_path / "out", **OPTIONS)
    assert caught.value.exit_code == 75
    assert Runner().run(manifest, tmp_path / "out", **OPTIONS).num_ok == 8


def test_the_last_card_waits_for_space_too(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all is published no thread but the job's own writes it."""
    Runner().run(manifest, tmp_path / "out", **OPTIONS)
    monkeypatch.setattr(disk_full, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(card, "replace_file", failing(card.replace_file, 2))
    said: list[str] = []
    assert Runner().run(manifest, tmp_path / "out", say=said.append, **OPTIONS).num_ok == 8
    assert len(said) == 1
    monkeypatch.setattr(disk_full, "PAUSE_S", 0.05)
    monkeypatch.setattr(card, "replace_file", failing(card.replace_file, float("inf")))
    with pytest.raises(JobInterrupted):
        Runner().run(manifest, tmp_path / "out", **OPTIONS)


def test_a_request_to_stop_ends_the_wait(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait would be of a minute otherwise, which is longer than Slurm gives a task to end."""
    monkeypatch.setattr(state_files, "create_file", failing(state_files.create_file, float("inf")))
    stop = StopFlag()
    with pytest.raises(JobInterrupted):
        Runner().run(
            manifest, tmp_path / "out", stop=stop, say=lambda line: stop.request("SIGTERM"), **OPTIONS
        )


def test_a_flight_log_that_cannot_be_made_says_nothing(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def open_file(path: Any, *args: Any, **others: Any) -> int:
        if "flights" in str(path):
            raise full(path)
        return real(path, *args, **others)

    monkeypatch.setattr(deaths.os, "open", open_file)
    assert Runner().run(manifest, tmp_path / "out", **OPTIONS).num_ok == 8


def test_a_change_of_manifest_waits_for_space(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is carried to its end however far it had come."""
    Runner().run(manifest, tmp_path / "out", **OPTIONS)
    other = write_jsonl(tmp_path / "other.jsonl", make_rows(12))
    monkeypatch.setattr(disk_full, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(manifest_change, "replace_file", failing(manifest_change.replace_file, 2))
    summary = Runner().run(other, tmp_path / "out", allow_manifest_change=True, **OPTIONS)
    assert summary.num_ok == 12
    assert len(pixels_by_key(tmp_path / "out")) == 12
