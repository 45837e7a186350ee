"""Small random checkpoints of every family in diffusers' real layout, and what its pipeline draws of a row.

All is made on the spot, tokenizers included: nothing is downloaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from made_tokenizers import WORDS, clip_tokenizer, t5_tokenizer

from offline_diffusion.models.tiny import build_tiny_qwen_image
from offline_diffusion.models.tiny_weights import fill_text_encoder, fill_vae
from offline_diffusion.request import SamplingParams


def clip_encoder(tokenizer: Any, width: int, *, projects: bool, seed: int) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model_class = transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel
    return _filled(model_class(config), seed)


def t5_encoder(tokenizer: Any, width: int, *, seed: int) -> Any:
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return _filled(transformers.T5EncoderModel(config), seed)


def autoencoder(latent_channels: int, *, seed: int, **overrides: Any) -> Any:
    """Four levels, as the real ones have: 8 pixels a latent."""
    config: dict[str, Any] = {
        "scaling_factor": 0.36,
        "shift_factor": 0.12,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=latent_channels,
        **(config | overrides),
    )
    fill_vae(vae, seed)
    return vae.eval()


def _filled(model: Any, seed: int) -> Any:
    fill_text_encoder(model, seed)
    return model.eval()


def build_flux(folder: Path, *, is_dev: bool = True, seed: int = 0, **overrides: Any) -> Path:
    """A FLUX.1 checkpoint, dev or schnell."""
    tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
    config: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "axes_dims_rope": (8, 12, 12),
        "joint_attention_dim": 48,
        "pooled_projection_dim": 32,
        "guidance_embeds": is_dev,
    }
    shift = {"shift": 3.0, "use_dynamic_shifting": True} if is_dev else {"shift": 1.0}
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**shift),
        vae=autoencoder(4, seed=seed),
        text_encoder=clip_encoder(tokenizer, 32, projects=False, seed=seed),
        tokenizer=tokenizer,
        text_encoder_2=t5_encoder(tokenizer_2, 48, seed=seed),
        tokenizer_2=tokenizer_2,
        transformer=_filled(diffusers.FluxTransformer2DModel(**(config | overrides)), seed),
    )
    return _saved(pipeline, folder)


SDXL_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("EulerDiscrete", {"timestep_spacing": "leading", "steps_offset": 1}),
    "lightning": ("EulerDiscrete", {"timestep_spacing": "trailing"}),
    "dpm": ("DPMSolverMultistep", {"use_karras_sigmas": True, "solver_order": 2}),
    "turbo": ("EulerAncestralDiscrete", {"timestep_spacing": "trailing"}),
    "v": ("EulerDiscrete", {"prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
}
"""Class and what a published ``scheduler_config.json`` has beside the betas."""


def sdxl_noise_scheduler(kind: str) -> Any:
    name, config = SDXL_SCHEDULERS[kind]
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return getattr(diffusers, f"{name}Scheduler")(**betas, **config)


def build_sdxl(folder: Path, *, kind: str = "base", seed: int = 0) -> Path:
    """An SDXL checkpoint; ``kind`` picks the noise scheduler."""
    tokenizer, tokenizer_2 = clip_tokenizer(), clip_tokenizer()
    tokenizer_2.pad_token = "!"
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32, 48),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=[1, 1, 2],
        attention_head_dim=[2, 2, 3],  # by a slip of old, the number of heads
        cross_attention_dim=32 + 48,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=48 + 6 * 8,
    )
    pipeline = diffusers.StableDiffusionXLPipeline(
        scheduler=sdxl_noise_scheduler(kind),
        vae=autoencoder(
            4, seed=seed, scaling_factor=0.13025, shift_factor=None, use_quant_conv=True, force_upcast=True
        ),
        text_encoder=clip_encoder(tokenizer, 32, projects=False, seed=seed),
        tokenizer=tokenizer,
        text_encoder_2=clip_encoder(tokenizer_2, 48, projects=True, seed=seed + 1),
        tokenizer_2=tokenizer_2,
        unet=_filled(unet, seed),
        add_watermarker=False,
    )
    return _saved(pipeline, folder)


def build_sd3(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A Stable Diffusion 3 checkpoint; the plain one has 3.5 medium's second attention and normed queries.

    Widths are multiples of 32, as in all real ones: torch's functions of single values on a CPU are the same
    bits for a row of any company only then.
    """
    tokenizer, tokenizer_3 = clip_tokenizer(), t5_tokenizer()
    config: dict[str, Any] = {
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "num_attention_heads": 3,
        "attention_head_dim": 32,
        "joint_attention_dim": 64,
        "caption_projection_dim": 96,
        "pooled_projection_dim": 56,
        "pos_embed_max_size": 12,
        "dual_attention_layers": (0, 1),
        "qk_norm": "rms_norm",
    }
    pipeline = diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(4, seed=seed),
        text_encoder=clip_encoder(tokenizer, 24, projects=True, seed=seed),
        tokenizer=tokenizer,
        text_encoder_2=clip_encoder(tokenizer, 32, projects=True, seed=seed + 1),
        tokenizer_2=tokenizer,
        text_encoder_3=t5_encoder(tokenizer_3, 64, seed=seed),
        tokenizer_3=tokenizer_3,
        transformer=_filled(diffusers.SD3Transformer2DModel(**(config | overrides)), seed),
    )
    return _saved(pipeline, folder)


