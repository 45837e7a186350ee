"""``--retry-failed`` with workers that start late: a command tries each failure once, not once a worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from job_fakes import SMALL, FailingModel, Runner, loaded_model, make_rows, write_jsonl

from offline_diffusion.config import JobConfig, make_job_config
from offline_diffusion.job import prepare_job
from offline_diffusion.progress import StopFlag

OPTIONS = SMALL | {"shard_size": 4, "max_num_seqs": 2, "device": "cpu"}
JOB = "SLURM_ARRAY_JOB_ID"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A job of three shards with two failures in the first; drawn again they fail again."""
    rows = make_rows(12)
    rows[2]["prompt"], rows[3]["prompt"] = "STEP", "STEP, the other"
    manifest = write_jsonl(tmp_path / "m.jsonl", rows)
    Runner(FailingModel(loaded_model())).run(manifest, tmp_path / "out", **OPTIONS)
    return tmp_path / "out"


def config_of(out: Path, **more: object) -> JobConfig:
    manifest = str(out.parent / "m.jsonl")
    return make_job_config(
        {"model": "tiny", "manifests": [manifest], "out": out, "retry_failed": True, **OPTIONS, **more}
    )


def attempts(out: Path, *, is_part: bool, **more: object) -> int:
    """Runs a worker; returns how often it tried the first failing image."""
    runner = Runner(FailingModel(loaded_model()))
    runner.run_task(config_of(out, **more), is_part=is_part)
    return runner.finished["STEP"]


def prepare(out: Path) -> None:
    prepare_job(config_of(out), observer=lambda _: None, stop=StopFlag(), say=lambda _: None)


def test_workers_of_one_command_try_a_failure_once_together(out: Path) -> None:
    prepare(out)
    assert [attempts(out, is_part=True) for _ in range(3)] == [1, 0, 0]
    prepare(out)  # the user asks again
    assert [attempts(out, is_part=True) for _ in range(2)] == [1, 0]


def test_a_plain_command_is_one_of_its_own(out: Path) -> None:
    assert [attempts(out, is_part=False) for _ in range(2)] == [1, 1]


def test_tasks_of_an_array_try_a_failure_once_together(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first, comes late or comes back from the queue; another submission is another one."""
    monkeypatch.setenv(JOB, "4711")
    assert [attempts(out, is_part=False, num_tasks=3, task_index=n) for n in (2, 0, 2, 1)] == [1, 0, 0, 0]
    monkeypatch.setenv(JOB, "4712")
    assert [attempts(out, is_part=False, num_tasks=3, task_index=n) for n in (0, 0)] == [1, 0]


def test_an_array_of_tasks_with_several_devices_does_too(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB, "4711")
    prepare(out)
    assert [attempts(out, is_part=True) for _ in range(2)] == [1, 0]
    prepare(out)  # requeued
    assert attempts(out, is_part=True) == 0


def notes(out: Path) -> list[str]:
    return sorted(path.name[12:-5] for path in (out / "_state").glob("retry.slurm-*.json"))


def test_notes_of_arrays_do_not_pile_up(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest stay while something fails: their tasks may come late. Afterwards none is needed."""
    for number in range(4700, 4706):
        monkeypatch.setenv(JOB, str(number))
        assert attempts(out, is_part=False) == 1
        path = out / "_state" / f"retry.slurm-{number}.json"
        os.utime(path, (number, number))
    assert attempts(out, is_part=False) == 0
    assert notes(out) == ["4702", "4703", "4704", "4705"]
    monkeypatch.setenv(JOB, "4706")
    Runner().run_task(config_of(out))  # the model is mended: it draws the failures, too
    assert notes(out) == []


def test_what_a_worker_left_unfinished_the_next_goes_on_with(out: Path) -> None:
    """A retry that was interrupted has published nothing: its shard is still one to retry."""
    prepare(out)
    stop, runner = StopFlag(), Runner(FailingModel(loaded_model()))
    runner.on_step = lambda engine: stop.request("test")
    assert runner.run_task(config_of(out, max_num_seqs=1), is_part=True, stop=stop).interrupted
    assert runner.finished.total() == 1
    assert attempts(out, is_part=True) == 1
