"""Floors against figures worked out by hand; the whole command with a narrow model on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import bench_families
import pytest
import torch
from full_size_families import build


@pytest.mark.parametrize(("name", "seconds"), [("flux_dev", 2.64), ("sd35_large", 2.21)])
def test_floors_are_those_of_the_targets(name: str, seconds: float) -> None:
    """Of an image of 1024 × 1024 pixels in 28 steps, at 790 TFLOP/s."""
    capabilities = build(name, torch.device("meta"))[1].capabilities
    workload = bench_families.WORKLOADS[name]["1024"]
    requests = bench_families.requests_of("1024", workload, capabilities, 2, scale=1)
    floor = bench_families.flops_of(requests, capabilities) / 2 / 790e12
    assert floor == pytest.approx(seconds, abs=0.005)


def test_a_cell_that_the_model_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_families.parse_arguments(["--model", "sdxl", "--only", "exactness"])
    assert "sdxl has no cell exactness; it has 1024, 512, buckets" in capsys.readouterr().err


def test_exactness_of_whole_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a family that needs a guidance scale in every request."""
    options = ["--device", "cpu", "--tiny", "--compositions", "1", "--jobs", "1"]
    bench_families.main(["--model", "flux_dev", "--only", "exactness", *options])
    (exact,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (exact["found"]["num_jobs"], exact["found"]["max_abs_pixels"]) == (1, 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    options = ["--timed-steps", "1", "--compositions", "1", "--jobs", "0", "--out", str(out)]
    command = ["--model", "flux_schnell", "--device", "cpu", "--tiny", "--only", "512", "exactness"]
    bench_families.main(command + options)
    records = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert records == json.loads(out.read_text())
    *speeds, exact = records
    assert [own["system"] for own in speeds] == ["diffusers_serial", "diffusers_batch", "offdiff"]
    tokens, width, layers = 512 + 4 * 4, 2 * 32, 2 + 2
    flops = 4 * layers * (24 * width**2 * tokens + 4 * tokens**2 * width)  # 4 steps, no guidance
    for own in speeds:
        assert own["floor_s_per_image"] == pytest.approx(flops / 790e12, rel=1e-4)
        assert (own["num_steps"], own["num_timed_steps"], own["is_scaled"]) == (4, 2, True)
        assert own["wall_s_per_image"] > own["s_per_image"]
    ratio = speeds[0]["wall_s_per_image"] / speeds[2]["wall_s_per_image"]
    assert speeds[2]["wall_ratio_to_diffusers_serial"] == pytest.approx(ratio, rel=1e-3)
    assert exact["workload"] == "flux_schnell-exactness"
    assert exact["found"]["max_abs_noise_pred"] == exact["found"]["max_abs_latents"] == 0
    assert exact["found"]["num_requests"] > 1
