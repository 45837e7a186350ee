"""Images that fail: they are told, their neighbours are as ever, and --retry-failed makes only them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from job_fakes import (
    SMALL,
    CountingEngine,
    FailingModel,
    Runner,
    loaded_model,
    make_rows,
    pixels_by_key,
    read_table,
    write_jsonl,
)

from offline_diffusion import draw_loop
from offline_diffusion.cli.main import main
from offline_diffusion.data import failures
from offline_diffusion.data.verify import verify
from offline_diffusion.errors import TooManyFailuresError
from offline_diffusion.progress import StopFlag

FAILING = {
    2: ("TOKENIZE", "model_error", "RuntimeError: a made-up tokenizer fault"),
    5: ("ENCODE", "model_error", "RuntimeError: a made-up encoder fault"),
    6: ("STEP", "model_error", "RuntimeError: a made-up fault in a step"),
    11: ("NAN", "nan", "NaN"),
    13: ("MEMORY", "out_of_memory", "made up"),
}
"""Row → the word that makes it fail, and what must be recorded."""


def rows_that_fail(count: int = 16) -> list[dict[str, Any]]:
    rows = make_rows(count)
    for number, (word, _, _) in FAILING.items():
        rows[number]["prompt"] += f" {word}"
    return rows


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "m.jsonl", rows_that_fail())


@pytest.fixture
def reference(manifest: Path, tmp_path: Path) -> dict[tuple[str, int], str]:
    Runner().run(manifest, tmp_path / "reference", max_num_seqs=4, shard_size=6, **SMALL)
    return pixels_by_key(tmp_path / "reference")


def run_cli(runner: Runner, manifest: Path, out: Path, *more: str) -> Any:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    options += ["--model=tiny", "--shard-size=6", "--max-num-seqs=4"]
    command = ["run", str(manifest), "--out", str(out), *options, *more]
    return CliRunner().invoke(main, command, obj=runner.run_task)


def test_failures_are_told_and_retried_alone(
    manifest: Path, tmp_path: Path, reference: dict[tuple[str, int], str]
) -> None:
    out = tmp_path / "out"
    result = run_cli(Runner(FailingModel(loaded_model())), manifest, out)
    assert result.exit_code == 3
    assert "Traceback" not in result.output
    assert "done: 11 of 16 images" in result.stderr
    assert "5 images failed" in result.stderr
    metrics = read_table(out, "metrics")
    assert [row["row"] for row in metrics] == list(range(16))
    for row in metrics:
        _, error_type, error = FAILING.get(row["row"], ("", None, None))
        assert (row["status"], row["error_type"]) == ("failed" if error_type else "ok", error_type)
        assert error is None or error in row["error"]
    failures = read_table(out, "failures")
    told = [(row["row"], row["image_index"], row["error_type"], row["file"], row["line"]) for row in failures]
    assert told == [(n, 0, kind, str(manifest), n + 1) for n, (_, kind, _) in FAILING.items()]
    good = {key: value for key, value in reference.items() if int(key[0][1:]) not in FAILING}
    assert pixels_by_key(out) == good
    assert verify(out).problems == []

    again = Runner()
    result = run_cli(again, manifest, out)
    assert (result.exit_code, again.engine) == (3, None)

    healed = Runner()
    result = run_cli(healed, manifest, out, "--retry-failed")
    assert result.exit_code == 0, result.output
    assert "done: 16 of 16 images" in result.stderr
    assert "11 images done before" in result.stderr
    assert set(healed.finished) == {rows_that_fail()[number]["prompt"] for number in FAILING}
    assert set(healed.finished.values()) == {1}
    assert pixels_by_key(out) == reference
    assert not any((out / "failures").glob("*.parquet"))
    assert verify(out).problems == []


def test_what_fails_again_stays_failed(manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for options in ([], ["--retry-failed"]):
        runner = Runner(FailingModel(loaded_model()))
        result = run_cli(runner, manifest, out, *options)
        assert result.exit_code == 3
        assert "5 images failed" in result.stderr
        assert len(read_table(out, "images")) == 11
        assert verify(out).problems == []
    assert sum(runner.finished.values()) == len(FAILING)


def test_one_failing_image_of_several(tmp_path: Path) -> None:
    """Only image 1 of a row fails; the others of the row stay."""

    class SecondFails(FailingModel):
        def prepare_latents(self, request: Any) -> Any:
            latents = self._model.prepare_latents(request)
            return latents * float("nan") if request.seed == 6 else latents

    manifest = write_jsonl(tmp_path / "m.jsonl", [{"prompt": "a cup", "seed": 5, "num_images_per_prompt": 3}])
    out = tmp_path / "out"
    summary = Runner(SecondFails(loaded_model())).run(manifest, out, **SMALL)
    assert (summary.num_ok, summary.num_failed, summary.num_images) == (2, 1, 3)
    assert [row["image_index"] for row in read_table(out, "images")] == [0, 2]
    (failure,) = read_table(out, "failures")
    assert (failure["image_index"], failure["error_type"]) == (1, "nan")
    healed = Runner()
    assert healed.run(manifest, out, retry_failed=True, **SMALL).num_ok == 3
    assert sum(healed.finished.values()) == 1
    assert [row["seed"] for row in read_table(out, "images")] == [5, 6, 7]


def test_retrying_after_a_stop_keeps_what_is_good(
    manifest: Path, tmp_path: Path, reference: dict[tuple[str, int], str]
) -> None:
    """A retry that is cut off, then run again, ends with the full dataset."""
    out, options = tmp_path / "out", {"max_num_seqs": 4, "shard_size": 6} | SMALL
    Runner(FailingModel(loaded_model())).run(manifest, out, **options)
    before = pixels_by_key(out)

    def die(engine: Any) -> None:
        if engine.finished:
            raise KeyboardInterrupt

    cut = Runner()
    cut.on_step = die
    with pytest.raises(KeyboardInterrupt):
        cut.run(manifest, out, retry_failed=True, **options)
    rest = Runner()
    summary = rest.run(manifest, out, retry_failed=True, **options)
    assert (summary.num_ok, summary.num_failed) == (16, 0)
    assert sum(cut.finished.values()) + sum(rest.finished.values()) == len(FAILING)
    after = pixels_by_key(out)
    assert after == reference
    assert before.items() <= after.items()


def test_a_number_of_failures_stops_the_job(manifest: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"max_num_seqs": 1, "scheduling_policy": "fifo", "shard_size": 6} | SMALL
    runner = Runner(FailingModel(loaded_model()))
    with pytest.raises(
        TooManyFailuresError, match=r"3 images failed and 0 rows .* of \d+ begun; --max-failures is 2"
    ) as caught:
        runner.run(manifest, out, max_failures="2", **options)
    assert caught.value.hint
    # An image is kept once it was handed in: what is drawn is never drawn again.
    rest = Runner()
    summary = rest.run(manifest, out, retry_failed=True, **options)
    assert (summary.num_ok, summary.num_failed, summary.num_images) == (16, 0, 16)
    assert not set(rest.finished) & {
        prompt for prompt in runner.finished if not any(word in prompt for word, _, _ in FAILING.values())
    }


def test_as_many_failures_as_allowed_do_not_stop_the_job(manifest: Path, tmp_path: Path) -> None:
    summary = Runner(FailingModel(loaded_model())).run(manifest, tmp_path / "out", max_failures="5", **SMALL)
    assert (summary.num_ok, summary.num_failed) == (11, 5)


@pytest.mark.parametrize(("share", "stops"), [("4%", True), ("30%", False)])
def test_a_share_of_failures_counts_once_there_are_enough_images(
    tmp_path: Path, share: str, stops: bool
) -> None:
    rows = make_rows(130)
    for number in range(0, 130, 5):  # 20 % fail, from the first image on
        rows[number]["prompt"] += " TOKENIZE"
    manifest = write_jsonl(tmp_path / "m.jsonl", rows)
    runner = Runner(FailingModel(loaded_model()))
    options = SMALL | {"height": 16, "width": 16, "max_num_seqs": 8}
    if not stops:
        assert runner.run(manifest, tmp_path / "out", max_failures=share, **options).num_failed == 26
        return
    with pytest.raises(TooManyFailuresError, match=f"--max-failures is {share}"):
        runner.run(manifest, tmp_path / "out", max_failures=share, **options)
    assert sum(runner.finished.values()) >= 100


def test_a_full_disk_ends_the_job_with_a_message(manifest: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The writing thread waits in vain for space, and its error reaches the user; the next run goes on."""
    import errno
    import os

    from offline_diffusion.data import disk_full

    monkeypatch.setattr(disk_full, "PAUSE_S", 0.2)
    out, real, left = tmp_path / "out", os.write, [40_000]

    def write(fd: int, data: Any) -> int:
        if str(out) in os.readlink(f"/proc/self/fd/{fd}"):
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    result = run_cli(Runner(), manifest, out)
    monkeypatch.undo()
    assert result.exit_code == 75, result.output
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.output
    result = run_cli(Runner(), manifest, out)
    assert result.exit_code == 0
    assert verify(out).problems == []


