"""Records: fields, ratios within a process, merging over processes, no machine's paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from records import (
    FIELDS,
    ROOT,
    Report,
    device_slug,
    line,
    merge,
    portable_command,
    speed_fields,
    with_ratios,
)

ISSUE_FIELDS = {
    "workload",
    "system",
    "precision",
    "s_per_image",
    "images_per_s",
    "tflops_useful",
    "share_of_floor",
    "ratio_to_diffusers_serial",
    "ratio_to_diffusers_batch",
    "gpu_idle_share",
    "step_fill",
    "versions",
    "command",
}


def record(system: str, s_per_image: float, precision: str = "bf16", workload: str = "512") -> dict[str, Any]:
    return {"workload": workload, "system": system, "precision": precision, "s_per_image": s_per_image}


def test_speed() -> None:
    """790 TFLOP in two seconds are half of the floor's rate."""
    found = speed_fields(num_images=4, denoise_s=2.0, flops=790e12)
    assert (found["s_per_image"], found["images_per_s"]) == (0.5, 2.0)
    assert found["tflops_useful"] == pytest.approx(395)
    assert found["share_of_floor"] == pytest.approx(0.5)
    assert found["floor_s_per_image"] == pytest.approx(0.25)


def test_ratios_are_to_the_same_workload_in_bf16() -> None:
    records = with_ratios(
        [
            record("diffusers_serial", 4.0),
            record("diffusers_serial", 100.0, workload="1024"),
            record("packed", 1.0),
            record("packed", 0.5, "fp8"),
            record("packed", 8.0, workload="256"),
        ]
    )
    assert [own["ratio_to_diffusers_serial"] for own in records] == [1.0, 1.0, 4.0, 8.0, None]
    assert {own["ratio_to_diffusers_batch"] for own in records} == {None}


def test_a_later_record_takes_the_place_of_an_earlier_one() -> None:
    old = [record("packed", 1.0), record("packed", 2.0, "fp8")]
    merged = merge(old, [record("packed", 3.0), record("serial", 4.0)])
    assert [(own["system"], own["precision"], own["s_per_image"]) for own in merged] == [
        ("packed", "bf16", 3.0),
        ("packed", "fp8", 2.0),
        ("serial", "bf16", 4.0),
    ]


def test_a_report_keeps_other_processes_records_but_has_no_ratio_to_them(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    earlier = Report(path, {"versions": {}, "command": "python a.py", "run": "1"})
    earlier.add("512", "diffusers_serial", "bf16", speed_fields(1, 4.0, 1e15))
    earlier.add("512", "packed", "bf16", speed_fields(1, 2.0, 1e15))
    later = Report(path, {"versions": {}, "command": "python a.py", "run": "2"})
    later.add("512", "packed", "bf16", speed_fields(1, 1.0, 1e15))
    later.add("exactness", "packed", "bf16", {"found": {"max_abs_latents": 0.0}})
    records = json.loads(path.read_text(encoding="utf-8"))
    assert [(own["workload"], own["system"], own["run"]) for own in records] == [
        ("512", "diffusers_serial", "1"),
        ("512", "packed", "2"),
        ("exactness", "packed", "2"),
    ]
    assert records[1]["s_per_image"] == 1.0
    assert records[1]["ratio_to_diffusers_serial"] is None  # measured in another process
    assert all(set(own) >= ISSUE_FIELDS | set(FIELDS) for own in records)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_rival_measured_later_fills_earlier_ratios() -> None:
    report = Report(None, {})
    assert report.add("512", "packed", "bf16", speed_fields(1, 1.0, 1e15))["ratio_to_diffusers_batch"] is None
    report.add("512", "diffusers_batch", "bf16", speed_fields(1, 1.6, 1e15))
    assert report.records[0]["ratio_to_diffusers_batch"] == 1.6


def test_lines_hold_what_was_found() -> None:
    report = Report(None, {})
    assert "0.250" in line(report.add("512", "packed", "bf16", speed_fields(4, 1.0, 1e15)))
    check = report.add("exactness", "packed", "fp8", {"found": {"max_abs_latents": 0.0}})
    assert line(check).endswith("max_abs_latents 0.0")


def test_a_command_names_no_place_of_the_machine() -> None:
    arguments = [
        "--out",
        str(ROOT / "benchmarks/results/x.json"),
        "--prompts=/data/sets/Parti.tsv",
        "../up/dpg",
    ]
    command = portable_command(str(ROOT / "benchmarks/bench_qwen_image.py"), [*arguments, "--steps", "20"])
    assert command == (
        "python benchmarks/bench_qwen_image.py --out benchmarks/results/x.json "
        "--prompts=Parti.tsv dpg --steps 20"
    )


@pytest.mark.parametrize(
    ("name", "slug"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("CPU", "cpu")]
)
def test_results_are_named_after_the_device(name: str, slug: str) -> None:
    assert device_slug(name) == slug
