"""What a model can do: sizes, defaults, and the cost formula against hand counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import MAX_SEED, SamplingParams

CAPABILITIES = Capabilities(
    family="fake",
    pipeline="FakePipeline",
    default_height=64,
    default_width=96,
    default_num_inference_steps=7,
    default_true_cfg_scale=2.5,
    max_size=1024,
    num_layers=2,
    hidden_size=8,
)


def test_silent_parameters_take_the_models_defaults() -> None:
    request = CAPABILITIES.resolve("a", "a cup", SamplingParams(), seed=MAX_SEED)
    assert (request.request_id, request.prompt, request.seed) == ("a", "a cup", MAX_SEED)
    assert (request.height, request.width) == (64, 96)
    assert (request.num_inference_steps, request.true_cfg_scale) == (7, 2.5)
    assert (request.negative_prompt, request.guidance_scale, request.lora) == (None, None, None)
    assert not request.cfg_active


def test_given_parameters_are_kept() -> None:
    params = SamplingParams(
        height=128,
        width=32,
        num_inference_steps=1,
        true_cfg_scale=0.0,
        guidance_scale=0.0,
        negative_prompt="",
        seed=3,
    )
    request = CAPABILITIES.resolve("a", "p", params, seed=4)
    assert (request.height, request.width, request.num_inference_steps) == (128, 32, 1)
    assert (request.true_cfg_scale, request.guidance_scale, request.negative_prompt) == (0.0, 0.0, "")
    assert request.seed == 4


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(height=100), "height must be a multiple of 16, got 100"),
        (SamplingParams(width=8), "width must be a multiple of 16, got 8"),
        (SamplingParams(width=1040), "width must be at most 1024, got 1040"),
        (SamplingParams(lora="style"), "lora is not supported for model family 'fake'"),
    ],
)
def test_what_a_model_cannot_draw_is_refused(params: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CAPABILITIES.resolve("a", "p", params, seed=0)


@given(st.integers(-100, 2000), st.integers(-100, 2000))
def test_sizes_are_positive_multiples_up_to_the_limit(height: int, width: int) -> None:
    fits = all(value in range(16, 1025, 16) for value in (height, width))
    assert (CAPABILITIES.check_size(height, width) is None) == fits


def test_image_tokens_are_patches() -> None:
    assert CAPABILITIES.num_image_tokens(1024, 512) == 64 * 32
    assert CAPABILITIES.num_image_tokens(16, 16) == 1


def test_flops_are_those_of_the_matrix_products() -> None:
    """A layer: q, k, v, out (4 H²) and a feed-forward of width 4 H (8 H²), two FLOPs a multiply-add;
    attention: S² H for the scores and as many for the values."""
    tokens, hidden, layers = 10, 8, 2
    products = 2 * tokens * (4 * hidden * hidden + 2 * hidden * 4 * hidden)
    attention = 2 * (tokens * tokens * hidden) * 2
    assert CAPABILITIES.forward_flops(tokens) == layers * (products + attention)


def test_defaults_are_replaced_where_given() -> None:
    changed = CAPABILITIES.with_defaults({"height": 512, "width": None, "num_inference_steps": 4})
    assert (changed.default_height, changed.default_width) == (512, 96)
    assert (changed.default_num_inference_steps, changed.default_true_cfg_scale) == (4, 2.5)


CLASSIC = replace(
    CAPABILITIES, guidance="classic", default_guidance_scale=5.0, guides_from_nothing=True, patch_pixels=8
)


@pytest.mark.parametrize(
    ("negative", "scale", "from_nothing", "kept", "is_active"),
    [
        (None, None, True, None, True),  # the default scale
        (None, 1.0, True, None, False),
        ("", 2.0, True, "", True),
        (None, None, False, "", True),
        (None, 1.0, False, None, False),
    ],
)
def test_guidance_from_nothing_is_not_guidance_from_an_empty_prompt(
    negative: str | None, scale: float | None, from_nothing: bool, kept: str | None, is_active: bool
) -> None:
    capabilities = replace(CLASSIC, guides_from_nothing=from_nothing)
    params = SamplingParams(guidance_scale=scale, negative_prompt=negative)
    request = capabilities.resolve("a", "a cup", params, seed=0)
    assert (request.negative_prompt, request.cfg_active) == (kept, is_active)


def test_a_unets_cost_is_by_its_own_numbers() -> None:
    unet = replace(CLASSIC, unet_flops=(100.0, 3.0))
    assert unet.forward_flops(64 + 77, 64) == 100 * 64 + 3 * 64**2
    assert unet.forward_flops(10) == 100 * 10 + 3 * 10**2


@pytest.mark.parametrize(("patch_pixels", "expected"), [(16, 1000), (8, 4000), (32, 250)])
def test_budgets_are_by_area(patch_pixels: int, expected: int) -> None:
    assert replace(CAPABILITIES, patch_pixels=patch_pixels).own_tokens(1000) == expected


def test_micro_conditioning_is_refused_where_a_family_has_none() -> None:
    params = SamplingParams(original_size=(512, 512))
    assert replace(CLASSIC, micro_conditioning=True).resolve("a", "p", params, seed=0).original_size == (
        512,
        512,
    )
    with pytest.raises(ValueError, match="original_size is not supported for model family 'fake'"):
        CLASSIC.resolve("a", "p", params, seed=0)
    assert CLASSIC.check_columns({"original_size": "any text"}) is None  # carried like any other
    assert CLASSIC.pairs({"original_size": [1, 2]}) == {}