def test_failures_of_all_workers_count(manifest: Path, tmp_path: Path) -> None:
    """Two tasks one after the other, 5 failures in all. Catches a limit that each of them has for itself."""
    out, runner, stop = tmp_path / "out", Runner(FailingModel(loaded_model())), StopFlag()
    options = SMALL | {"shard_size": 2, "num_tasks": 2, "max_num_seqs": 2, "scheduling_policy": "fifo"}

    def stop_early(engine: CountingEngine) -> None:
        if engine.num_steps == 6:
            stop.request("enough")

    runner.on_step = stop_early
    num_failed = runner.run(manifest, out, task_index=0, stop=stop, max_failures="4", **options).num_failed
    assert 0 < num_failed < 5
    runner.on_step = lambda engine: None
    with pytest.raises(TooManyFailuresError, match=r"5 images failed and 0 rows .*; --max-failures is 4"):
        runner.run(manifest, out, task_index=1, max_failures="4", **options)
    assert runner.run(manifest, out, task_index=1, max_failures="5", **options).num_failed <= 5 - num_failed
    summary = Runner().run(manifest, out, retry_failed=True, max_failures="0", **options)
    assert summary.num_failed == 0, "what is made again does not count"


def test_a_worker_without_failures_stops_for_those_of_others(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(failures, "MAX_SHARE", 1.0)
    monkeypatch.setattr(draw_loop, "LOOK_AHEAD", 2)  # so that not all shards are its own at once
    out, options = tmp_path / "out", {"shard_size": 2, "max_num_seqs": 2} | SMALL
    (tmp_path / "other").mkdir()
    Runner(FailingModel(loaded_model())).run(manifest, tmp_path / "other" / "out", **options)
    runner = Runner()  # draws all

    def other_publishes(engine: CountingEngine) -> None:
        if engine.num_steps == 3:
            for marker in (tmp_path / "other" / "out" / "_state" / "shards").iterdir():
                if marker.stem in ("shard-00005", "shard-00006"):
                    marker.rename(out / "_state" / "shards" / marker.name)

    runner.on_step = other_publishes
    with pytest.raises(TooManyFailuresError, match="2 images failed"):
        runner.run(manifest, out, max_failures="1", scheduling_policy="fifo", **options)
    assert runner.engine is not None
    assert runner.engine.num_steps < 8


def test_a_job_with_too_many_failures_does_not_begin(manifest: Path, tmp_path: Path) -> None:
    out, runner = tmp_path / "out", Runner(FailingModel(loaded_model()))
    options = SMALL | {"shard_size": 4}
    runner.run(manifest, out, **options)
    (out / "_state" / "shards" / "shard-00000.json").unlink()
    with pytest.raises(TooManyFailuresError, match="4 images failed") as caught:
        runner.run(manifest, out, max_failures="3", **options)
    assert runner.engine is None, "a model was loaded for nothing"
    assert "--retry-failed" in str(caught.value.hint)
