"""What a user may ask for, and what a request and an output say of themselves."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion import Request, RequestOutput, SamplingParams


def test_silence_is_none() -> None:
    params = SamplingParams()
    assert (params.height, params.width, params.num_inference_steps) == (None, None, None)
    assert (params.true_cfg_scale, params.guidance_scale, params.negative_prompt) == (None, None, None)
    assert (params.seed, params.num_images_per_prompt, params.lora_scale) == (None, 1, 1.0)


@given(st.integers(0, 2**64 - 1))
def test_seeds_are_kept_whole(seed: int) -> None:
    assert SamplingParams(seed=seed).seed == seed


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("height", 0, "height must be an integer of at least 1, got 0"),
        ("width", -16, "width must be an integer of at least 1, got -16"),
        ("width", 512.0, "width must be an integer of at least 1, got 512.0"),
        ("height", "512", "height must be an integer of at least 1, got '512'"),
        ("num_inference_steps", 0, "num_inference_steps must be an integer of at least 1, got 0"),
        ("num_images_per_prompt", 0, "num_images_per_prompt must be an integer of at least 1, got 0"),
        ("num_images_per_prompt", None, "num_images_per_prompt must be an integer of at least 1, got None"),
        ("true_cfg_scale", -0.1, "true_cfg_scale must be a finite number of at least 0, got -0.1"),
        ("true_cfg_scale", math.inf, "true_cfg_scale must be a finite number of at least 0, got inf"),
        ("guidance_scale", math.nan, "guidance_scale must be a finite number of at least 0, got nan"),
        ("guidance_scale", "high", "guidance_scale must be a finite number of at least 0, got 'high'"),
        ("seed", -1, "seed must be an integer from 0 to 2**64-1, got -1"),
        ("seed", 2**64, "seed must be an integer from 0 to 2**64-1, got 18446744073709551616"),
        ("seed", 1.5, "seed must be an integer from 0 to 2**64-1, got 1.5"),
        ("lora_scale", math.nan, "lora_scale must be a finite number, got nan"),
        ("negative_prompt", ["a"], "negative_prompt must be a string or None, got ['a']"),
        ("lora", 5, "lora must be a string or None, got 5"),
        ("height", True, "height must be an integer of at least 1, got True"),
        ("num_inference_steps", True, "num_inference_steps must be an integer of at least 1, got True"),
        ("num_images_per_prompt", True, "num_images_per_prompt must be an integer of at least 1, got True"),
        ("seed", False, "seed must be an integer from 0 to 2**64-1, got False"),
        ("true_cfg_scale", True, "true_cfg_scale must be a finite number of at least 0, got True"),
        ("guidance_scale", False, "guidance_scale must be a finite number of at least 0, got False"),
        ("target_size", (1, -1), "target_size must be a pair of integers of at least 0, got (1, -1)"),
        ("original_size", (1.5, 2), "original_size must be a pair of integers of at least 0, got (1.5, 2)"),
        ("original_size", "1, 2", "original_size must be a pair of integers of at least 0, got '1, 2'"),
        ("lora_scale", True, "lora_scale must be a finite number, got True"),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        SamplingParams(**{name: value})
    assert str(caught.value) == message


def test_numpy_numbers_will_do() -> None:
    params = SamplingParams(height=np.int64(64), true_cfg_scale=np.float32(2.5), seed=np.uint64(2**64 - 1))  # type: ignore[arg-type]
    assert (params.height, params.true_cfg_scale, params.seed) == (64, 2.5, 2**64 - 1)


def make(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "request_id": "a",
        "prompt": "a cup",
        "height": 16,
        "width": 32,
        "num_inference_steps": 2,
        "true_cfg_scale": 4.0,
        "seed": 0,
    }
    return Request(**(values | changes))


@pytest.mark.parametrize(
    ("scale", "negative", "active"),
    [
        (4.0, None, False),
        (4.0, "", True),
        (4.0, " ", True),
        (4.0, "ugly", True),
        (1.0, "ugly", False),
        (1.0001, "ugly", True),
        (0.0, "", False),
    ],
)
def test_guidance_needs_a_scale_over_one_and_a_negative_prompt(
    scale: float, negative: str | None, active: bool
) -> None:
    assert make(true_cfg_scale=scale, negative_prompt=negative).cfg_active is active


def test_requests_cannot_be_changed() -> None:
    request = make()
    with pytest.raises(FrozenInstanceError):
        request.seed = 1  # type: ignore[misc]


def test_the_image_is_the_pixels() -> None:
    pixels = np.arange(16 * 32 * 3, dtype=np.uint8).reshape(16, 32, 3)
    output = RequestOutput(make(), "ok", pixels)
    assert output.request_id == "a"
    assert (output.image.mode, output.image.size) == ("RGB", (32, 16))
    assert np.array_equal(np.asarray(output.image), pixels)


def test_a_failed_output_has_no_image_and_says_why() -> None:
    output = RequestOutput(make(), "failed", error_type="nan", error="not finite")
    with pytest.raises(ValueError, match="request 'a' has no image: failed: not finite"):
        output.image  # noqa: B018
