"""What a checkpoint of each family can do, read from its configs. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from offline_diffusion.errors import UnsupportedModelError
from offline_diffusion.models.capabilities import BatchKind, Capabilities
from offline_diffusion.models.unet_cost import unet_cost

ConfigReader = Callable[[str], dict[str, Any]]
"""Reads one JSON file of a checkpoint by its path inside it."""

REFUSED_COLUMNS = {
    "prompt_2": "a prompt for the second encoder alone",
    "negative_prompt_2": "a prompt for the second encoder alone",
    "ip_adapter_image": "an image as a prompt",
    "ip_adapter_image_embeds": "an image as a prompt",
    "negative_ip_adapter_image": "an image as a prompt",
    "negative_ip_adapter_image_embeds": "an image as a prompt",
    "sigmas": "a noise schedule of a row's own",
    "timesteps": "a noise schedule of a row's own",
    "mu": "a shift of a row's own",
    "eta": "an amount of fresh noise of a row's own",
    "clip_skip": "another layer of the text encoders",
    "max_sequence_length": "a prompt limit of a row's own",
    "pag_scale": "perturbed attention guidance",
    "pag_adaptive_scale": "perturbed attention guidance",
}
"""What the diffusers pipelines of these families take and nobody here does, by their names for it."""

SD3_REFUSED_COLUMNS = REFUSED_COLUMNS | {
    "prompt_3": "a prompt for the third encoder alone",
    "negative_prompt_3": "a prompt for the third encoder alone",
    "skip_guidance_layers": "skip-layer guidance",  # a third forward in some of the steps
    "skip_layer_guidance_scale": "skip-layer guidance",
    "skip_layer_guidance_start": "skip-layer guidance",
    "skip_layer_guidance_stop": "skip-layer guidance",
}

SDXL_REFUSED_COLUMNS = REFUSED_COLUMNS | {
    "denoising_end": "handing over to a refiner",
    "guidance_rescale": "rescaled guidance",
    "negative_original_size": "micro-conditioning of the negative prompt alone",
    "negative_crops_coords_top_left": "micro-conditioning of the negative prompt alone",
    "negative_target_size": "micro-conditioning of the negative prompt alone",
}


def qwen_image_capabilities(read: ConfigReader) -> Capabilities:
    """Of a Qwen-Image checkpoint."""
    transformer, vae = read("transformer/config.json"), read("vae/config.json")
    patch_pixels = 2 ** len(vae.get("temperal_downsample", (0, 0, 0))) * 2
    hidden = transformer.get("num_attention_heads", 24) * transformer.get("attention_head_dim", 128)
    return Capabilities(
        family="qwen_image",
        pipeline="QwenImagePipeline",
        default_height=64 * patch_pixels,
        default_width=64 * patch_pixels,
        size_multiple=patch_pixels,
        # positions: images from -n/2 to n/2, text after n/2, both in one table of 4096
        max_size=2 * (4096 - 512) * patch_pixels,
        patch_pixels=patch_pixels,
        prompt_limits={"qwen2.5-vl": 512},
        num_layers=transformer.get("num_layers", 60),
        hidden_size=hidden,
        num_parameters=36 * hidden**2 * transformer.get("num_layers", 60),
        tiled_decode=True,
    )


def flux_capabilities(read: ConfigReader) -> Capabilities:
    """Of a FLUX.1 checkpoint: dev takes an embedded guidance scale, schnell none."""
    _refuse_left_out(read, "FLUX.1", 2)
    transformer, vae, clip = (read(f"{part}/config.json") for part in ("transformer", "vae", "text_encoder"))
    num_double, num_single = transformer.get("num_layers", 19), transformer.get("num_single_layers", 38)
    hidden = transformer.get("num_attention_heads", 24) * transformer.get("attention_head_dim", 128)
    is_dev = transformer.get("guidance_embeds", False)
    vae_pixels = _vae_pixels(vae)
    return Capabilities(
        family="flux",
        pipeline="FluxPipeline",
        default_height=128 * vae_pixels,
        default_width=128 * vae_pixels,
        size_multiple=2 * vae_pixels,
        patch_pixels=2 * vae_pixels,
        default_num_inference_steps=28 if is_dev else 4,
        default_true_cfg_scale=1.0,
        default_guidance_scale=3.5 if is_dev else None,
        guidance="embedded" if is_dev else "true_cfg",
        max_prompt_tokens=512,
        prompt_limits={"clip": clip.get("max_position_embeddings", 77), "t5": 512},
        padded_text_tokens=512,
        num_layers=num_double + num_single,
        hidden_size=hidden,
        refused_columns=REFUSED_COLUMNS,
        num_parameters=(36 * num_double + 15 * num_single) * hidden**2,
    )


def sd3_capabilities(read: ConfigReader) -> Capabilities:
    """Of a Stable Diffusion 3 or 3.5 checkpoint."""
    _refuse_left_out(read, "Stable Diffusion 3", 3)
    transformer, clip = read("transformer/config.json"), read("text_encoder/config.json")
    hidden = transformer.get("num_attention_heads", 18) * transformer.get("attention_head_dim", 64)
    num_layers, num_dual = (
        transformer.get("num_layers", 18),
        len(transformer.get("dual_attention_layers", ())),
    )
    vae_pixels = _vae_pixels(read("vae/config.json"))
    clip_tokens = clip.get("max_position_embeddings", 77)
    return Capabilities(
        family="sd3",
        pipeline="StableDiffusion3Pipeline",
        default_height=transformer.get("sample_size", 128) * vae_pixels,
        default_width=transformer.get("sample_size", 128) * vae_pixels,
        size_multiple=2 * vae_pixels,
        max_size=transformer.get("pos_embed_max_size", 96) * 2 * vae_pixels,
        patch_pixels=2 * vae_pixels,
        default_num_inference_steps=28,
        default_true_cfg_scale=7.0,
        default_guidance_scale=7.0,
        guidance="classic",
        max_prompt_tokens=256,
        prompt_limits={"clip": clip_tokens, "clip_2": clip_tokens, "t5": 256},
        padded_text_tokens=clip_tokens + 256,
        num_layers=num_layers,
        hidden_size=hidden,
        num_image_layers=num_dual,
        refused_columns=SD3_REFUSED_COLUMNS,
        num_parameters=(36 * num_layers + 7 * num_dual) * hidden**2,
    )


def sdxl_capabilities(read: ConfigReader) -> Capabilities:
    """Of an SDXL checkpoint."""
    _refuse_left_out(read, "SDXL", 2)
    unet, vae = read("unet/config.json"), read("vae/config.json")
    vae_pixels, default_side = _vae_pixels(vae), int(unet.get("sample_size") or 128)
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
        refused_columns=SDXL_REFUSED_COLUMNS,
        guides_from_nothing=bool(read("model_index.json").get("force_zeros_for_empty_prompt", True)),
        max_prompt_tokens=max(limits.values()),
        prompt_limits=limits,
        padded_text_tokens=max(limits.values()),
        hidden_size=unet["block_out_channels"][0],
        unet_flops=(cost.per_position, cost.per_square),
        num_parameters=cost.num_parameters,
    )


def _refuse_left_out(read: ConfigReader, family: str, num_encoders: int) -> None:
    """Checkpoints are also saved without an encoder: ``[null, null]`` in ``model_index.json``.

    Raises:
        UnsupportedModelError: With the name of the part.
    """
    index = read("model_index.json")
    for number in range(1, num_encoders + 1):
        for kind in ("text_encoder", "tokenizer"):
            part = kind if number == 1 else f"{kind}_{number}"
            found = index.get(part, (part,))
            if found is None or found[0] is None:
                raise UnsupportedModelError(
                    f"the checkpoint has no {part}, which {family} is supported with only",
                    hint="use the whole checkpoint, not one saved without this part",
                )


def _vae_pixels(vae: Mapping[str, Any]) -> int:
    """Pixels along one side of a latent of an ``AutoencoderKL``."""
    return int(2 ** (len(vae.get("block_out_channels", (0,))) - 1))
