"""Stopping and resuming: nothing is lost, nothing is drawn twice, nothing is mixed."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from job_fakes import (
    CountingEngine,
    Rows,
    Runner,
    make_rows,
    read_table,
    write_jsonl,
)
from resume_fakes import OPTIONS, draw_whole, same, stop_at, write_manifest

from offline_diffusion.data.verify import verify
from offline_diffusion.errors import JobInterrupted
from offline_diffusion.job import Progress, StopFlag


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_manifest(tmp_path_factory.mktemp("manifest") / "m.jsonl")


@pytest.fixture(scope="module")
def whole(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_whole(manifest, tmp_path_factory.mktemp("whole") / "out")


@pytest.mark.parametrize("num_images", [0, 1, 5, 11])
def test_a_stop_saves_and_the_next_run_goes_on(
    manifest: Path, whole: Path, tmp_path: Path, num_images: int
) -> None:
    stop, lines, first = StopFlag(), [], Runner()
    first.on_step = stop_at(stop, num_images)
    summary = first.run(manifest, tmp_path, stop=stop, say=lines.append, **OPTIONS)
    assert summary.interrupted
    assert any("SIGTERM" in line and "once more to stop without saving" in line for line in lines)
    drawn = sum(first.finished.values())
    assert num_images <= drawn < 20
    assert (summary.num_ok, summary.num_failed, summary.num_resumed) == (drawn, 0, 0)
    assert 20 <= summary.num_images <= 22
    second = Runner()
    summary = second.run(manifest, tmp_path, **OPTIONS)
    assert (summary.interrupted, summary.num_ok, summary.num_resumed) == (False, 20, drawn)
    assert first.finished + second.finished == Counter(
        {row["prompt"]: 3 if "num_images_per_prompt" in row else 1 for row in good_rows(manifest)}
    )
    same(tmp_path, whole)


def good_rows(manifest: Path) -> Rows:
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["prompt"] and row["seed"] >= 0]


def test_many_stops_in_a_row(manifest: Path, whole: Path, tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for _ in range(30):
        stop, runner = StopFlag(), Runner()
        runner.on_step = stop_at(stop, 1)
        summary = runner.run(manifest, tmp_path, stop=stop, **OPTIONS | {"max_num_seqs": 2})
        total += runner.finished
        if not summary.interrupted:
            break
    assert not summary.interrupted
    assert set(total.values()) == {1, 3}
    assert sum(total.values()) == 20
    same(tmp_path, whole)


def test_stopping_twice_stops_at_once(tmp_path: Path) -> None:
    slow = OPTIONS | {"num_inference_steps": 200, "scheduling_policy": "fifo"}
    rows = make_rows(8)
    rows[0]["num_inference_steps"] = 2
    unequal = write_jsonl(tmp_path / "m.jsonl", rows)
    stop, first = StopFlag(), Runner()
    first.on_step = stop_at(stop, 1, times=2)
    started = time.monotonic()
    summary = first.run(unequal, tmp_path / "out", stop=stop, **slow)
    assert summary.interrupted
    assert sum(first.finished.values()) == 1
    assert first.engine is not None
    assert first.engine.num_steps < 50
    assert time.monotonic() - started < 20
    rest = Runner()
    assert rest.run(unequal, tmp_path / "out", **slow).num_ok == 8
    assert sum(rest.finished.values()) == 7


def test_a_stop_while_scanning(manifest: Path, tmp_path: Path) -> None:
    stop, runner = StopFlag(), Runner()
    stop.request("SIGUSR1")
    with pytest.raises(JobInterrupted, match="SIGUSR1: stopped while scanning") as caught:
        runner.run(manifest, tmp_path / "out", stop=stop, **OPTIONS)
    assert caught.value.hint
    assert runner.engine is None
    assert runner.run(manifest, tmp_path / "out", **OPTIONS).num_ok == 20


def test_a_stop_while_loading_the_model(manifest: Path, whole: Path, tmp_path: Path) -> None:
    stop, runner = StopFlag(), Runner()

    def observe(progress: Progress) -> None:
        if progress.phase == "loading":
            stop.request("SIGTERM")

    summary = runner.run(manifest, tmp_path, stop=stop, observer=observe, **OPTIONS)
    assert (summary.interrupted, summary.num_ok) == (True, 0)
    assert not runner.finished
    Runner().run(manifest, tmp_path, **OPTIONS)
    same(tmp_path, whole)


def test_a_stop_when_all_images_are_drawn_is_no_interruption(manifest: Path, tmp_path: Path) -> None:
    stop, runner = StopFlag(), Runner()

    def on_step(engine: CountingEngine) -> None:
        running = engine.scheduler.running
        is_last = engine.scheduler.no_more_requests and not engine.num_waiting
        if is_last and running and all(entry.num_steps == 1 for entry in running):
            stop.request("SIGTERM")

    runner.on_step = on_step
    summary = runner.run(manifest, tmp_path, stop=stop, **OPTIONS)
    assert (summary.interrupted, summary.num_ok, summary.num_shards) == (False, 20, 4)


# --- resuming what is finished -----------------------------------------------------------------


def test_a_finished_job_loads_no_model(manifest: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*.parquet")}
    runner = Runner()
    started = time.monotonic()
    summary = runner.run(manifest, out, **OPTIONS)
    assert time.monotonic() - started < 1
    assert runner.engine is None
    counts = (summary.num_ok, summary.num_images, summary.num_resumed, summary.num_quarantined_rows)
    assert counts == (20, 20, 20, 2)
    assert not summary.interrupted
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*.parquet")} == before


def test_state_may_be_deleted_when_done(manifest: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "_state")
    assert verify(out).problems == []
    runner = Runner()
    summary = runner.run(manifest, out, **OPTIONS)
    assert (runner.engine, summary.num_ok, summary.num_quarantined_rows) == (None, 20, 2)
    same(out, whole)


def test_state_deleted_before_the_end_costs_only_unpublished_shards(
    manifest: Path, whole: Path, tmp_path: Path
) -> None:
    stop, first = StopFlag(), Runner()
    first.on_step = stop_at(stop, 13)
    first.run(manifest, tmp_path, stop=stop, scheduling_policy="fifo", **OPTIONS)
    published = {row["prompt"] for row in read_table(tmp_path, "images")}
    assert 0 < len(published) < 20
    shutil.rmtree(tmp_path / "_state")
    second = Runner()
    assert second.run(manifest, tmp_path, scheduling_policy="fifo", **OPTIONS).num_ok == 20
    assert not published & set(second.finished)
    same(tmp_path, whole)


def test_a_deleted_table_of_a_published_shard_is_told_by_verify(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "images" / "shard-00001.parquet").unlink()
    (problem,) = verify(out).problems
    assert problem.file == "images/shard-00001.parquet"
    assert "missing" in problem.reason


# --- limits ------------------------------------------------------------------------------------


def test_limit(manifest: Path, tmp_path: Path) -> None:
    summary = Runner().run(manifest, tmp_path, limit=7, **OPTIONS)
    assert (summary.num_rows, summary.num_ok, summary.num_quarantined_rows) == (7, 6, 1)
    assert [row["row"] for row in read_table(tmp_path, "images")] == [0, 1, 2, 4, 5, 6]


def test_limit_0_does_nothing_well(manifest: Path, tmp_path: Path) -> None:
    runner = Runner()
    summary = runner.run(manifest, tmp_path / "out", limit=0, **OPTIONS)
    assert (summary.num_rows, summary.num_images, summary.interrupted) == (0, 0, False)
    assert runner.engine is None
    assert verify(tmp_path / "out").problems == []


def test_more_tasks_than_shards(manifest: Path, whole: Path, tmp_path: Path) -> None:
    for task in range(6):
        runner = Runner()
        summary = runner.run(manifest, tmp_path, num_tasks=6, task_index=task, **OPTIONS)
        assert (summary.num_shards, runner.engine is None) == (
            (4, False) if task == 0 else (1, True) if task < 4 else (0, True)
        )
    same(tmp_path, whole)
