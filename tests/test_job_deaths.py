"""What a whole job tells of its images for the case that it dies, and what the next run makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_fakes import CountingEngine, FailingModel, Runner, loaded_model, make_rows, read_table, write_jsonl

from offline_diffusion.data.deaths import MAX_KILLS
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
