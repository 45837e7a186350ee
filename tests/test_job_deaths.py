"""What a whole job tells of its images for the case that it dies, and what the next run makes of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from job_fakes import (
    CountingEngine,
    FailingModel,
    Runner,
    fail_at_step,
    loaded_model,
    make_rows,
    read_table,
    write_jsonl,
)

from offline_diffusion.data import sink as sink_module
from offline_diffusion.data.deaths import MAX_KILLS
from offline_diffusion.data.heartbeat import read_heartbeats
from offline_diffusion.errors import CrashError
from offline_diffusion.progress import StopFlag

OPTIONS: dict[str, Any] = {
    "device": "cpu", "height": 32, "width": 32, "num_inference_steps": 6, "shard_size": 4, "max_num_seqs": 2,
}  # fmt: skip


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "m.jsonl", make_rows(4))


def logged(out: Path) -> list[list[str]]:
    """What the only log says of images that were begun: place, hash, number and step."""
    (log,) = (out / "_state" / "flights").glob("*.log")
    return [line[1:].split(" ") for line in log.read_text().splitlines() if line.startswith("+")]


def stop_after(num_steps: int, stop: StopFlag, runner: Runner) -> None:
    def on_step(engine: CountingEngine) -> None:
        if engine.num_steps > num_steps and not stop.requests:
            stop.request("test")

    runner.on_step = on_step


def test_the_log_says_of_an_image_its_content_and_the_step_it_goes_on_from(
    manifest: Path, tmp_path: Path
) -> None:
    out, runner, stop = tmp_path / "out", Runner(), StopFlag()
    stop_after(3, stop, runner)
    assert runner.run(manifest, out, stop=stop, **OPTIONS).interrupted
    assert not list((out / "_state" / "flights").iterdir())  # it ended in good order
    found: list[list[str]] = []
    runner.on_step = lambda engine: found.extend(logged(out))
    runner.run(manifest, out, **OPTIONS)
    hashes = {f"{row['row']}:{row['image_index']}": row["row_hash"] for row in read_table(out, "metrics")}
    steps = {place: {int(step) for at, _, _, step in found if at == place} for place in hashes}
    assert {place: row_hash for place, row_hash, _, _ in found} == hashes
    assert {number for _, _, number, _ in found} == {"0"}
    assert [len(each) for each in steps.values()] == [1] * 4
    resumed = [each for each in steps.values() if each != {0}]
    assert len(resumed) == 2
    assert all(step in range(3, 6) for each in resumed for step in each)


@pytest.mark.parametrize(("step", "num_ok"), [(0, 4), (5, 3)])
def test_kills_before_the_last_checkpoint_do_not_set_an_image_aside(
    manifest: Path, tmp_path: Path, step: int, num_ok: int
) -> None:
    """Ten lone kills at the step where it still is are enough; at an earlier one it has got on since."""
    out, runner, stop = tmp_path / "out", Runner(), StopFlag()
    stop_after(3, stop, runner)
    runner.run(manifest, out, stop=stop, **OPTIONS)
    runner.run(manifest, tmp_path / "whole", **OPTIONS)
    row_hash = read_table(tmp_path / "whole", "metrics")[0]["row_hash"]
    flight = {"row": 0, "image_index": 0, "row_hash": row_hash, "number": 0, "step": step}
    (out / "_state" / "deaths").mkdir()
    for number in range(MAX_KILLS):
        death = {"worker": f"w{number}", "crash": "", "in_flight": [flight]}
        (out / "_state" / "deaths" / f"w{number}.json").write_text(json.dumps(death))
    assert Runner().run(manifest, out, **OPTIONS).num_ok == num_ok
    assert not list((out / "_state" / "deaths").iterdir())


def test_a_retry_says_so(tmp_path: Path) -> None:
    """Crashes of a retry are told from those before it by the number of the publication."""
    rows = make_rows(4)
    rows[1]["prompt"] = "STEP"
    manifest, out = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out"
    runner = Runner(FailingModel(loaded_model()))
    runner.run(manifest, out, **OPTIONS)
    found: list[list[str]] = []
    runner.on_step = lambda engine: found.extend(logged(out))
    runner.run(manifest, out, retry_failed=True, **OPTIONS)
    assert {(place, number) for place, _, number, _ in found} == {("1:0", "1")}


# --- what breaks the engine, and ends the process alive -------------------------------------------


class LosingModel(FailingModel):
    """Loses the device over the prompts that fail in a step: this and every later call raises."""

    is_lost = False

    def denoise_step(self, batch: Any) -> torch.Tensor:
        if not self.is_lost:
            try:
                return super().denoise_step(batch)
            except RuntimeError:
                self.is_lost = True
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more")


def in_flight(out: Path) -> list[list[int]]:
    """Of each death on record the rows in flight."""
    records = sorted((out / "_state" / "deaths").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [[each["row"] for each in json.loads(path.read_bytes())["in_flight"]] for path in records]


def test_a_row_that_loses_the_device_is_set_aside_after_two_runs(tmp_path: Path) -> None:
    """Catches a worker that ends as if nothing had happened: the row would be tried by every run."""
    rows, said = make_rows(6), list[str]()
    rows[1]["prompt"] = "STEP"
    manifest, out = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out"
    for num_deaths in (1, 2):
        runner = Runner(LosingModel(loaded_model()))
        with pytest.raises(
            CrashError, match="AcceleratorError: CUDA error: an illegal memory access"
        ) as told:
            runner.run(manifest, out, say=said.append, **OPTIONS)
        assert "\nand more" not in str(told.value)
        assert "one at a time" in str(told.value.hint)
        assert len(in_flight(out)) == num_deaths
        assert not list((out / "_state" / "flights").iterdir())
        assert {beat.state for beat in read_heartbeats(out)} == {"stopped"}, "others may go on at once"
    first, second = in_flight(out)
    assert 1 in first
    assert len(first) > 1
    assert second == [1]
    assert any("drawn one at a time" in line for line in said)
    assert Runner(LosingModel(loaded_model())).run(manifest, out, **OPTIONS).num_ok == 5
    (failure,) = read_table(out, "failures")
    assert (failure["row"], failure["error_type"]) == (1, "crash")
    assert "AcceleratorError: CUDA error: an illegal memory access was encountered" in failure["reason"]
    assert not in_flight(out)


def test_a_lost_device_is_a_crash_whoever_meets_it(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device reports late: here to the one who saves the steps."""

    def lost(engine: CountingEngine) -> Any:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(CountingEngine, "snapshot", lost)
    with pytest.raises(CrashError, match="unspecified launch failure"):
        Runner().run(manifest, tmp_path / "out", checkpoint_interval=1e-6, **OPTIONS)
    (rows,) = in_flight(tmp_path / "out")
    assert set(rows) >= {0, 1}


