"""The whole command, with the tiny model on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_qwen_image
import pytest
from records import ROOT
from workloads import make_workloads

SCRIPT = ROOT / "benchmarks" / "bench_qwen_image.py"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("bench")
    prompts = folder / "prompts.txt"
    prompts.write_text(
        "a quiet lamp\na violet river under glass\nseven engines in a storm\n", encoding="utf-8"
    )
    out = folder / "results.json"
    command = [
        *(sys.executable, str(SCRIPT), "--device", "cpu", "--model", "tiny"),
        *("--only", "256", "forty_aspects", "--steps", "2", "--max-images", "2"),
        *("--systems", "diffusers_serial", "presorted", "packed"),
        *("--rival-steps", "1", "--rival-samples", "1", "--precisions", "bf16", "fp8"),
        *("--checks", "exactness", "quantization_error", "--num-compositions", "1", "--num-jobs", "1"),
        *("--prompts", str(prompts), "--out", str(out)),
    ]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    return lines, json.loads(out.read_text(encoding="utf-8"))


def test_the_last_line_is_what_was_saved(done: tuple[list[str], list[dict[str, Any]]]) -> None:
    lines, records = done
    assert json.loads(lines[-1]) == records
    first = next(index for index, line in enumerate(lines) if line.startswith("floor:"))
    assert all("about" in line for line in lines[:first])  # the plan, then the floor before any number


def test_every_system_has_its_record(done: tuple[list[str], list[dict[str, Any]]]) -> None:
    _, records = done
    of_256 = [(own["system"], own["precision"]) for own in records if own["workload"] == "256"]
    assert of_256 == [
        ("diffusers_serial", "bf16"),
        ("presorted", "bf16"),
        ("packed", "bf16"),
        ("packed", "fp8"),
    ]
    speeds = [own for own in records if own["s_per_image"]]
    assert len(speeds) == 8
    assert all(own["ratio_to_diffusers_serial"] for own in speeds)
    for own in speeds:
        rival = next(
            other
            for other in speeds
            if other["workload"] == own["workload"] and other["system"] == "diffusers_serial"
        )
        ratio = rival["s_per_image"] / own["s_per_image"]
        assert own["ratio_to_diffusers_serial"] == pytest.approx(ratio, rel=1e-3)


def test_ours_is_run_and_diffusers_is_told_to_be_scaled(done: tuple[list[str], list[dict[str, Any]]]) -> None:
    _, records = done
    for own in records:
        if own["system"].startswith("diffusers"):
            num_shapes = {"256": 1, "forty_aspects": 2}[own["workload"]]
            assert own["num_timed_steps"] == own["num_timed_images"] == num_shapes
            assert own["wall_s_per_image"] is None
        elif own["s_per_image"]:
            assert own["num_images"] == 2
            assert own["num_steps"] >= 2
            assert own["wall_s"] > own["denoise_s"]
            assert 0 < own["step_fill"] <= 1
            assert own["gpu_idle_share"] is None  # there is no GPU


def test_checks_ran_in_every_precision(done: tuple[list[str], list[dict[str, Any]]]) -> None:
    _, records = done
    found = {(own["workload"], own["precision"]): own["found"] for own in records if "found" in own}
    assert set(found) == {
        (check, p) for check in ("exactness", "quantization_error") for p in ("bf16", "fp8")
    }
    assert found["quantization_error", "bf16"]["noise_pred_relative_l2"] == 0
    assert 0.001 < found["quantization_error", "fp8"]["noise_pred_relative_l2"] < 0.2
    assert found["exactness", "fp8"]["max_abs_pixels"] <= 1


def test_records_name_no_place(done: tuple[list[str], list[dict[str, Any]]]) -> None:
    _, records = done
    assert str(Path.home()) not in json.dumps(records)
    for own in records:
        assert own["command"].startswith(
            "python benchmarks/bench_qwen_image.py --device cpu --model tiny --only"
        )
        assert "--prompts prompts.txt --out results.json" in own["command"]
        assert own["prompts"] == ["prompts.txt"]
        assert own["versions"]["torch"]


def test_a_plan_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bench_qwen_image.main(["--plan", "--only", "512", "--checks", "--precisions", "bf16"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:-1]] == [
        ["512", system, "bf16"] for system in make_workloads()["512"].systems
    ]
    assert lines[-1].startswith("about ")
