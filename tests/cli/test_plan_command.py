"""``offdiff plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offline_diffusion.cli.main import main
from offline_diffusion.cli.throughput import remember

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
    assert values["resolutions"]["144x272"] == 2
    sixteen = sum(row["num_inference_steps"] == 16 for row in rows)
    assert values["inference_steps"]["16"] == sixteen
    assert 0 < values["step_fill"] <= 1
    assert values["num_steps"] >= 16


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
    assert [task["num_shards"] for task in values["tasks"]] == [2, 2, 1]
    assert sum(task["flops"] for task in values["tasks"]) == pytest.approx(values["flops"])
    slowest = max(task["flops"] for task in values["tasks"])
    assert values["seconds"] == pytest.approx(slowest / values["flops_per_s"])
    assert slowest >= values["balanced_flops"] >= values["flops"] / 3


def test_the_time_estimate_names_what_it_rests_on(tiny_model: Path) -> None:
    assumed = plan(tiny_model)
    assert assumed["time_basis"].startswith("assumed 400 TFLOP/s")
    assert assumed["device_seconds"] == pytest.approx(assumed["flops"] / 400e12)
    remember(str(tiny_model), "NVIDIA H200", 2e9, 240, 62.0)
    measured = plan(tiny_model)
    assert measured["time_basis"].startswith("measured on NVIDIA H200 over 240 images in 1 min 02 s on 20")
    assert measured["flops_per_s"] == 2e9
    stated = plan(tiny_model, "--tflops", "0.5")
    assert (stated["time_basis"], stated["flops_per_s"]) == ("--tflops 0.5", 5e11)


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
