"""``offdiff plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offline_diffusion.cli.cost_record import remember
from offline_diffusion.cli.main import main
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.cost import CostModel, MeasuredCost

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "manifests" / "quickstart.jsonl"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path) -> None:
    """No run of another test is remembered here; ``tiny_model`` is made before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def invoke(model: Path, *args: object) -> Result:
    return CliRunner().invoke(main, ["plan", str(QUICKSTART), "--model", str(model), *map(str, args)])


def plan(model: Path, *args: object) -> dict[str, Any]:
    result = invoke(model, *args, "--json")
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def quickstart_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in QUICKSTART.read_text().splitlines()]


def test_counts_are_those_of_the_manifest(tiny_model: Path) -> None:
    rows = quickstart_rows()
    values = plan(tiny_model)
    assert values["num_rows"] == values["num_good_rows"] == len(rows)
    assert values["num_images"] == sum(row.get("num_images_per_prompt", 1) for row in rows)
    assert values["resolutions"]["96x144"] == 2  # one row, two images
    twenty = sum(row.get("num_images_per_prompt", 1) for row in rows if row["num_inference_steps"] == 20)
    assert values["inference_steps"]["20"] == twenty
    assert 0 < values["step_fill"] <= 1
    assert values["num_steps"] >= 28


def test_work_grows_with_the_steps(tiny_model: Path) -> None:
    rows = quickstart_rows()
    values = plan(tiny_model)
    config = json.loads((tiny_model / "transformer/config.json").read_text())
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    least = 0.0
    for row in rows:
        tokens = row["height"] // 16 * (row["width"] // 16)
        forward = config["num_layers"] * (24 * hidden**2 * tokens + 4 * tokens**2 * hidden)
        guided = row.get("true_cfg_scale", 4) > 1 and row.get("negative_prompt") is not None
        images = row.get("num_images_per_prompt", 1)
        least += forward * row["num_inference_steps"] * images * (2 if guided else 1)
    assert least < values["flops"] < 1.3 * least  # the rest are text tokens


def test_shards_fall_on_tasks(tiny_model: Path) -> None:
    values = plan(tiny_model, "--num-tasks", 3, "--shard-size", 5)
    assert values["num_shards"] == 5
    assert sorted(task["num_shards"] for task in values["tasks"]) == [1, 2, 2]
    assert sum(task["flops"] for task in values["tasks"]) == pytest.approx(values["flops"])
    slowest = max(task["flops"] for task in values["tasks"])
    assert values["seconds"] == pytest.approx(slowest / 400e12)
    assert sum(task["num_steps"] for task in values["tasks"]) == values["num_steps"]
    assert values["flops"] / 3 <= slowest < 4 / 3 * values["flops"] / 2


TERMS = CostModel(fixed_s=3.0, token_s=0.01, square_s=1e-6, image_s=7.0, pixel_s=1e-5, prompt_s=11.0)


def run_before(model: Path, *, budget: int = 2_000, **options: Any) -> None:
    """A run whose steps cost ``TERMS``."""
    cost = MeasuredCost(
        model=TERMS,
        num_steps=1_234,
        seconds=62.0,
        num_images=240,
        max_num_batched_tokens=budget,
        dtype="float32",
    )
    remember(cost, EngineConfig(model=str(model), device="cpu", **options))


def test_without_a_run_the_estimate_is_assumed(tiny_model: Path) -> None:
    values = plan(tiny_model)
    assert values["time_basis"].startswith("assumed 400 TFLOP/s")
    assert (values["flops_per_s"], values["cost"]) == (400e12, None)
    assert values["device_seconds"] == pytest.approx(values["flops"] / 400e12)
    assert values["max_num_batched_tokens"] == 16_896


def test_after_a_run_the_estimate_is_the_cost_models(tiny_model: Path) -> None:
    run_before(tiny_model)
    values = plan(tiny_model, "--num-tasks", 2, "--shard-size", 5)
    assert values["time_basis"].startswith("cost model measured on CPU over 1,234 steps on 20")
    assert values["flops_per_s"] is None
    assert values["cost"] == {
        "fixed_s": 3.0, "token_s": 0.01, "square_s": 1e-6, "image_s": 7.0, "pixel_s": 1e-5, "prompt_s": 11.0
    }  # fmt: skip
    for task in values["tasks"]:
        by_hand = 3.0 * task["num_steps"] + 0.01 * task["step_tokens"] + 1e-6 * task["step_squares"]
        by_hand += 7.0 * task["num_images"] + 1e-5 * task["num_pixels"] + 11.0 * task["num_prompts"]
        assert task["seconds"] == pytest.approx(by_hand)
    seconds = [task["seconds"] for task in values["tasks"]]
    assert (values["seconds"], values["device_seconds"]) == (max(seconds), pytest.approx(sum(seconds)))
    rows = quickstart_rows()
    pixels = sum(row["height"] * row["width"] * row.get("num_images_per_prompt", 1) for row in rows)
    assert sum(task["num_pixels"] for task in values["tasks"]) == pixels
    text = invoke(tiny_model, "--num-tasks", 2, "--shard-size", 5).stdout
    assert "on 2 tasks (cost model measured on CPU over 1,234 steps on 20" in text


