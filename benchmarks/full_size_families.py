"""FLUX.1, Stable Diffusion 3 and 3.5 and SDXL with random weights made on the device: no download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from full_size import random_weights
from made_tokenizers import clip_tokenizer, t5_tokenizer

from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.registry import FAMILIES, Checkpoint

CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "projection_dim": 768}
CLIP_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10_240, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SD35 = {
    "sample_size": 128,
    "in_channels": 16,
    "out_channels": 16,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
}
SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
SDXL_DEPTHS = (1, 2, 10)
"""Transformer blocks of a level."""
CLIP_L_DEPTH, CLIP_G_DEPTH, T5_XXL_DEPTH = 12, 32, 24
FLUX_DEPTHS = (19, 38)
"""Double and single blocks."""
SDXL_NOISE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "leading",
    "steps_offset": 1,
}


@dataclass(frozen=True)
class _SD3:
    """What tells the transformers of Stable Diffusion 3 and 3.5 apart; the last, a side of the positions."""

    num_layers: int
    num_heads: int
    num_dual: int
    qk_norm: str | None
    pos_embed_max_size: int


SD3_KINDS = {
    "sd3_medium": _SD3(24, 24, 0, None, 192),
    "sd35_medium": _SD3(24, 24, 13, "rms_norm", 384),
    "sd35_large": _SD3(38, 38, 0, "rms_norm", 192),
}
NAMES = ("flux_dev", "flux_schnell", *SD3_KINDS, "sdxl", "sdxl_turbo")

TINY: dict[str, dict[str, Any]] = {
    "clip": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "projection_dim": 32},
    "t5": {"d_model": 48, "d_kv": 16, "d_ff": 96, "num_heads": 2},
    "vae": {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "layers_per_block": 1},
    "flux": {
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "axes_dims_rope": (8, 12, 12),
        "joint_attention_dim": 48,
        "pooled_projection_dim": 32,
    },
    "sd3": {
        "num_attention_heads": 2,
        "caption_projection_dim": 128,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 64,
    },
    "unet": {
        "block_out_channels": (32, 32, 64),
        "attention_head_dim": (1, 1, 2),
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 6 * 8,
    },
}
"""Narrow parts instead, to rehearse on a CPU."""


@dataclass(frozen=True)
class _Size:
    """How large the parts are made.

    Args:
        num_layers: Most blocks of a kind in the transformer, None for all.
        num_text_layers: Likewise of a text encoder.
        is_tiny: Whether parts are narrow.
    """

    num_layers: int | None
    num_text_layers: int | None
    is_tiny: bool

    def blocks(self, depth: int) -> int:
        return depth if self.num_layers is None else min(depth, self.num_layers)

    def text_layers(self, depth: int) -> int:
        return depth if self.num_text_layers is None else min(depth, self.num_text_layers)

    def narrow(self, part: str) -> dict[str, Any]:
        return TINY[part] if self.is_tiny else {}


def build(
    name: str,
    device: torch.device,
    *,
    num_layers: int | None = None,
    num_text_layers: int | None = None,
    tiny: bool = False,
    seed: int = 0,
) -> tuple[Any, Checkpoint]:
    """A diffusers pipeline in bfloat16 and what a folder of it would say of itself.

    Args:
        name: One of `NAMES`.
        device: Where the weights are drawn and stay.
        num_layers: At most so many transformer blocks of each kind, for SDXL of each level; None: as many as
            the published checkpoint has.
        num_text_layers: Likewise layers of each text encoder.
        tiny: Narrow parts, to rehearse on a CPU.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    makers = {"flux": _flux, "sdxl": _sdxl, "sd3": _sd3, "sd35": _sd3}
    size = _Size(num_layers, num_text_layers, tiny)
    with random_weights(device):
        parts = makers[name.split("_", maxsplit=1)[0]](name, size)
        parts["vae"] = _vae(name, size)
    pipeline = _pipeline(name, parts)
    pipeline.set_progress_bar_config(disable=True)
    family = next(own for own in FAMILIES if own.pipeline == type(pipeline).__name__)
    return pipeline.to(device, torch.bfloat16), Checkpoint(
        "random weights", None, family, _capabilities(pipeline, family.capabilities), {"model": name}
    )


def _capabilities(pipeline: Any, read_by: Any) -> Capabilities:
    """Read from the parts' configs as from a folder's files."""

    def read(path: str) -> dict[str, Any]:
        if path == "model_index.json":
            return dict(pipeline.config)
        config = getattr(pipeline, path.split("/", maxsplit=1)[0]).config
        return dict(config) if isinstance(config, dict) else config.to_dict()  # type: ignore[no-any-return]

    capabilities = read_by(read)
    assert isinstance(capabilities, Capabilities)
    return capabilities


