"""``--profile`` of whole jobs: the same images, shares that add up, files in every ending."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from job_fakes import SMALL, CountingEngine, Runner, fail_at_step, make_rows, pixels_by_key, write_jsonl
from resume_fakes import stop_at

from offline_diffusion.engine import profile as profile_module
from offline_diffusion.errors import TooManyFailuresError
from offline_diffusion.job import StopFlag
from offline_diffusion.stages import NO_STAGES

OPTIONS: dict[str, Any] = SMALL | {"num_inference_steps": 5, "shard_size": 2, "max_num_seqs": 2}
NUM_IMAGES = 5


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("manifest") / "m.jsonl", make_rows(NUM_IMAGES))


@pytest.fixture(autouse=True)
def _short_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "WARM_UP_STEPS", 3)
    monkeypatch.setattr(profile_module, "TRACED_STEPS", 4)


def read_summary(out: Path, task: int = 0) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out / f"_state/profile/task-{task:05d}.json").read_text())
    return summary


def read_events(out: Path, task: int = 0) -> list[dict[str, Any]]:
    trace = json.loads(gzip.decompress((out / f"_state/profile/task-{task:05d}.trace.json.gz").read_bytes()))
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_the_same_images_and_shares_that_add_up(manifest: Path, tmp_path: Path) -> None:
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    runner = Runner()
    assert runner.run(manifest, plain, **OPTIONS).profile is None
    assert runner.engine is not None
    assert runner.engine.runner.stages is NO_STAGES
    assert not (plain / "_state" / "profile").exists()
    start = time.perf_counter()
    summary = runner.run(manifest, profiled, profile=True, **OPTIONS)
    seconds = time.perf_counter() - start
    assert pixels_by_key(profiled) == pixels_by_key(plain)
    profile = read_summary(profiled)
    assert profile == summary.profile
    main = [stage for stage in profile["stages"] if not stage["in_threads"]]
    assert sum(stage["host_share"] for stage in main) == pytest.approx(1)
    assert profile["wall_s"] + profile["profiler_s"] == pytest.approx(seconds, rel=0.1, abs=1.0)
    count = {stage["stage"]: stage["count"] for stage in profile["stages"]}
    assert count["denoise"] == count["pack"] == count["solver"] == runner.engine.stats.num_steps
    assert (count["prompt_encode"], count["decode"], count["image_encode"]) == (NUM_IMAGES,) * 3
    assert (count["scan"], count["load"], count["publish"]) == (1, 1, 3)
    denoise = next(stage for stage in main if stage["stage"] == "denoise")
    assert profile["outside_transformer_share"] == pytest.approx(1 - denoise["host_s"] / profile["drawing_s"])
    assert denoise["s_per_image"] == pytest.approx(denoise["host_s"] / NUM_IMAGES)
    assert (profile["device"], denoise["device_s"], profile["device_idle_share"]) == ("CPU", None, None)
    assert profile["step_fill"] == pytest.approx(runner.engine.stats.step_fill)


def test_the_trace_has_the_other_threads_at_their_time(manifest: Path, tmp_path: Path) -> None:
    """Catches spans on another clock than torch's."""
    Runner().run(manifest, tmp_path, profile=True, **OPTIONS)
    events = read_events(tmp_path)
    decodes = [event for event in events if event["name"] == "decode"]
    encodes = [event for event in events if event["name"] == "image_encode"]
    assert decodes
    assert encodes
    assert {event["pid"] for event in encodes} == {"offdiff"}
    assert all(event["tid"].startswith("offdiff-encode") for event in encodes)
    for decode in decodes[: len(encodes)]:  # an image is encoded soon after it was decoded
        end = decode["ts"] + decode["dur"]
        assert any(end - 1e3 <= encode["ts"] <= end + 5e6 for encode in encodes)


def test_an_interrupted_run_writes_what_it_has(manifest: Path, tmp_path: Path) -> None:
    runner, stop = Runner(), StopFlag()

    def on_step(engine: CountingEngine) -> None:
        if engine.num_steps == 7:
            stop.request("SIGTERM")
            stop.request("SIGTERM")

    runner.on_step = on_step
    summary = runner.run(manifest, tmp_path, profile=True, stop=stop, **OPTIONS)
    assert summary.interrupted
    profile = read_summary(tmp_path)
    assert profile["interrupted"]
    assert profile["num_traced_steps"] == 4
    assert sum(event["name"] == "denoise" for event in read_events(tmp_path)) == 4
    resumed = Runner().run(manifest, tmp_path, profile=True, **OPTIONS)
    assert not resumed.interrupted
    assert not read_summary(tmp_path)["interrupted"]


def test_a_failed_run_writes_what_it_has(manifest: Path, tmp_path: Path) -> None:
    runner = Runner()
    runner.on_step = fail_at_step(4, TooManyFailuresError("made up"))
    with pytest.raises(TooManyFailuresError):
        runner.run(manifest, tmp_path, profile=True, **OPTIONS)
    assert read_summary(tmp_path)["interrupted"]


def test_a_folder_that_cannot_be_written_costs_a_warning(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "_state").mkdir()
    (tmp_path / "_state" / "profile").write_text("in the way")
    said: list[str] = []
    summary = Runner().run(manifest, tmp_path, profile=True, say=said.append, **OPTIONS)
    assert (summary.num_ok, summary.interrupted) == (NUM_IMAGES, False)
    assert summary.profile is not None
    warnings = [line for line in said if line.startswith("warning: profile: ")]
    assert len(warnings) == 2
    assert all("_state/profile" in line for line in warnings)


def test_every_task_has_its_own_files_and_a_finished_one_keeps_them(manifest: Path, tmp_path: Path) -> None:
    stop, first = StopFlag(), Runner()
    first.on_step = stop_at(stop, 1)
    first.run(manifest, tmp_path, stop=stop, profile=True, num_tasks=2, task_index=0, **OPTIONS)
    Runner().run(manifest, tmp_path, profile=True, num_tasks=2, task_index=1, **OPTIONS)
    before = {task: read_summary(tmp_path, task) for task in (0, 1)}
    assert [before[task]["task"] for task in (0, 1)] == [0, 1]
    assert sum(before[task]["num_images"] for task in (0, 1)) == NUM_IMAGES
    again = Runner().run(manifest, tmp_path, profile=True, num_tasks=2, task_index=1, **OPTIONS)
    assert again.profile is None
    assert read_summary(tmp_path, 1) == before[1]
