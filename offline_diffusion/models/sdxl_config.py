"""What an SDXL checkpoint can do, read from its configs. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offline_diffusion.models.capabilities import BatchKind, Capabilities
from offline_diffusion.models.unet_cost import unet_cost

REFUSED_COLUMNS = {
    "clip_skip": "another layer of the text encoders",
    "denoising_end": "handing over to a refiner",
    "guidance_rescale": "rescaled guidance",
    "ip_adapter_image": "an image as a prompt",
    "negative_prompt_2": "a prompt for the second encoder alone",
    "prompt_2": "a prompt for the second encoder alone",
}
"""By the names that diffusers' pipeline has for them."""


def sdxl_capabilities(read: Callable[[str], dict[str, Any]]) -> Capabilities:
    """From ``read``, which gives a JSON file of the checkpoint by its path inside it."""
    unet, vae = read("unet/config.json"), read("vae/config.json")
    vae_pixels = 2 ** (len(vae.get("block_out_channels", (0,))) - 1)
    default_side = int(unet.get("sample_size") or 128)
    cost = unet_cost(unet)
    limits = {
        name: int(read(f"{part}/config.json").get("max_position_embeddings", 77))
        for name, part in (("clip_l", "text_encoder"), ("clip_g", "text_encoder_2"))
    }
    return Capabilities(
        family="sdxl",
        pipeline="StableDiffusionXLPipeline",
        batch_kind=BatchKind.STACKED,
        default_height=default_side * vae_pixels,
        default_width=default_side * vae_pixels,
        size_multiple=vae_pixels,
        patch_pixels=vae_pixels,
        default_true_cfg_scale=5.0,
        default_guidance_scale=5.0,
        guidance="classic",
        micro_conditioning=True,
        refused_columns=REFUSED_COLUMNS,
        guides_from_nothing=bool(read("model_index.json").get("force_zeros_for_empty_prompt", True)),
        max_prompt_tokens=max(limits.values()),
        prompt_limits=limits,
        padded_text_tokens=max(limits.values()),
        hidden_size=unet["block_out_channels"][0],
        unet_flops=(cost.per_position, cost.per_square),
        num_parameters=cost.num_parameters,
    )
