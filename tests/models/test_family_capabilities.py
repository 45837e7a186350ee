"""What is said of full-size checkpoints from their configs alone, against diffusers' own modules.

The configs are those of the published checkpoints; modules are made without memory.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from offline_diffusion.data.rows import ManifestRow, RowDefaults, RowFault, resolve_row
from offline_diffusion.data.work import Work, WorkMeter
from offline_diffusion.models import configs
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.registry import capabilities_for
from offline_diffusion.request import SamplingParams

VAE = {"block_out_channels": [128, 256, 512, 512]}
FLUX = {
    "num_layers": 19,
    "num_single_layers": 38,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "axes_dims_rope": [16, 56, 56],
    "in_channels": 64,
}
SD3 = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
LARGE = SD3 | {
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "qk_norm": "rms_norm",
}
MEDIUM = SD3 | {
    "dual_attention_layers": list(range(13)),
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "FLUX.1-dev": ("FluxPipeline", FLUX | {"guidance_embeds": True}),
    "FLUX.1-schnell": ("FluxPipeline", FLUX | {"guidance_embeds": False}),
    "stable-diffusion-3.5-large": ("StableDiffusion3Pipeline", LARGE),
    "stable-diffusion-3.5-large-turbo": ("StableDiffusion3Pipeline", LARGE),
    "stable-diffusion-3.5-medium": ("StableDiffusion3Pipeline", MEDIUM),
    "stable-diffusion-3-medium": ("StableDiffusion3Pipeline", SD3),
}


def capabilities_of(name: str, folder: Path) -> Capabilities:
    """As a folder of this name with this checkpoint's configs tells them."""
    pipeline, transformer = CHECKPOINTS[name]
    files = {
        "model_index.json": {"_class_name": pipeline},
        "transformer/config.json": transformer,
        "vae/config.json": VAE,
        "text_encoder/config.json": {"max_position_embeddings": 77},
    }
    for path, values in files.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(json.dumps(values))
    return capabilities_for(str(folder / name))


def transformer_of(name: str, **overrides: Any) -> torch.nn.Module:
    pipeline, config = CHECKPOINTS[name]
    model_class = "FluxTransformer2DModel" if pipeline == "FluxPipeline" else "SD3Transformer2DModel"
    with torch.device("meta"):
        return getattr(diffusers, model_class)(**(config | overrides))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "steps", "true_cfg", "guidance", "largest"),
    [
        ("FLUX.1-dev", 28, 1.0, 3.5, 65_536),
        ("FLUX.1-schnell", 4, 1.0, None, 65_536),
        ("stable-diffusion-3.5-large", 28, 7.0, 7.0, 3072),
        ("stable-diffusion-3.5-large-turbo", 4, 0.0, 0.0, 3072),
        ("stable-diffusion-3.5-medium", 28, 7.0, 7.0, 6144),
        ("stable-diffusion-3-medium", 28, 7.0, 7.0, 3072),
    ],
)
def test_defaults(
    tmp_path: Path, name: str, steps: int, true_cfg: float, guidance: float | None, largest: int
) -> None:
    capabilities = capabilities_of(name, tmp_path)
    request = capabilities.resolve("a", "a cup", SamplingParams(), seed=1)
    assert (request.height, request.width, request.num_inference_steps) == (1024, 1024, steps)
    assert (request.true_cfg_scale, request.guidance_scale) == (true_cfg, guidance)
    assert request.cfg_active == (true_cfg > 1)  # with an empty negative prompt where the row has none
    assert capabilities.num_image_tokens(1024, 1024) == 4096
    assert capabilities.check_size(largest, 16) is None
    assert "at most" in str(capabilities.check_size(16, largest + 16))
    assert capabilities.num_text_tokens(3) == (512 if name.startswith("FLUX") else 77 + 256)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"true_cfg_scale": 4.0}, (4.0, "")),
        ({"guidance_scale": 2.0, "true_cfg_scale": 4.0}, (2.0, "")),
        ({"guidance_scale": 2.0, "negative_prompt": "low"}, (2.0, "low")),
        ({"guidance_scale": 1.0}, (1.0, None)),
        ({"guidance_scale": 0.5, "negative_prompt": "low"}, (0.5, "low")),
    ],
)
def test_classic_guidance_goes_by_either_name(
    tmp_path: Path, given: dict[str, Any], expected: tuple[float, str | None]
) -> None:
    capabilities = capabilities_of("stable-diffusion-3.5-large", tmp_path)
    request = capabilities.resolve("a", "a cup", SamplingParams(**given), seed=1)
    assert request.true_cfg_scale == request.guidance_scale == expected[0]
    assert request.negative_prompt == expected[1]
    assert request.cfg_active == (expected[0] > 1)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_parameters_of_the_blocks_are_diffusers(tmp_path: Path, name: str) -> None:
    """But for biases, norms, embeddings, and what a last block leaves out."""
    capabilities = capabilities_of(name, tmp_path)
    counted = sum(parameter.numel() for parameter in transformer_of(name).parameters())
    assert capabilities.num_parameters == pytest.approx(counted, rel=0.03)
    assert capabilities.step_bytes(0) == 2 * capabilities.num_parameters
    tokens = capabilities.step_bytes(4608) - capabilities.step_bytes(0)
    assert tokens == 4608 * 12 * capabilities.hidden_size * 2


