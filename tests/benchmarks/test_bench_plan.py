"""What will be run: diffusers' calls, the order, the estimate."""

from __future__ import annotations

from typing import Any

import pytest
from plan import BATCH, Entry, RivalOptions, make_plan, rival_units, sample
from workloads import make_workloads

from offline_diffusion.models.capabilities import Capabilities

CAPABILITIES = Capabilities(family="qwen_image", pipeline="QwenImagePipeline")


def planned(only: list[str], **options: Any) -> list[Entry]:
    workloads = make_workloads()
    defaults: dict[str, Any] = {
        "systems": None,
        "precisions": ("bf16", "fp8", "int8"),
        "checks": (),
        "capabilities": CAPABILITIES,
        "rival": RivalOptions(),
        "traced": (),
        "num_compositions": 50,
        "num_jobs": 5,
    }
    return make_plan([workloads[name] for name in only], **{**defaults, **options})


@pytest.mark.parametrize("name", ["256", "mixed16", "uniform", "dataset_c"])
def test_diffusers_draws_every_image_once_in_like_company(name: str) -> None:
    requests = make_workloads()[name].requests
    units = rival_units(requests, BATCH)
    drawn = [request.request_id for parts in units.values() for part in parts for request in part]
    assert sorted(drawn) == sorted(request.request_id for request in requests)
    for (height, width, guided, size), parts in units.items():
        for part in parts:
            assert len(part) == size <= 8
            assert {(r.height, r.width, r.cfg_active) for r in part} == {(height, width, guided)}
    for (*_, guided, _), parts in units.items():
        assert guided or name == "uniform"
        longest = [len(part[-1].prompt) for part in parts]
        assert longest == sorted(longest)  # so that a batch pads as little as can be


def test_samples_are_spread_over_prompt_lengths() -> None:
    units: list[list[Any]] = [[index] for index in range(12)]
    assert sample(units, 2) == [[3], [9]]
    assert sample(units, 12) == units
    assert sample(units[:1], 2) == units[:1]


def test_quantization_comes_last() -> None:
    """It takes the weights away that diffusers and bf16 need."""
    entries = planned(["512", "uniform"], checks=("exactness", "promise_cost", "quantization_error"))
    precisions = [entry.precision for entry in entries]
    assert precisions == sorted(precisions, key=["bf16", "fp8", "int8"].index)
    assert {entry.system for entry in entries if entry.precision != "bf16"} == {"packed"}
    of_uniform = [
        entry.system for entry in entries if entry.workload == "uniform" and entry.precision == "bf16"
    ]
    assert of_uniform == ["diffusers_serial", "diffusers_batch", "serial", "presorted", "packed"]
    checks = [(entry.workload, entry.precision) for entry in entries if entry.workload == "promise_cost"]
    assert checks == [("promise_cost", "bf16")]


def test_what_ratios_and_errors_need_is_measured_in_any_case() -> None:
    entries = planned(
        ["512"],
        precisions=("fp8",),
        systems=("diffusers_serial", "packed"),
        checks=("exactness", "quantization_error"),
    )
    assert [(entry.workload, entry.system, entry.precision) for entry in entries] == [
        ("512", "diffusers_serial", "bf16"),
        ("quantization_error", "packed", "bf16"),
        ("512", "packed", "fp8"),
        ("exactness", "packed", "fp8"),
        ("quantization_error", "packed", "fp8"),
    ]


def test_estimates_are_near_what_was_measured() -> None:
    """On an H200: 1.05 s an image of 512² packed (20 steps), 2.32 s for 20 forwards at batch 1."""
    (packed,) = planned(["512"], systems=("packed",), precisions=("bf16",))
    assert packed.seconds == pytest.approx(24 * 1.05, rel=0.3)
    (serial,) = planned(["512"], systems=("diffusers_serial",), precisions=("bf16",))
    assert serial.seconds == pytest.approx(2 * 6 * 2 * 0.116, rel=0.5)
    (traced,) = planned(["512"], systems=("packed",), precisions=("bf16",), traced=("512",))
    assert traced.seconds > packed.seconds