def _pipeline(name: str, parts: dict[str, Any]) -> Any:
    """diffusers' pipeline of these parts, with the tokenizers and the noise scheduler that it takes."""
    import diffusers

    noise = diffusers.FlowMatchEulerDiscreteScheduler
    if name.startswith("flux"):
        shift = {"shift": 3.0, "use_dynamic_shifting": True} if name == "flux_dev" else {"shift": 1.0}
        tokenizers = {"tokenizer": clip_tokenizer(), "tokenizer_2": t5_tokenizer()}
        return diffusers.FluxPipeline(**parts, **tokenizers, scheduler=noise(**shift))
    clip = clip_tokenizer()
    tokenizers = {"tokenizer": clip, "tokenizer_2": clip}
    if name.startswith("sd3"):
        tokenizers["tokenizer_3"] = t5_tokenizer()
        return diffusers.StableDiffusion3Pipeline(**parts, **tokenizers, scheduler=noise(shift=3.0))
    scheduler: Any = diffusers.EulerDiscreteScheduler(**SDXL_NOISE)
    if name == "sdxl_turbo":
        scheduler = diffusers.EulerAncestralDiscreteScheduler(
            **(SDXL_NOISE | {"timestep_spacing": "trailing"})
        )
    return diffusers.StableDiffusionXLPipeline(
        **parts, **tokenizers, scheduler=scheduler, add_watermarker=False
    )


def _flux(name: str, size: _Size) -> dict[str, Any]:
    import diffusers

    num_double, num_single = map(size.blocks, FLUX_DEPTHS)
    transformer = diffusers.FluxTransformer2DModel(
        num_layers=num_double,
        num_single_layers=num_single,
        guidance_embeds=name == "flux_dev",
        **size.narrow("flux"),
    )
    return {
        "transformer": transformer.eval(),
        "text_encoder": _clip(CLIP_L, CLIP_L_DEPTH, size, projects=False),
        "text_encoder_2": _t5(size),
    }


def _sd3(name: str, size: _Size) -> dict[str, Any]:
    import diffusers

    kind = SD3_KINDS[name]
    num_layers = size.blocks(kind.num_layers)
    config = SD35 | {
        "num_layers": num_layers,
        "num_attention_heads": kind.num_heads,
        "caption_projection_dim": 64 * kind.num_heads,
        "pos_embed_max_size": kind.pos_embed_max_size,
        "dual_attention_layers": tuple(range(min(kind.num_dual, num_layers))),
        "qk_norm": kind.qk_norm,
    }
    transformer = diffusers.SD3Transformer2DModel(**(config | size.narrow("sd3")))
    return {
        "transformer": transformer.eval(),
        "text_encoder": _clip(CLIP_L, CLIP_L_DEPTH, size, projects=True),
        "text_encoder_2": _clip(CLIP_G, CLIP_G_DEPTH, size, projects=True),
        "text_encoder_3": _t5(size, **({"d_model": 64} if size.is_tiny else {})),
    }


def _sdxl(name: str, size: _Size) -> dict[str, Any]:  # noqa: ARG001
    import diffusers

    depths = [size.blocks(depth) for depth in SDXL_DEPTHS]
    unet = diffusers.UNet2DConditionModel(**(SDXL | size.narrow("unet")), transformer_layers_per_block=depths)
    return {
        "unet": unet.eval(),
        "text_encoder": _clip(CLIP_L, CLIP_L_DEPTH, size, projects=False),
        "text_encoder_2": _clip(CLIP_G, CLIP_G_DEPTH, size, projects=True),
    }


def _vae(name: str, size: _Size) -> Any:
    import diffusers

    scales: dict[str, Any] = {"scaling_factor": 1.5305, "shift_factor": 0.0609}
    if name.startswith("flux"):
        scales = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
    if name.startswith("sdxl"):
        scales = {"scaling_factor": 0.13025, "force_upcast": True, "latent_channels": 4}
        scales |= {"use_quant_conv": True, "use_post_quant_conv": True}
    return diffusers.AutoencoderKL(**(VAE | scales | size.narrow("vae"))).eval()


def _clip(config: dict[str, Any], depth: int, size: _Size, *, projects: bool) -> Any:
    import transformers

    tokenizer = clip_tokenizer()
    model_class = transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    own = config | size.narrow("clip") | ids
    return model_class(
        transformers.CLIPTextConfig(
            vocab_size=len(tokenizer), num_hidden_layers=size.text_layers(depth), **own
        )
    ).eval()


def _t5(size: _Size, **overrides: Any) -> Any:
    import transformers

    own = T5_XXL | size.narrow("t5") | overrides
    layers = size.text_layers(T5_XXL_DEPTH)
    config = transformers.T5Config(vocab_size=len(t5_tokenizer()), num_layers=layers, **own)
    return transformers.T5EncoderModel(config).eval()