def _saved(pipeline: Any, folder: Path) -> Path:
    transformers.utils.logging.disable_progress_bar()
    pipeline.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Case:
    """One kind of checkpoint.

    Args:
        build: Writes it into a folder.
        pipeline: Name of its class in diffusers.
        guidance: What rows may ask for; the first has none. Anything left out is the pipeline's default.
        slow: Whether fast runs leave it out.
        options: For loading the pipeline.
        scales: Those of guidance that its pipeline takes.
    """

    build: Callable[[Path], Path]
    pipeline: str
    guidance: Sequence[Mapping[str, Any]]
    slow: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    scales: Sequence[str] = field(default=("true_cfg_scale", "guidance_scale"))

    def load(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        pipeline_class = getattr(diffusers, self.pipeline)
        pipeline = pipeline_class.from_pretrained(folder, dtype=dtype, **self.options)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def rows(self, seed: int, count: int = 6, *, multiple: int = 16) -> list[tuple[str, SamplingParams]]:
        """Prompts and parameters of rows that differ in everything."""
        rng = random.Random(seed)
        rows = []
        for index in range(count):
            params = SamplingParams(
                height=multiple * rng.randint(2, 7),
                width=multiple * rng.randint(2, 7),
                num_inference_steps=rng.randint(2, 5),
                seed=rng.choice([0, 2**32, 2**64 - 1, rng.getrandbits(64)]),
                **self.guidance[index % len(self.guidance)],
            )
            rows.append((" ".join(rng.choices(WORDS, k=rng.choice([1, 4, 12, 40]))), params))
        return rows

    def draw_alone(self, pipeline: Any, prompt: str, params: SamplingParams) -> np.ndarray:
        """uint8 ``[h, w, 3]``, as diffusers' pipeline gives it to its users."""
        given = {
            name: value
            for name in ("negative_prompt", *self.scales)
            if (value := getattr(params, name)) is not None
        }
        (image,) = pipeline(
            prompt,
            height=params.height,
            width=params.width,
            num_inference_steps=params.num_inference_steps,
            generator=torch.Generator("cpu").manual_seed(params.seed or 0),
            **given,
        ).images
        return np.asarray(image)


TRUE_CFG = (
    {"true_cfg_scale": 1.0},
    {"true_cfg_scale": 4.0, "negative_prompt": "blurry"},
    {"true_cfg_scale": 2.5, "negative_prompt": ""},
    {"true_cfg_scale": 5.0},
)

CLASSIC = (
    {"guidance_scale": 1.0},
    {},
    {"guidance_scale": 3.0, "negative_prompt": "blurry"},
    {"guidance_scale": 0.0, "negative_prompt": "low"},
    {"guidance_scale": 5.0, "negative_prompt": ""},
)


def sd3_case(*, slow: bool = True, **options: Any) -> Case:
    return Case(
        lambda folder: build_sd3(folder, **options),
        "StableDiffusion3Pipeline",
        CLASSIC,
        slow=slow,
        scales=("guidance_scale",),
    )


CASES = {
    "qwen_image": Case(build_tiny_qwen_image, "QwenImagePipeline", TRUE_CFG, scales=("true_cfg_scale",)),
    "flux_dev": Case(
        build_flux,
        "FluxPipeline",
        (
            {},
            {"guidance_scale": 1.0},
            {"true_cfg_scale": 3.0, "negative_prompt": "blurry", "guidance_scale": 6.0},
            {"true_cfg_scale": 2.0, "negative_prompt": ""},
            {"guidance_scale": 0.0, "true_cfg_scale": 3.0},
        ),
    ),
    "flux_schnell": Case(
        lambda folder: build_flux(folder, is_dev=False, seed=1),
        "FluxPipeline",
        ({}, {"guidance_scale": 0.0}, {"true_cfg_scale": 2.0, "negative_prompt": "low"}),
        slow=True,
    ),
    "sdxl": Case(
        build_sdxl,
        "StableDiffusionXLPipeline",
        (
            {"guidance_scale": 1.0},
            {"guidance_scale": 4.0, "negative_prompt": "blurry"},
            {},
            {"guidance_scale": 2.5, "negative_prompt": ""},
            {"guidance_scale": 0.0, "negative_prompt": "low"},
        ),
        options={"add_watermarker": False},
        scales=("guidance_scale",),
    ),
    "sd35_medium": sd3_case(slow=False),
    "sd35_large": sd3_case(dual_attention_layers=(), seed=3),
    "sd3_medium": sd3_case(dual_attention_layers=(), qk_norm=None, seed=4),
}
