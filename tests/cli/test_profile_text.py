"""The table that ``--profile`` ends with."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from offline_diffusion.cli.profile import LABELS, profile_text
from offline_diffusion.stages import StageName


def stage(name: str, count: int, host_s: float, device_s: float | None = None) -> dict[str, Any]:
    return {
        "stage": name,
        "in_threads": name in ("image_encode", "write", "publish"),
        "count": count,
        "host_s": host_s,
        "host_share": host_s / 100,
        "device_s": device_s,
        "device_share": None if device_s is None else device_s / 100,
        "s_per_image": (host_s if device_s is None else device_s) / 200,
    }


def profile(*stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    values = {
        "device": "NVIDIA H200",
        "wall_s": 100.0,
        "profiler_s": 3.0,
        "num_images": 200,
        "num_steps": 410,
        "step_fill": 0.962,
        "outside_transformer_share": 0.029,
        "device_idle_share": 0.0123,
        "num_traced_steps": 20,
        "trace": "out/_state/profile/task-00000.trace.json.gz",
        "stages": list(stages),
    }
    return values | changes


def test_on_a_gpu() -> None:
    text = profile_text(
        profile(
            stage("denoise", 410, 31.0, 94.5),
            stage("decode", 200, 1.5, 4.0),
            stage("wait_device", 400, 62.0),
            stage("load", 0, 0.0),
            stage("image_encode", 200, 3.2),
        )
    )
    assert text.splitlines() == [
        "profile: 200 images in 410 steps and 1 min 40 s on NVIDIA H200",
        "stage                   times  host s  share  device s  share  ms an image",
        "transformer               410   31.00  31.0%     94.50  94.5%       472.50",
        "VAE decode                200    1.50   1.5%      4.00   4.0%        20.00",
        "waiting for the device    400   62.00  62.0%                        310.00",
        "in threads beside it:",
        "image encoding            200    3.20   3.2%                         16.00",
        "outside the transformer 2.9% of drawing, step fill 96.2%, GPU idle 1.2% of 20 traced steps",
        "trace, for Perfetto or chrome://tracing: out/_state/profile/task-00000.trace.json.gz "
        "(3.0 s, not counted)",
    ]


@pytest.mark.parametrize(
    ("num_traced", "last"), [(0, "no trace: 4 steps are too few"), (20, "step fill 96.2%")]
)
def test_on_a_cpu_without_a_trace(num_traced: int, last: str) -> None:
    """A trace that could not be written was told of; it is not said to be too short."""
    changes = {"device": "CPU", "device_idle_share": None, "outside_transformer_share": None, "trace": None}
    counts = {"num_steps": 4, "num_traced_steps": num_traced}
    text = profile_text(profile(stage("denoise", 4, 90.0), **changes, **counts))
    assert "device s" not in text
    assert "GPU idle" not in text
    assert text.splitlines()[-1] == last


def test_nothing_was_finished() -> None:
    text = profile_text(profile(stage("denoise", 4, 90.0) | {"s_per_image": None}))
    assert "transformer      4   90.00  90.0%" in text


def test_every_stage_that_counts_has_a_label() -> None:
    assert set(LABELS) == set(get_args(StageName)) - {"profiler"}
