"""The real Qwen-Image architecture with random weights, made on the device: no download needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.registry import FAMILIES, Checkpoint
from offline_diffusion.models.tiny import tiny_model_folder

TEXT_CONFIG = {  # Qwen2.5-VL-7B's language model
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
VISION_CONFIG = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 1,
    "out_hidden_size": 3584,
}


def build_pipeline(
    device: torch.device, *, num_layers: int = 60, num_text_layers: int = 28, seed: int = 0
) -> Any:
    """A diffusers ``QwenImagePipeline`` in bfloat16; 60 layers are 20.43 B parameters.

    Args:
        device: Where the weights are drawn and stay.
        num_layers: Transformer blocks.
        num_text_layers: Layers of the text encoder.
        seed: Of the weights.
    """
    import diffusers
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    small = diffusers.QwenImagePipeline.from_pretrained(tiny_model_folder())
    transformer = build_transformer(device, num_layers=num_layers, seed=seed)
    text_config = {**TEXT_CONFIG, "num_hidden_layers": num_text_layers}
    with random_weights(device):
        vae = diffusers.AutoencoderKLQwenImage()
        text_encoder = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text_config, vision_config=VISION_CONFIG)
        )
    pipeline = diffusers.QwenImagePipeline(
        scheduler=small.scheduler,
        vae=vae.eval(),
        text_encoder=text_encoder.eval(),
        tokenizer=small.tokenizer,
        transformer=transformer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device, torch.bfloat16)


def build_transformer(device: torch.device, *, num_layers: int = 60, seed: int = 0) -> Any:
    """The transformer alone; the same arguments give the same weights as those of `build_pipeline`."""
    import diffusers

    torch.manual_seed(seed)
    with random_weights(device):
        return diffusers.QwenImageTransformer2DModel(num_layers=num_layers).to(torch.bfloat16).eval()


@contextlib.contextmanager
def random_weights(device: torch.device) -> Iterator[None]:
    """Modules made inside are drawn on ``device`` in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def checkpoint(num_layers: int = 60) -> Checkpoint:
    """What a Qwen-Image folder of this size would say of itself."""
    capabilities = Capabilities(
        family="qwen_image", pipeline="QwenImagePipeline", num_layers=num_layers, tiled_decode=True
    )
    return Checkpoint("random weights", None, FAMILIES[0], capabilities, {"model": "random Qwen-Image"})
