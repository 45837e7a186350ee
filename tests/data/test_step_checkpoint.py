"""Step checkpoints on disk: whole or not there, and nothing that does not fit is used or raises."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from offline_diffusion.data.layout import Shard
from offline_diffusion.data.step_checkpoint import ExpectedImage, StepFiles, step_paths
from offline_diffusion.errors import JobError
from offline_diffusion.request import RequestMetrics, StepState

SHARD = Shard(3, 30, 40)
SHAPE = (6, 4)
STEPS = 9


def latents(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, np.float32)


def state(step_index: int, seed: int = 0) -> StepState:
    metrics = RequestMetrics(steps_run=step_index, denoise_s=0.1 * step_index, mean_batch_seqs=1 / 3)
    return StepState(step_index, latents(seed), metrics)


def expected(key: tuple[int, int]) -> ExpectedImage | None:
    row, image_index = key
    return ExpectedImage(f"hash {row}", STEPS, SHAPE) if 30 <= row < 40 and image_index < 2 else None


def make_files(tmp_path: Path, job_id: str = "job") -> StepFiles:
    (tmp_path / "_state" / "tmp").mkdir(parents=True, exist_ok=True)
    return StepFiles(tmp_path, job_id)


def entry(row: int, step_index: int, seed: int = 0) -> tuple[str, StepState]:
    return f"hash {row}", state(step_index, seed)


def test_what_is_written_is_a_safetensors_file_and_is_read_again(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    files.write(SHARD, 2, {(31, 0): entry(31, 4, 1), (31, 1): entry(31, 8, 2)})
    path = tmp_path / "_state" / "steps" / "shard-00003.000002.safetensors"
    with safe_open(path, "numpy") as file:  # the library's own reader
        assert sorted(file.keys()) == ["31-0", "31-1"]
        assert np.array_equal(file.get_tensor("31-1"), latents(2))
        metadata = file.metadata()
    assert (metadata["version"], metadata["job_id"]) == ("1", "job")
    found, notes = files.read(SHARD, expected)
    assert notes == []
    assert {key: own.step_index for key, own in found.items()} == {(31, 0): 4, (31, 1): 8}
    assert asdict(found[31, 0].metrics) == asdict(state(4).metrics)
    assert found[31, 0].latents.tobytes() == latents(1).tobytes()
    assert list((tmp_path / "_state" / "tmp").iterdir()) == []


def test_the_furthest_of_all_generations_counts_and_a_write_removes_the_earlier(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    files.write(SHARD, 5, {(31, 0): entry(31, 2), (32, 0): entry(32, 7)})
    late = make_files(tmp_path)
    late.write(SHARD, 4, {(31, 0): entry(31, 6), (33, 0): entry(33, 1)})  # a zombie of the generation before
    other = Shard(4, 40, 50)
    files.write(other, 0, {(41, 0): entry(41, 1)})
    found, _ = files.read(SHARD, expected)
    assert {key: own.step_index for key, own in found.items()} == {(31, 0): 6, (32, 0): 7, (33, 0): 1}
    files.write(SHARD, 6, {key: (f"hash {key[0]}", own) for key, own in found.items()})
    assert [path.name for path in step_paths(files.folder, SHARD.stem)] == ["shard-00003.000006.safetensors"]
    late.write(SHARD, 4, {(31, 0): entry(31, 7)})
    assert len(step_paths(files.folder, SHARD.stem)) == 2, "a late one removes nothing of its successor"
    files.write(SHARD, 6, {})
    assert step_paths(files.folder, SHARD.stem) == []
    assert len(step_paths(files.folder, other.stem)) == 1


@pytest.mark.parametrize(
    ("key", "own", "note"),
    [
        ((50, 0), ("hash 50", state(3)), "not asked for"),
        ((31, 2), ("hash 31", state(3)), "not asked for"),
        ((31, 0), ("hash of old", state(3)), "the row has changed"),
        ((31, 0), ("hash 31", state(0)), "at step 0 of 9"),
        ((31, 0), ("hash 31", state(9)), "at step 9 of 9"),
        (
            (31, 0),
            ("hash 31", StepState(3, latents(0)[:5], RequestMetrics())),
            "latents are [5, 4], not [6, 4]",
        ),
        ((31, 0), ("hash 31", StepState(3, np.full(SHAPE, np.nan, np.float32), RequestMetrics())), "NaN"),
        (
            (31, 0),
            ("hash 31", StepState(3, np.full(SHAPE, np.inf, np.float32), RequestMetrics())),
            "infinity",
        ),
    ],
)
def test_an_image_that_does_not_fit_is_told_and_the_others_are_used(
    tmp_path: Path, key: tuple[int, int], own: tuple[str, StepState], note: str
) -> None:
    files = make_files(tmp_path)
    files.write(SHARD, 0, {key: own, (35, 1): entry(35, 5)})
    found, notes = files.read(SHARD, expected)
    assert found.keys() == {(35, 1)}
    (line,) = notes
    assert line.startswith("step checkpoint shard-00003.000000.safetensors: 1 of its images ignored: ")
    assert note in line


def change_metadata(path: Path, **changes: str) -> None:
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, metadata | changes)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"version": "2"}, "its version is '2', not '1'"),
        ({"format": "other"}, "its format is 'other'"),
        ({"job_id": "other"}, "it is of another job"),
        ({"images": "[1]"}, "no images are listed"),
        ({"images": "{"}, "it is damaged"),
        ({"images": "[" * 100_000}, "it is damaged"),
        ({"images": '{"31-0": 7}'}, "1 of its images ignored: damaged"),
        ({"images": '{"31-0": {"row": [], "crc32": 0}}'}, "1 of its images ignored: damaged"),
        ({"images": '{"31-1": {"row": 31}}'}, "1 of its images ignored: damaged"),
    ],
)
def test_a_file_that_does_not_fit_is_ignored_with_a_line(
    tmp_path: Path, changes: dict[str, str], note: str
) -> None:
    files = make_files(tmp_path)
    files.write(SHARD, 0, {(31, 0): entry(31, 4)})
    (path,) = step_paths(files.folder, SHARD.stem)
    change_metadata(path, **changes)
    found, notes = files.read(SHARD, expected)
    assert found == {}
    (line,) = notes
    assert note in line


def test_a_damaged_file_gives_what_was_written_or_nothing(tmp_path: Path) -> None:
    """Cut at every length, and a bit turned in every byte."""
    files = make_files(tmp_path)
    files.write(SHARD, 0, {(31, 0): entry(31, 4)})
    (path,) = step_paths(files.folder, SHARD.stem)
    good = path.read_bytes()
    damaged = [good[:length] for length in range(0, len(good), 7)]
    damaged += [good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :] for at in range(len(good))]
    damaged += [good + b"\0", good.replace(b"31", b"32"), b"\xff" * 8 + good[8:], b"{" * 200]
    num_used = 0
    for data in damaged:
        path.write_bytes(data)
        found, notes = files.read(SHARD, expected)
        assert len(notes) == (not found), data
        for key, own in found.items():  # a name or a space of the header may be another without harm
            num_used += 1
            assert (key, own.step_index) == ((31, 0), 4)
            assert own.latents.tobytes() == latents(0).tobytes()
            assert asdict(own.metrics) == asdict(state(4).metrics)
    assert num_used < 0.05 * len(damaged)


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_files(tmp_path)
    files.write(SHARD, 0, {(31, 0): entry(31, 4)})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JobError, match="No space left on device"):
        files.write(SHARD, 1, {(31, 0): entry(31, 5)})
    monkeypatch.undo()
    assert list((tmp_path / "_state" / "tmp").iterdir()) == [], "what does not fit must not take space"
    found, notes = files.read(SHARD, expected)
    assert (found[31, 0].step_index, notes) == (4, [])


def test_other_names_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    files.write(SHARD, 0, {(31, 0): entry(31, 4)})
    for name in ("shard-00003.safetensors", "shard-00003.x.safetensors", "shard-00030.000000.safetensors"):
        (files.folder / name).write_text(json.dumps({}))
    assert len(step_paths(files.folder, SHARD.stem)) == 1
    assert files.read(SHARD, expected)[1] == []
    assert files.read(Shard(9, 90, 100), expected) == ({}, [])
