"""Step checkpoints of whole jobs: no step is done twice, nothing is left behind, no failure costs the job."""

from __future__ import annotations

import errno
import json
import os
import time
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_fakes import CountingEngine, OnStep, Runner, at_step, make_rows, read_table, write_jsonl
from safetensors import safe_open

from offline_diffusion import draw_loop
from offline_diffusion.data import step_checkpoint
from offline_diffusion.data.layout import Shard
from offline_diffusion.data.sink import Sink
from offline_diffusion.errors import ManifestError
from offline_diffusion.job import StopFlag
from offline_diffusion.step_saver import StepSaver

STEPS = 6
NUM_IMAGES = 10
OPTIONS: dict[str, Any] = {
    "device": "cpu", "height": 32, "width": 32, "num_inference_steps": STEPS, "shard_size": 4,
    "max_num_seqs": 3, "scheduling_policy": "fifo",
}  # fmt: skip


def keep_savers(monkeypatch: pytest.MonkeyPatch) -> list[StepSaver]:
    """Gets every saver that is made from now on."""
    savers: list[StepSaver] = []
    make = StepSaver.__init__

    def watched(self: StepSaver, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        savers.append(self)

    monkeypatch.setattr(StepSaver, "__init__", watched)
    return savers


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = make_rows(NUM_IMAGES - 1)
    for row in rows[::2]:
        row |= {"negative_prompt": "grey", "true_cfg_scale": 4.0, "width": 48}
    rows[1]["num_images_per_prompt"] = 2
    return write_jsonl(tmp_path_factory.mktemp("steps") / "m.jsonl", rows)


@pytest.fixture(scope="module")
def whole(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, str]:
    out = tmp_path_factory.mktemp("whole")
    Runner().run(manifest, out, **OPTIONS)
    return pictures(out)


def pictures(out: Path) -> dict[Any, str]:
    return {(row["id"], row["image_index"]): row["sha256"] for row in read_table(out, "images")}


def step_files(out: Path) -> list[Path]:
    return sorted((out / "_state" / "steps").glob("*"))


def saved(out: Path) -> dict[str, int]:
    """Row and image index → step, of all files, read without our own code."""
    steps = {}
    for path in step_files(out):
        with safe_open(path, "numpy") as file:
            entries = json.loads(file.metadata()["images"])
            assert entries.keys() == set(file.keys())
        steps |= {name: entry["step_index"] for name, entry in entries.items()}
    return steps


def num_image_steps(runner: Runner) -> int:
    """Steps of all images in the last run."""
    return 0 if runner.engine is None else runner.engine.num_image_steps


def test_a_stop_in_mid_denoise_loses_no_step(manifest: Path, whole: dict[Any, str], tmp_path: Path) -> None:
    """Stopped again and again after few steps: the steps of all runs add up to those of one."""
    lines: list[str] = []
    total, num_runs, summary = 0, 0, None
    while summary is None or summary.interrupted:
        stop, runner = StopFlag(), Runner()
        runner.on_step = stop_at_step(stop, 2 + num_runs % 3)
        options = OPTIONS | {"max_num_seqs": 1 + num_runs % 4}  # fewer may go on than were under way
        summary = runner.run(manifest, tmp_path, stop=stop, say=lines.append, **options)
        total += num_image_steps(runner)
        num_runs += 1
        assert num_runs < 60
    assert num_runs > 5
    assert total == NUM_IMAGES * STEPS
    assert pictures(tmp_path) == whole
    metrics = read_table(tmp_path, "metrics")
    assert {(row["steps_run"], row["attempts"]) for row in metrics} == {(STEPS, 1)}
    assert step_files(tmp_path) == []
    assert any(
        line.startswith("SIGTERM: saving 3 unfinished images at their step; once more") for line in lines
    )
    assert any(line == "shard-00000: 1 unfinished image resumed at their step" for line in lines)


def stop_at_step(stop: StopFlag, step: int) -> OnStep:
    """Asks to stop before the engine's so-manieth step, which it then does."""
    return at_step(step, lambda: stop.request("SIGTERM"))


def test_a_checkpoint_bears_the_generation_of_its_owner(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the shard was just taken over: catches a loser that writes under the new owner's name."""
    real, stop, runner = Sink.open_shard, StopFlag(), Runner()

    def taken_over_at_once(sink: Sink, shard: Shard, *args: Any, **options: Any) -> Any:
        finished = real(sink, shard, *args, **options)
        (tmp_path / "_state" / "partial" / f"{shard.stem}.000009-0123abcd.arrows").touch()
        return finished

    monkeypatch.setattr(Sink, "open_shard", taken_over_at_once)
    runner.on_step = stop_at_step(stop, 3)
    assert runner.run(manifest, tmp_path, stop=stop, **OPTIONS).interrupted
    assert [path.name for path in step_files(tmp_path)] == ["shard-00000.000000.safetensors"]


class KilledError(BaseException):
    """A stand-in for a kill: only what ends threads runs after it."""


def kill_at(step: int) -> OnStep:
    def on_step(engine: CountingEngine) -> None:
        time.sleep(0.3)  # the checkpoint that was begun is written
        if engine.num_steps == step:
            raise KilledError

    return on_step


def run_until_killed(manifest: Path, out: Path, step: int, **options: Any) -> int:
    """The steps of all images that were run."""
    runner = Runner()
    runner.on_step = kill_at(step)
    with pytest.raises(KilledError):
        runner.run(manifest, out, **OPTIONS | options)
    return num_image_steps(runner)


def test_a_kill_loses_what_was_done_since_the_last_checkpoint(
    manifest: Path, whole: dict[Any, str], tmp_path: Path
) -> None:
    total = run_until_killed(manifest, tmp_path, 6, checkpoint_interval=1e-6)
    before = saved(tmp_path)
    assert before.keys() == {"0-0", "1-0", "1-1"}
    assert min(before.values()) >= 1
    second = Runner()
    second.run(manifest, tmp_path, checkpoint_interval=0, **OPTIONS)
    lost = total + num_image_steps(second) - NUM_IMAGES * STEPS
    assert lost == 3 * 5 - sum(before.values())
    assert pictures(tmp_path) == whole
    assert {row["steps_run"] for row in read_table(tmp_path, "metrics")} == {STEPS}
    assert step_files(tmp_path) == []


@pytest.mark.parametrize(
    ("look_ahead", "first_step"), [(256, 1), (1, 2)]
)  # a look of 1 opens the shard first
def test_what_waits_keeps_its_steps_through_later_checkpoints(
    manifest: Path,
    whole: dict[Any, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    look_ahead: int,
    first_step: int,
) -> None:
    """Three are begun, then only one at a time goes on, killed twice: nobody's steps are forgotten, whether
    they wait in the engine or are not there yet."""
    stop, first = StopFlag(), Runner()
    first.on_step = stop_at_step(stop, 4)
    first.run(manifest, tmp_path, stop=stop, **OPTIONS)
    assert saved(tmp_path) == {"0-0": 4, "1-0": 4, "1-1": 4}
    monkeypatch.setattr("offline_diffusion.draw_loop.LOOK_AHEAD", look_ahead)
    (one,) = step_files(tmp_path)
    run_until_killed(manifest, tmp_path, first_step + 1, checkpoint_interval=1e-6, max_num_seqs=1)
    assert saved(tmp_path) == {"0-0": 5, "1-0": 4, "1-1": 4}
    (two,) = step_files(tmp_path)
    assert (one.name, two.name) == ("shard-00000.000000.safetensors", "shard-00000.000001.safetensors")
    assert run_until_killed(manifest, tmp_path, first_step + 1, checkpoint_interval=0, max_num_seqs=1) == 1
    assert saved(tmp_path) == {"0-0": 5, "1-0": 4, "1-1": 4}
    last = Runner()
    last.run(manifest, tmp_path, **OPTIONS)
    assert num_image_steps(last) == NUM_IMAGES * STEPS - (4 + 4) - STEPS, (
        "the first was finished before the kill"
    )
    assert pictures(tmp_path) == whole


def test_a_checkpoint_is_made_when_the_interval_is_over_and_none_before(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that goes on by 25 s a step. Catches a checkpoint at every step or at none, and intervals
    counted from when a checkpoint was due, not from when it was made: steps 5 and 8 instead of 6 and 9."""
    savers, made = keep_savers(monkeypatch), []
    clock = SimpleNamespace(now=1_000.0)
    monkeypatch.setattr("offline_diffusion.step_saver.time", SimpleNamespace(monotonic=lambda: clock.now))
    real = CountingEngine.snapshot

    def snapshot(engine: CountingEngine) -> Any:
        made.append(engine.num_steps)
        return real(engine)

    monkeypatch.setattr(CountingEngine, "snapshot", snapshot)

    def on_step(engine: CountingEngine) -> None:
        clock.now += 25
        if savers[0]._writing is not None:
            wait([savers[0]._writing])  # however slow the disk is: the clock does not wait for it

    runner = Runner()
    runner.on_step = on_step
    runner.run(manifest, tmp_path, checkpoint_interval=60, **OPTIONS)
    assert runner.engine is not None
    num_steps = runner.engine.num_steps
    assert num_steps >= 18
    assert made == list(range(3, num_steps + 1, 3))


def test_without_an_interval_nothing_is_written_before_a_stop(manifest: Path, tmp_path: Path) -> None:
    run_until_killed(manifest, tmp_path, 6, checkpoint_interval=0)
    assert step_files(tmp_path) == []


def test_a_second_stop_saves_nothing(manifest: Path, tmp_path: Path) -> None:
    stop, runner = StopFlag(), Runner()

    def on_step(engine: CountingEngine) -> None:
        if engine.num_steps == 3:
            stop.request("SIGTERM")
            stop.request("SIGTERM")

    runner.on_step = on_step
    assert runner.run(manifest, tmp_path, stop=stop, **OPTIONS).interrupted
    assert step_files(tmp_path) == []


def test_a_failure_saves_too(
    manifest: Path, whole: dict[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is gone when its second part is wanted: what runs is kept for when it is back."""
    monkeypatch.setattr(draw_loop, "LOOK_AHEAD", 1)
    rows = manifest.read_bytes()
    own, out = tmp_path / "m.jsonl", tmp_path / "out"
    own.write_bytes(rows)
    first = Runner()
    first.on_step = lambda engine: own.unlink() if engine.num_steps == 4 else None
    with pytest.raises(ManifestError, match="it is not there"):
        first.run(own, out, **OPTIONS)
    assert saved(out)
    assert set(saved(out).values()) < set(range(1, STEPS))
    own.write_bytes(rows)
    second = Runner()
    second.run(own, out, **OPTIONS)
    assert num_image_steps(first) + num_image_steps(second) == NUM_IMAGES * STEPS
    assert pictures(out) == whole


def test_a_full_disk_is_told_once_and_costs_only_the_checkpoints(
    manifest: Path, whole: dict[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries = 0

    def full(*_: Any, **__: Any) -> None:
        nonlocal num_tries
        num_tries += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(step_checkpoint, "replace_file", full)
    lines: list[str] = []
    runner = Runner()
    summary = runner.run(manifest, tmp_path, say=lines.append, checkpoint_interval=1e-6, **OPTIONS)
    assert not summary.interrupted
    assert num_tries > 1
    (told,) = (line for line in lines if "step checkpoint" in line)
    assert told.startswith("warning: no step checkpoint: cannot write ")
    assert "No space left on device" in told
    assert pictures(tmp_path) == whole


def test_a_checkpoint_that_does_not_fit_is_told_and_drawn_again(
    manifest: Path, whole: dict[Any, str], tmp_path: Path
) -> None:
    run_until_killed(manifest, tmp_path, 6, checkpoint_interval=1e-6)
    (path,) = step_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    lines: list[str] = []
    runner = Runner()
    runner.run(manifest, tmp_path, say=lines.append, **OPTIONS)
    (told,) = (line for line in lines if "step checkpoint" in line)
    assert told.startswith(f"step checkpoint {path.name} is ignored: it is damaged")
    assert num_image_steps(runner) == NUM_IMAGES * STEPS
    assert pictures(tmp_path) == whole
    assert step_files(tmp_path) == []


def test_a_kill_after_publication_leaves_files_that_the_next_start_removes(
    manifest: Path, tmp_path: Path
) -> None:
    run_until_killed(manifest, tmp_path, 4, checkpoint_interval=1e-6)
    (path,) = step_files(tmp_path)
    data = path.read_bytes()
    Runner().run(manifest, tmp_path, **OPTIONS)
    path.write_bytes(data)
    other = Runner()
    other.run(manifest, tmp_path, **OPTIONS)
    assert other.engine is None
    assert step_files(tmp_path) == []


def test_work_of_earlier_runs_is_not_in_the_estimate(manifest: Path, tmp_path: Path) -> None:
    """The steps that are left count, so that the time left does not jump at every resumed image."""
    stop, first = StopFlag(), Runner()
    first.on_step = stop_at_step(stop, 4)
    first.run(manifest, tmp_path, stop=stop, **OPTIONS)
    works: list[tuple[float, float]] = []
    Runner().run(
        manifest,
        tmp_path,
        observer=lambda told: works.append((told.work_done, told.work_total)),
        **OPTIONS,
    )
    done, total = works[-1]
    fresh: list[float] = []
    Runner().run(manifest, tmp_path / "fresh", observer=lambda told: fresh.append(told.work_total), **OPTIONS)
    assert done == pytest.approx(total)
    assert 0.6 * fresh[-1] < done < 0.95 * fresh[-1]


@pytest.mark.parametrize("interval", [0, 1e-6])
def test_published_shards_are_let_go(
    manifest: Path, tmp_path: Path, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saver holds rows and states of open shards alone, or a long job's memory would grow."""
    savers, known = keep_savers(monkeypatch), []
    runner = Runner()

    def on_step(engine: CountingEngine) -> None:
        time.sleep(0.05)  # for the sink to publish
        known.append(len(savers[0]._open))

    runner.on_step = on_step
    options = OPTIONS | {"shard_size": 1, "num_inference_steps": 2, "max_num_seqs": 1}
    monkeypatch.setattr("offline_diffusion.draw_loop.LOOK_AHEAD", 1)
    runner.run(manifest, tmp_path, checkpoint_interval=interval, **options)
    assert max(known) <= 5 < NUM_IMAGES - 1
    assert savers[0]._open == {}
