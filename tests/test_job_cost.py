"""What a task says its steps cost."""

from __future__ import annotations

from pathlib import Path

from job_fakes import SMALL, Runner, make_rows, write_jsonl

from offline_diffusion.engine.stats import NUM_WARM_UP_STEPS
from offline_diffusion.job import StopFlag


def test_a_run_tells_what_its_steps_cost_and_on_what_that_rests(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(10))
    runner = Runner()
    options = SMALL | {"num_inference_steps": 4, "max_num_seqs": 2, "device": "cpu"}
    summary = runner.run(manifest, tmp_path / "out", **options)
    cost = summary.cost
    assert cost is not None
    assert cost.num_steps == 10 * 4 // 2 - NUM_WARM_UP_STEPS
    assert (cost.num_images, cost.max_num_batched_tokens, cost.dtype) == (10, 16_896, "float32")
    assert 0 < cost.seconds < summary.seconds
    again = Runner().run(manifest, tmp_path / "out", **options)
    assert again.cost is None  # nothing was left to draw


def test_an_interrupted_run_tells_it_too(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(10))
    runner, stop = Runner(), StopFlag()
    runner.on_step = lambda engine: stop.request("SIGTERM") if engine.num_steps == 14 else None
    options = SMALL | {"num_inference_steps": 4, "max_num_seqs": 2, "device": "cpu"}
    summary = runner.run(manifest, tmp_path / "out", stop=stop, **options)
    assert summary.interrupted
    assert summary.cost is not None
    assert summary.cost.num_images == summary.num_ok < 10