def test_what_a_lost_device_spoils_at_the_end_hides_no_crash(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that was being copied fails, too, and is met when the worker ends: the user must be told
    of the crash and how it goes on, not of this."""

    class LateSnapshot:
        def states(self) -> None:
            time.sleep(0.5)
            raise torch.AcceleratorError("CUDA error: the same, later")

    monkeypatch.setattr(CountingEngine, "snapshot", lambda engine: LateSnapshot())
    runner = Runner()
    runner.on_step = fail_at_step(2, torch.AcceleratorError("CUDA error: unspecified launch failure"))
    with pytest.raises(CrashError, match="unspecified launch failure"):
        runner.run(manifest, tmp_path / "out", checkpoint_interval=1e-6, **OPTIONS)
    assert {beat.state for beat in read_heartbeats(tmp_path / "out")} == {"stopped"}


def test_a_fault_of_the_engine_itself_counts_too(manifest: Path, tmp_path: Path) -> None:
    """It may be a row that brings it out: nobody else could find out."""
    runner = Runner()
    runner.on_step = fail_at_step(3, KeyError("a made-up fault of the scheduler"))
    with pytest.raises(CrashError, match="KeyError: 'a made-up fault"):
        runner.run(manifest, tmp_path / "out", **OPTIONS)
    assert len(in_flight(tmp_path / "out")) == 1


def test_a_fault_elsewhere_is_no_image_s(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of a thread that writes: whoever is in flight has nothing to do with it."""

    def broken(*_: object, **__: object) -> None:
        raise ValueError("a made-up bug")

    monkeypatch.setattr(sink_module, "make_record", broken)
    with pytest.raises(ValueError, match="a made-up bug"):
        Runner().run(manifest, tmp_path / "out", **OPTIONS)
    assert in_flight(tmp_path / "out") == []
    assert not list((tmp_path / "out" / "_state" / "flights").iterdir())


def test_a_keyboard_interrupt_in_a_step_is_no_crash(manifest: Path, tmp_path: Path) -> None:
    runner = Runner()
    runner.on_step = fail_at_step(3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        runner.run(manifest, tmp_path / "out", **OPTIONS)
    assert in_flight(tmp_path / "out") == []