@pytest.mark.parametrize("name", ["FLUX.1-dev", "stable-diffusion-3.5-medium"])
def test_flops_are_those_that_torch_counts(tmp_path: Path, name: str) -> None:
    """Of one forward at 1024 × 1024 pixels, to a few percent: modulation and embeddings are left out."""
    capabilities, transformer = capabilities_of(name, tmp_path), transformer_of(name).to(torch.bfloat16)
    num_text = capabilities.num_text_tokens(5)
    with torch.device("meta"):
        common: dict[str, Any] = {
            "encoder_hidden_states": torch.empty(1, num_text, 4096, dtype=torch.bfloat16),
            "pooled_projections": torch.empty(1, CHECKPOINTS[name][1]["pooled_projection_dim"]).bfloat16(),
            "timestep": torch.empty(1),
        }
        if name.startswith("FLUX"):
            common |= {
                "hidden_states": torch.empty(1, 4096, 64, dtype=torch.bfloat16),
                "guidance": torch.empty(1),
                "img_ids": torch.empty(4096, 3),
                "txt_ids": torch.empty(num_text, 3),
            }
        else:
            common["hidden_states"] = torch.empty(1, 16, 128, 128, dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        transformer(**common)
    assert capabilities.forward_flops(4096 + num_text, 4096) == pytest.approx(
        counter.get_total_flops(), rel=0.03
    )


def row(**carried: Any) -> ManifestRow:
    return ManifestRow(3, "c", "m.jsonl", 4, "hash", "a cup", SamplingParams(), carried)


def test_skip_layer_guidance_is_refused_by_name(tmp_path: Path) -> None:
    sd3 = capabilities_of("stable-diffusion-3.5-medium", tmp_path)
    flux = capabilities_of("FLUX.1-dev", tmp_path)
    asked = row(skip_guidance_layers=[7, 8, 9], note="kept")
    fault = resolve_row(asked, sd3, RowDefaults())
    assert isinstance(fault, RowFault)
    assert (fault.row, fault.column, fault.value) == (3, "skip_guidance_layers", "[7, 8, 9]")
    assert fault.reason == "skip-layer guidance is not supported for model family 'sd3'"
    assert WorkMeter(sd3, RowDefaults()).measure(asked) == fault.reason
    for other in (resolve_row(asked, flux, RowDefaults()), resolve_row(row(note="kept"), sd3, RowDefaults())):
        assert not isinstance(other, RowFault)
    unset = row(skip_guidance_layers=None)  # of a table with rows that ask for it
    assert not isinstance(resolve_row(unset, sd3, RowDefaults()), RowFault)


SERVED = {"prompt", "negative_prompt", "num_images_per_prompt", "height", "width", "num_inference_steps"}
SERVED |= {"guidance_scale", "true_cfg_scale", "original_size", "crops_coords_top_left", "target_size"}
HOW_TO_CALL = {"self", "kwargs", "generator", "output_type", "return_dict", "callback_on_step_end"}
HOW_TO_CALL |= {"callback_on_step_end_tensor_inputs", "joint_attention_kwargs", "cross_attention_kwargs"}
TENSORS = {"latents", "prompt_embeds", "pooled_prompt_embeds"}
TENSORS |= {f"negative_{name}" for name in ("prompt_embeds", "pooled_prompt_embeds")}


@pytest.mark.parametrize(
    ("pipeline", "refused"),
    [
        ("FluxPipeline", configs.REFUSED_COLUMNS),
        ("StableDiffusion3Pipeline", configs.SD3_REFUSED_COLUMNS),
        ("StableDiffusion3PAGPipeline", configs.SD3_REFUSED_COLUMNS),
        ("StableDiffusionXLPipeline", configs.SDXL_REFUSED_COLUMNS),
        ("StableDiffusionXLPAGPipeline", configs.SDXL_REFUSED_COLUMNS),
    ],
)
def test_no_argument_of_diffusers_pipeline_is_passed_over(pipeline: str, refused: dict[str, str]) -> None:
    arguments = set(inspect.signature(getattr(diffusers, pipeline).__call__).parameters)
    assert arguments - SERVED - HOW_TO_CALL - TENSORS <= set(refused)
    assert not SERVED & set(refused)


@pytest.mark.parametrize("name", ["FLUX.1-schnell", "stable-diffusion-3-medium"])
def test_a_column_that_asks_for_what_is_not_built_is_refused(tmp_path: Path, name: str) -> None:
    capabilities = capabilities_of(name, tmp_path)
    fault = resolve_row(row(note="kept", prompt_2="a dog"), capabilities, RowDefaults())
    assert isinstance(fault, RowFault)
    assert (fault.column, fault.value) == ("prompt_2", "a dog")
    assert fault.reason.startswith("a prompt for the second encoder alone is not supported")
    unset = row(prompt_2=None, sigmas=None)
    assert not isinstance(resolve_row(unset, capabilities, RowDefaults()), RowFault)


@pytest.mark.parametrize(
    ("of_row", "expected"),
    [({}, 5.0), ({"true_cfg_scale": 3.0}, 3.0), ({"guidance_scale": 2.0}, 2.0)],
)
def test_a_rows_scale_wins_over_the_jobs_whatever_it_is_called(
    tmp_path: Path, of_row: dict[str, float], expected: float
) -> None:
    capabilities = capabilities_of("stable-diffusion-3.5-medium", tmp_path)
    asked = replace(row(), params=SamplingParams(**of_row))  # type: ignore[arg-type]
    images = resolve_row(asked, capabilities, RowDefaults(guidance_scale=5.0, true_cfg_scale=9.0))
    assert not isinstance(images, RowFault)
    assert images[0].request.guidance_scale == expected


def test_a_plan_counts_padded_text_and_both_branches(tmp_path: Path) -> None:
    capabilities = capabilities_of("stable-diffusion-3.5-medium", tmp_path)
    work = WorkMeter(capabilities, RowDefaults(guidance_scale=3.0)).measure(row())
    assert isinstance(work, Work)
    assert work.text_tokens == [333, 333]
    assert work.flops == 2 * 28 * capabilities.forward_flops(4096 + 333, 4096)
    off = WorkMeter(capabilities, RowDefaults(guidance_scale=1.0)).measure(row())
    assert isinstance(off, Work)
    assert off.flops == work.flops / 2
