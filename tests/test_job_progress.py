"""What a running job tells: phases in order, counts that only grow, estimates that hold."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from job_fakes import SMALL, FailingModel, Runner, loaded_model, make_rows, write_jsonl

from offline_diffusion.job import Progress, StopFlag
from offline_diffusion.progress import Tally


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is told after each step, however quick."""
    monkeypatch.setattr("offline_diffusion.draw_loop.PROGRESS_INTERVAL_S", 0.0)


def run(manifest: Path, out: Path, **options: Any) -> list[Progress]:
    told: list[Progress] = []
    Runner().run(manifest, out, observer=told.append, **SMALL | options)
    return told


def only_grows(values: list[float]) -> bool:
    return all(one <= other for one, other in itertools.pairwise(values))


@pytest.mark.usefixtures("every_step")
def test_phases_counts_and_totals(tmp_path: Path) -> None:
    rows = make_rows(10_010, prompt=" ")
    for number in range(0, 10_010, 1_500):  # 7 good rows of unlike work
        rows[number] |= {"prompt": "a cup", "num_inference_steps": 2 + number // 1_500}
    rows[0]["num_images_per_prompt"] = 4
    manifest = write_jsonl(tmp_path / "m.jsonl", rows)
    told = run(manifest, tmp_path / "out", shard_size=3_500, max_num_seqs=2)
    phases = [phase for phase, _ in itertools.groupby(told, key=lambda progress: progress.phase)]
    assert phases == ["scanning", "loading", "running", "finishing"]
    scanned = [progress.num_rows_scanned for progress in told if progress.phase == "scanning"]
    assert scanned == [5_000, 10_000]
    (loading,) = (progress for progress in told if progress.phase == "loading")
    assert loading.num_images == 10
    running = [progress for progress in told if progress.phase in ("running", "finishing")]
    assert only_grows([progress.num_done for progress in running])
    assert only_grows([progress.work_done for progress in running])
    for progress in running:
        assert 0 <= progress.num_done <= progress.num_images
        assert 0 <= progress.work_done <= progress.work_total * (1 + 1e-9)
        assert progress.eta_s is None or progress.eta_s >= 0
        assert 0 <= progress.step_fill <= 1
        assert 0 <= progress.num_running <= 2
    last = told[-1]
    assert (last.num_done, last.num_images, last.num_failed, last.num_resumed) == (10, 10, 0, 0)
    assert last.work_done == pytest.approx(last.work_total)
    assert last.eta_s == pytest.approx(0, abs=1e-6)
    assert last.images_per_s > 0


@pytest.mark.usefixtures("every_step")
def test_work_is_told_by_size_steps_and_guidance(tmp_path: Path) -> None:
    """The image tokens' share of four times the steps and both branches: exactly eight times the work."""
    light = {"prompt": "a cup", "num_inference_steps": 2}
    heavy = light | {"num_inference_steps": 8, "negative_prompt": "grey"}
    manifest = write_jsonl(tmp_path / "m.jsonl", [light, heavy])
    told = run(manifest, tmp_path / "out")
    first, both = sorted({progress.work_done for progress in told if progress.work_done})
    assert both / first == pytest.approx(1 + 8)


@pytest.mark.usefixtures("every_step")
def test_a_resumed_run_counts_what_was_there(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(12))
    stop, first = StopFlag(), Runner()
    options = SMALL | {"max_num_seqs": 2, "shard_size": 6, "scheduling_policy": "fifo"}

    def on_step(engine: Any) -> None:
        if sum(engine.finished.values()) >= 2:
            stop.request("SIGTERM")
            stop.request("SIGTERM")

    first.on_step = on_step
    first.run(manifest, tmp_path / "out", stop=stop, **options)
    drawn = sum(first.finished.values())
    told: list[Progress] = []
    summary = Runner().run(manifest, tmp_path / "out", observer=told.append, **options)
    assert (told[-1].num_resumed, told[-1].num_done, told[-1].num_images) == (drawn, 12, 12)
    assert summary.num_resumed == drawn
    # What was there before took no time of this run.
    assert summary.images_per_s == pytest.approx((12 - drawn) / summary.seconds, rel=0.5)


def test_failed_images_are_counted(tmp_path: Path) -> None:
    rows = make_rows(6)
    rows[2]["prompt"] += " TOKENIZE"
    rows[4]["prompt"] += " NAN"
    told: list[Progress] = []
    manifest = write_jsonl(tmp_path / "m.jsonl", rows)
    Runner(FailingModel(loaded_model())).run(manifest, tmp_path / "out", observer=told.append, **SMALL)
    assert (told[-1].num_failed, told[-1].num_done, told[-1].num_images) == (2, 6, 6)


def test_estimates_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows are opened, a fifth of their work is done in 10 s: 90 s are left."""
    monkeypatch.setattr("time.monotonic", lambda: 110.0)
    tally = Tally(
        num_rows=200,
        num_rows_opened=100,
        num_images_opened=150,
        num_resumed=30,
        num_ok=18,
        num_failed=2,
        work_opened=50.0,
        work_done=10.0,
        started=100.0,
    )
    told = tally.progress("running", step_fill=0.5, num_running=3, num_waiting=4)
    assert (told.num_images, told.num_done, told.num_failed, told.num_resumed) == (300, 50, 2, 30)
    assert (told.work_total, told.images_per_s) == (100.0, 2.0)
    assert told.eta_s == pytest.approx(90.0)


def test_nothing_is_estimated_from_nothing() -> None:
    told = Tally(num_rows=10).progress("running", step_fill=0.0, num_running=0, num_waiting=0)
    assert (told.eta_s, told.num_images, told.work_total) == (None, 0, 0.0)