def test_a_stated_rate_wins_over_the_cost_model(tiny_model: Path) -> None:
    run_before(tiny_model)
    values = plan(tiny_model, "--tflops", "0.5")
    assert (values["time_basis"], values["flops_per_s"], values["cost"]) == ("--tflops 0.5", 5e11, None)
    assert values["seconds"] == pytest.approx(values["flops"] / 5e11)


def test_a_run_in_another_number_format_tells_nothing(tiny_model: Path) -> None:
    run_before(tiny_model, quantization="fp8")
    assert plan(tiny_model)["cost"] is None


def test_the_budget_is_the_options_or_else_the_measured_one(tiny_model: Path) -> None:
    run_before(tiny_model, budget=600)
    measured, stated = plan(tiny_model), plan(tiny_model, "--max-num-batched-tokens", 16_896)
    assert (measured["max_num_batched_tokens"], stated["max_num_batched_tokens"]) == (600, 16_896)
    assert measured["num_steps"] > stated["num_steps"]
    assert "of 600 tokens (as the last run measured it) filled" in invoke(tiny_model).stdout


def test_a_budget_that_was_given_to_a_run_is_no_other_jobs(tiny_model: Path) -> None:
    run_before(tiny_model, budget=600, max_num_batched_tokens=600)
    values = plan(tiny_model)
    assert values["max_num_batched_tokens"] == 16_896
    assert values["budget_basis"].startswith("the default")


def test_the_jobs_policy_is_simulated(tiny_model: Path, tmp_path: Path) -> None:
    """Large and small in turn: only who looks ahead puts the small ones together."""
    manifest, job = tmp_path / "m.jsonl", tmp_path / "job.yaml"
    sizes = (256, 64) * 20
    manifest.write_text("".join(f'{{"prompt": "a", "height": {size}, "width": {size}}}\n' for size in sizes))
    num_steps = {}
    for policy in ("pack", "fifo"):
        job.write_text(f"manifests: {manifest}\nmodel: {tiny_model}\nscheduling_policy: {policy}\n")
        args = ["plan", "--job", str(job), "--max-num-batched-tokens", "260", "--json"]
        num_steps[policy] = json.loads(CliRunner().invoke(main, args).stdout)["num_steps"]
    assert num_steps == {"pack": 22 * 12, "fifo": 40 * 12}


def test_row_defaults_and_faults(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n{"prompt": "b", "height": 50}\n')
    args = ["plan", str(path), "--model", str(tiny_model), "--height", "64", "--width", "128"]
    result = CliRunner().invoke(main, [*args, "--num-inference-steps", "3", "--json"])
    values = json.loads(result.stdout)
    assert (values["num_rows"], values["num_good_rows"], values["num_faulty_rows"]) == (3, 1, 2)
    assert values["resolutions"] == {"128x64": 1}
    assert values["inference_steps"] == {"3": 1}
    assert list(values["faults"].values()) == [1]
    text = CliRunner().invoke(main, args).stdout
    assert "3, of them 2 faulty" in text
    assert "cannot draw  1 row: height must be a multiple of 16, got 50" in text


def test_text_for_people(tiny_model: Path) -> None:
    result = invoke(tiny_model, "--num-tasks", 2, "--shard-size", 5)
    assert result.exit_code == 0
    for word in ("rows", "images", "tokens", "work", "packing", "output", "time", "size", "steps", "task"):
        assert f"{word} " in result.stdout
    assert "busiest task: " in result.stdout
    assert result.stderr == ""


def test_a_manifest_that_is_not_there(tiny_model: Path) -> None:
    result = CliRunner().invoke(main, ["plan", "none.jsonl", "--model", str(tiny_model)])
    assert result.exit_code == 1
    assert "none.jsonl" in result.stderr


def test_a_negative_rate_is_refused(tiny_model: Path) -> None:
    assert invoke(tiny_model, "--tflops", "-1").exit_code == 2
