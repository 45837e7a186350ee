"""Stopping, resuming and refusing: nothing is lost, nothing is drawn twice, nothing is mixed."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from job_fakes import (
    SMALL,
    CountingEngine,
    Rows,
    Runner,
    contents,
    make_rows,
    pixels_by_key,
    read_table,
    write_jsonl,
)

from offline_diffusion.data.verify import verify
from offline_diffusion.errors import JobError, JobInterrupted, JobMismatchError
from offline_diffusion.job import Progress, StopFlag

OPTIONS: dict[str, Any] = {"shard_size": 6, "max_num_seqs": 4, "device": "cpu"} | SMALL


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 rows, two of them faulty, one with three images: 20 images."""
    rows = make_rows(20)
    rows[3]["prompt"] = ""
    rows[12]["num_images_per_prompt"] = 3
    rows[14]["seed"] = -1
    for row in rows:
        row["tag"] = f"tag {row['id']}"
    return write_jsonl(tmp_path_factory.mktemp("manifest") / "m.jsonl", rows)


@pytest.fixture(scope="module")
def whole(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert Runner().run(manifest, out, **OPTIONS).num_ok == 20
    return out


def same(out: Path, whole: Path) -> None:
    """Both folders hold the same dataset, to the last bit of every pixel."""
    for ours, theirs in zip(contents(out), contents(whole), strict=True):
        assert ours == theirs
    pixels_by_key(out)
    assert verify(out).problems == []
    assert verify(out).pending == []


def stop_at(stop: StopFlag, num_images: int, times: int = 1) -> Any:
    """Asks to stop as soon as the engine has finished ``num_images``."""

    def on_step(engine: CountingEngine) -> None:
        if sum(engine.finished.values()) >= num_images and not stop.requests:
            for _ in range(times):
                stop.request("SIGTERM")

    return on_step


@pytest.mark.parametrize("num_images", [0, 1, 5, 11])
def test_a_stop_drains_and_the_next_run_goes_on(
    manifest: Path, whole: Path, tmp_path: Path, num_images: int
) -> None:
    stop, lines, first = StopFlag(), [], Runner()
    first.on_step = stop_at(stop, num_images)
    summary = first.run(manifest, tmp_path, stop=stop, say=lines.append, **OPTIONS)
    assert summary.interrupted
    assert any("SIGTERM" in line and "once more to stop now" in line for line in lines)
    drawn = sum(first.finished.values())
    assert num_images <= drawn < 20
    assert (summary.num_ok, summary.num_failed, summary.num_resumed) == (drawn, 0, 0)
    assert 20 <= summary.num_images <= 22
    assert first.engine is not None
    assert first.engine.num_wasted_steps == 0, "what was running must be finished"
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


def test_a_drain_that_takes_too_long_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offline_diffusion.job.DRAIN_S", 0.2)
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(3))
    stop, runner = StopFlag(), Runner()
    runner.on_step = stop_at(stop, 0)
    summary = runner.run(manifest, tmp_path / "out", stop=stop, **SMALL | {"num_inference_steps": 5_000})
    assert summary.interrupted
    assert summary.num_ok == 0


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
        if engine.scheduler.no_more_requests and not engine.num_waiting:
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


# --- other jobs are refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 5}, ["options.seed: 0 -> 5"]),
        ({"num_inference_steps": 3}, ["options.num_inference_steps: 2 -> 3"]),
        ({"height": 48, "width": 48}, ["options.height: 32 -> 48", "options.width: 32 -> 48"]),
        ({"negative_prompt": "grey"}, ["options.negative_prompt: null -> grey"]),
        ({"true_cfg_scale": 2.0}, ["options.true_cfg_scale: null -> 2.0"]),
        ({"on_bad_size": "crop"}, ["options.on_bad_size: error -> crop"]),
        ({"image_format": "webp"}, ["options.image_format: png -> webp"]),
        ({"dtype": "bfloat16"}, ["options.dtype: float32 -> bfloat16"]),
        ({"shard_size": 7}, ["options.shard_size: 6 -> 7"]),
        ({"limit": 10}, ["limit: null -> 10", "num_rows: 20 -> 10"]),
        ({"map": {"tag": "negative_prompt"}}, ["tag"]),
    ],
)
def test_other_options_are_refused(
    manifest: Path, whole: Path, change: dict[str, Any], words: list[str]
) -> None:
    runner = Runner()
    with pytest.raises(JobMismatchError) as caught:
        runner.run(manifest, whole, **OPTIONS | change)
    text = str(caught.value)
    assert str(whole) in text
    assert all(word in text for word in words), text
    assert caught.value.hint
    assert runner.engine is None
    assert verify(whole).problems == []


@pytest.mark.parametrize("change", [{"max_num_seqs": 1}, {"scheduling_policy": "fifo"}, {"num_tasks": 2}])
def test_options_that_change_no_pixel_are_taken(manifest: Path, whole: Path, change: dict[str, Any]) -> None:
    runner = Runner()
    assert runner.run(manifest, whole, **OPTIONS | change).num_ok > 0
    assert runner.engine is None


