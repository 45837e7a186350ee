"""Which execution mode the options mean, and what a family refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offline_diffusion.config import EngineConfig
from offline_diffusion.errors import ConfigError
from offline_diffusion.models.capabilities import BatchKind, Capabilities
from offline_diffusion.models.loader import load_model
from offline_diffusion.models.modes import (
    ExecutionMode,
    check_mode,
    execution_mode,
    mode_fault,
    same_shape_key,
)
from offline_diffusion.models.registry import find_checkpoint
from offline_diffusion.request import Request

PACKED, STACKED = BatchKind.PACKED, BatchKind.STACKED


@pytest.mark.parametrize(
    ("options", "batch_kind", "expected"),
    [
        ({}, PACKED, "packed"),
        ({}, STACKED, "same_shape"),
        ({"batching": "same_shape"}, PACKED, "same_shape"),
        ({"batching": "packed"}, PACKED, "packed"),
        ({"max_num_seqs": 1}, PACKED, "single_step"),
        ({"max_num_seqs": 1, "batching": "same_shape"}, STACKED, "single_step"),
        ({"max_num_seqs": 1, "step_execution": False}, PACKED, "serial"),
        ({"max_num_seqs": 4, "step_execution": False}, STACKED, "request_batch"),
    ],
)
def test_the_mode_that_options_mean(options: dict[str, Any], batch_kind: BatchKind, expected: str) -> None:
    assert execution_mode(EngineConfig(**options), batch_kind).value == expected


def test_a_family_of_whole_images_does_all_but_pack() -> None:
    assert [mode.value for mode in ExecutionMode if mode_fault(mode, STACKED)] == ["packed"]
    assert not any(mode_fault(mode, PACKED) for mode in ExecutionMode)


def test_what_a_family_cannot_do_is_refused_with_the_reason() -> None:
    unet = Capabilities(family="unet", pipeline="UNetPipeline", batch_kind=STACKED)
    with pytest.raises(ConfigError) as caught:
        check_mode(EngineConfig(batching="packed"), unet)
    assert (
        "packed is not supported for model family 'unet': its model takes whole images"
        in caught.value.message
    )
    assert caught.value.exit_code == 2
    check_mode(EngineConfig(batching="packed", max_num_seqs=1), unet)  # nobody shares a step
    check_mode(EngineConfig(), unet)


def test_it_is_refused_before_weights_are_loaded(tiny_model: Path) -> None:
    checkpoint = find_checkpoint(str(tiny_model))
    stacked = replace(checkpoint, source="nowhere", capabilities=_stacked(checkpoint.capabilities))
    with pytest.raises(ConfigError, match="batching packed is not supported"):
        load_model(EngineConfig(batching="packed", device="cpu"), stacked)


def _stacked(capabilities: Capabilities) -> Capabilities:
    return replace(capabilities, batch_kind=STACKED)


REQUEST = Request(
    request_id="a", prompt="a", height=32, width=48, num_inference_steps=9, true_cfg_scale=4.0, seed=1,
    negative_prompt=" ",
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"height": 48},
        {"width": 32},
        {"true_cfg_scale": 5.0},
        {"negative_prompt": None},
        {"guidance_scale": 3.0},
        {"lora": "style"},
    ],
)
def test_what_vllm_omni_keys_by_is_another_shape(change: dict[str, Any]) -> None:
    assert same_shape_key(replace(REQUEST, **change), "embedded") != same_shape_key(REQUEST, "embedded")


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "b"},
        {"prompt": "b"},
        {"num_inference_steps": 3},
        {"seed": 2},
        {"negative_prompt": "ugly"},
    ],
)
def test_what_it_does_not_key_by_is_the_same_shape(change: dict[str, Any]) -> None:
    assert same_shape_key(replace(REQUEST, **change), "embedded") == same_shape_key(REQUEST, "embedded")


def test_a_scale_without_guidance_separates_nobody() -> None:
    off = replace(REQUEST, negative_prompt=None)
    assert same_shape_key(replace(off, true_cfg_scale=7.0), "true_cfg") == same_shape_key(off, "true_cfg")


def test_a_scale_that_the_family_ignores_separates_nobody() -> None:
    other = replace(REQUEST, guidance_scale=3.0)
    assert same_shape_key(other, "true_cfg") == same_shape_key(REQUEST, "true_cfg")


@pytest.mark.parametrize(
    ("scales", "is_same"), [((0.5, 1.0), True), ((3.0, 5.0), False), ((1.0, 5.0), False)]
)
def test_classic_guidance_separates_only_where_it_is_on(scales: tuple[float, float], is_same: bool) -> None:
    """Such a family's requests have the one scale under both names."""
    keys = {
        same_shape_key(replace(REQUEST, true_cfg_scale=own, guidance_scale=own), "classic") for own in scales
    }
    assert (len(keys) == 1) == is_same
