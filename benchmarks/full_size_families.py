"""FLUX.1, Stable Diffusion 3.5 and SDXL at full width, random weights made on the device: no download."""

from __future__ import annotations

from functools import partial
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
    "qk_norm": "rms_norm",
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
SDXL_NOISE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "leading",
    "steps_offset": 1,
}
SD35_HEADS = {"sd35_large": (38, 192), "sd35_medium": (24, 384)}
"""Heads, and rows of the table of positions."""


def build(name: str, device: torch.device, *, num_layers: int, seed: int = 0) -> tuple[Any, Checkpoint]:
    """A diffusers pipeline in bfloat16 and what a folder of it would say of itself.

    Args:
        name: ``flux_dev``, ``sd35_large``, ``sd35_medium`` or ``sdxl``.
        device: Where the weights are drawn and stay.
        num_layers: Transformer blocks, for FLUX of each kind, for SDXL at most of each level; the first of
            3.5 medium has two attentions.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    made_by = {"flux_dev": _flux, "sdxl": _sdxl}.get(name, partial(_sd35, name))
    pipeline = made_by(device, num_layers)
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


def _flux(device: torch.device, num_layers: int) -> Any:
    import diffusers

    tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
    with random_weights(device):
        transformer = diffusers.FluxTransformer2DModel(
            num_layers=num_layers, num_single_layers=num_layers, guidance_embeds=True
        )
        vae = diffusers.AutoencoderKL(**VAE, scaling_factor=0.3611, shift_factor=0.1159)
        text_encoder = _clip(tokenizer, CLIP_L, projects=False)
        text_encoder_2 = _t5(tokenizer_2)
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae.eval(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=transformer.eval(),
    )


def _sd35(name: str, device: torch.device, num_layers: int) -> Any:
    import diffusers

    tokenizer, tokenizer_3 = clip_tokenizer(), t5_tokenizer()
    num_heads, side = SD35_HEADS[name]
    with random_weights(device):
        transformer = diffusers.SD3Transformer2DModel(
            **SD35,
            num_layers=num_layers,
            num_attention_heads=num_heads,
            caption_projection_dim=64 * num_heads,
            pos_embed_max_size=side,
            dual_attention_layers=(0,) if name == "sd35_medium" else (),
        )
        vae = diffusers.AutoencoderKL(**VAE, scaling_factor=1.5305, shift_factor=0.0609)
        text_encoder = _clip(tokenizer, CLIP_L, projects=True)
        text_encoder_2 = _clip(tokenizer, CLIP_G, projects=True)
        text_encoder_3 = _t5(tokenizer_3)
    return diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer,
        text_encoder_3=text_encoder_3,
        tokenizer_3=tokenizer_3,
        transformer=transformer.eval(),
    )


def _sdxl(device: torch.device, num_layers: int) -> Any:
    import diffusers

    tokenizer = clip_tokenizer()
    vae_config = VAE | {"latent_channels": 4, "use_quant_conv": True, "use_post_quant_conv": True}
    with random_weights(device):
        unet = diffusers.UNet2DConditionModel(
            **SDXL, transformer_layers_per_block=[min(depth, num_layers) for depth in SDXL_DEPTHS]
        )
        vae = diffusers.AutoencoderKL(**vae_config, scaling_factor=0.13025, force_upcast=True)
        text_encoder = _clip(tokenizer, CLIP_L, projects=False)
        text_encoder_2 = _clip(tokenizer, CLIP_G, projects=True)
    return diffusers.StableDiffusionXLPipeline(
        scheduler=diffusers.EulerDiscreteScheduler(**SDXL_NOISE),
        vae=vae.eval(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer,
        unet=unet.eval(),
        add_watermarker=False,
    )


def _clip(tokenizer: Any, config: dict[str, Any], *, projects: bool) -> Any:
    import transformers

    model_class = transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return model_class(
        transformers.CLIPTextConfig(vocab_size=len(tokenizer), num_hidden_layers=3, **config, **ids)
    ).eval()


def _t5(tokenizer: Any) -> Any:
    import transformers

    config = transformers.T5Config(vocab_size=len(tokenizer), num_layers=2, **T5_XXL)
    return transformers.T5EncoderModel(config).eval()
