"""Checkpoints of a known family that turn on what is not built here are refused by the name of the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import build_flux, build_sd3, build_sdxl

from offline_diffusion.config import EngineConfig
from offline_diffusion.errors import ModelError, UnsupportedModelError
from offline_diffusion.models.loader import load_model
from offline_diffusion.models.registry import capabilities_for


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"qk_norm": "layer_norm"},
            "qk_norm='layer_norm', supported for .*: None, 'rms_norm'",
        ),
        ({"patch_size": 4}, "patch_size=4, supported for Stable Diffusion 3: 2"),
    ],
)
def test_of_stable_diffusion_3(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = build_sd3(tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(EngineConfig(model=str(folder), device="cpu"))


def test_of_flux(tmp_path: Path) -> None:
    folder = build_flux(tmp_path / "model", patch_size=2)
    with pytest.raises(UnsupportedModelError, match=r"patch_size=2, supported for FLUX\.1: 1"):
        load_model(EngineConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_2"])
def test_of_a_tokenizer_without_its_vocabulary(tmp_path: Path, name: str) -> None:
    folder = build_flux(tmp_path / "model")
    (folder / name / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has \d tokens, its text encoder \d{2,}"):
        load_model(EngineConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize("key", ["stochastic_sampling", "invert_sigmas"])
def test_of_a_noise_scheduler(tmp_path: Path, key: str) -> None:
    folder = build_flux(tmp_path / "model")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: True}))
    with pytest.raises(UnsupportedModelError, match=f"{key}=true, which is not supported for FLUX.1"):
        load_model(EngineConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("key", "value", "supported"),
    [
        ("center_input_sample", True, None),
        ("resnet_skip_time_act", True, None),
        ("resnet_out_scale_factor", 1.5, 1.0),
        ("mid_block_only_cross_attention", True, None),
        ("act_fn", "gelu", "silu"),
    ],
)
def test_of_sdxl(tmp_path: Path, key: str, value: Any, supported: Any) -> None:
    folder = build_sdxl(tmp_path / "model")
    change_json(folder / "unet" / "config.json", **{key: value})
    with pytest.raises(UnsupportedModelError, match=f"{key}={value}, supported for SDXL: {supported}"):
        load_model(EngineConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("build", "part"),
    [(build_sd3, "text_encoder_3"), (build_flux, "text_encoder_2"), (build_sdxl, "tokenizer")],
)
def test_of_one_saved_without_an_encoder(tmp_path: Path, build: Any, part: str) -> None:
    """diffusers writes such folders and draws from them; here it is known before weights are loaded."""
    folder = build(tmp_path / "model")
    change_json(folder / "model_index.json", **{part: [None, None]})
    with pytest.raises(
        UnsupportedModelError, match=f"the checkpoint has no {part}, which .* supported with only"
    ):
        capabilities_for(str(folder))


@pytest.mark.parametrize(
    "name", ["PNDMScheduler", "HeunDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"]
)
def test_of_a_noise_scheduler_of_sdxl(tmp_path: Path, name: str) -> None:
    folder = build_sdxl(tmp_path / "model")
    change_json(folder / "scheduler" / "scheduler_config.json", _class_name=name)
    change_json(folder / "model_index.json", scheduler=["diffusers", name])
    with pytest.raises(UnsupportedModelError, match=f"noise scheduler {name} is not supported"):
        load_model(EngineConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize("changes", [{"block_out_channels": "wide"}, {"down_block_types": []}])
def test_of_a_unet_config_that_makes_no_sense(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = build_sdxl(tmp_path / "model")
    change_json(folder / "unet" / "config.json", **changes)
    with pytest.raises(ModelError, match="make no sense"):
        load_model(EngineConfig(model=str(folder), device="cpu"))


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