def test_another_model_is_refused(manifest: Path, whole: Path, tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(tiny_model, other)
    (other / "generation_config.json").write_text('{"true_cfg_scale": 3.0}')
    with pytest.raises(JobMismatchError, match="tiny-qwen-image -> ") as caught:
        Runner().run(manifest, whole, model=str(other), **OPTIONS)
    assert str(other) in str(caught.value)


def test_a_model_whose_configs_changed_is_refused(manifest: Path, tiny_model: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model, model)
    Runner().run(manifest, out, model=str(model), **OPTIONS)
    path = model / "transformer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_layers": 1}))
    with pytest.raises(JobMismatchError, match=r"model\."):
        Runner().run(manifest, out, model=str(model), **OPTIONS)


def test_a_changed_manifest_is_refused(whole: Path, manifest: Path, tmp_path: Path) -> None:
    text = manifest.read_text(encoding="utf-8").replace("view 7", "view 8")
    changed = tmp_path / "m.jsonl"
    changed.write_text(text, encoding="utf-8")
    with pytest.raises(JobMismatchError, match="manifest") as caught:
        Runner().run(changed, whole, **OPTIONS)
    assert "--allow-manifest-change" in str(caught.value.hint)


def test_a_moved_or_touched_manifest_is_the_same(whole: Path, manifest: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.jsonl"
    shutil.copy(manifest, moved)
    runner = Runner()
    assert runner.run(moved, whole, **OPTIONS).num_ok == 20
    assert runner.engine is None


def test_a_folder_of_somebody_else_is_refused(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(JobError, match=r"thesis\.txt") as caught:
        Runner().run(manifest, tmp_path, **OPTIONS)
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


# --- a changed manifest that is allowed --------------------------------------------------------


def changed_rows() -> Rows:
    """Of 18 rows: two deleted, three inserted, two edited, two swapped."""
    rows = make_rows(18)
    del rows[11], rows[2]
    rows.insert(0, {"id": "new-0", "prompt": "a new boat", "seed": 90})
    rows.insert(9, {"id": "new-1", "prompt": "a new sea", "seed": 91})
    rows.append({"id": "new-2", "prompt": "a new tree", "seed": 92})
    rows[5]["prompt"] += " by night"
    rows[7]["seed"] = 1_000
    rows[12], rows[13] = rows[13], rows[12]
    return rows


@pytest.mark.parametrize("finished", [True, False])
def test_a_changed_manifest_keeps_unchanged_rows(tmp_path: Path, finished: bool) -> None:
    out, stop = tmp_path / "out", StopFlag()
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(18))
    first = Runner()
    if not finished:
        first.on_step = stop_at(stop, 9)
    first.run(manifest, out, stop=stop, **OPTIONS)
    write_jsonl(manifest, changed_rows())
    with pytest.raises(JobMismatchError):
        Runner().run(manifest, out, **OPTIONS)
    second = Runner()
    summary = second.run(manifest, out, allow_manifest_change=True, **OPTIONS)
    assert (summary.num_ok, summary.num_images, summary.interrupted) == (19, 19, False)
    unchanged = {row["prompt"] for row in make_rows(18)} & {row["prompt"] for row in changed_rows()}
    unchanged -= {changed_rows()[7]["prompt"]}  # another seed
    expected = {row["prompt"] for row in changed_rows()} - (unchanged & set(first.finished))
    assert set(second.finished) == expected
    if finished:
        assert len(expected) == 5
    Runner().run(manifest, tmp_path / "fresh", **OPTIONS)
    same(out, tmp_path / "fresh")
    assert {row["id"]: row["seed"] for row in read_table(out, "images")} == {
        row["id"]: row["seed"] for row in changed_rows()
    }
    assert Runner().run(manifest, out, **OPTIONS).num_resumed == 19


def test_a_longer_limit_keeps_what_is_there(manifest: Path, whole: Path, tmp_path: Path) -> None:
    first = Runner()
    assert first.run(manifest, tmp_path, limit=8, **OPTIONS).num_rows == 8
    second = Runner()
    summary = second.run(manifest, tmp_path, allow_manifest_change=True, **OPTIONS)
    assert summary.num_ok == 20
    assert not set(first.finished) & set(second.finished)
    same(tmp_path, whole)


def test_a_changed_manifest_excuses_no_other_option(whole: Path, tmp_path: Path) -> None:
    changed = write_jsonl(tmp_path / "m.jsonl", make_rows(3))
    with pytest.raises(JobMismatchError, match=r"options\.seed: 0 -> 1") as caught:
        Runner().run(changed, whole, allow_manifest_change=True, **OPTIONS | {"seed": 1})
    assert "--allow-manifest-change" not in str(caught.value.hint)


def test_a_stopped_change_goes_on(tmp_path: Path) -> None:
    out, stop = tmp_path / "out", StopFlag()
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(18))
    Runner().run(manifest, out, **OPTIONS)
    write_jsonl(manifest, changed_rows())
    cut = Runner()
    cut.on_step = stop_at(stop, 1)
    summary = cut.run(manifest, out, stop=stop, allow_manifest_change=True, **OPTIONS | {"max_num_seqs": 1})
    assert summary.interrupted
    rest = Runner()
    assert rest.run(manifest, out, **OPTIONS).num_ok == 19
    assert sum(cut.finished.values()) + sum(rest.finished.values()) == 5
    Runner().run(manifest, tmp_path / "fresh", **OPTIONS)
    same(out, tmp_path / "fresh")


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
        assert (summary.num_shards, runner.engine is None) == ((1, False) if task < 4 else (0, True))
    same(tmp_path, whole)
