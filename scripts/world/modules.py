"""The small model's parts: tokenizer, text encoder, transformer, and the folder they make."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from offline_diffusion.models.tiny import TEMPLATE_PREFIX, make_text_encoder, make_tokenizer
from world.captions import caption
from world.recipe import DEFAULTS, SCHEDULER_CONFIG, SIZES, TEXT_CONFIG, TRANSFORMER_CONFIG, VISION_CONFIG
from world.scenes import sample_scene

VOCAB_SIZE = 1024
NUM_TEXTS = 6000
TAIL = "<|im_end|>\n<|im_start|>assistant\n"
"""What the pipeline puts after a prompt."""


def captions_tokenizer() -> Any:
    """A ``Qwen2Tokenizer`` to which the words of captions and template are one token each; any other text
    encodes in pieces of words or bytes."""
    return make_tokenizer(_texts(), VOCAB_SIZE)


def _texts() -> Iterator[str]:
    rng = random.Random("tokenizer")
    for _ in range(NUM_TEXTS):
        size = rng.choice(SIZES)
        yield caption(sample_scene(rng, *size, related=0.4), rng)
    for _ in range(400):
        yield TEMPLATE_PREFIX.replace("<|im_start|>", "").replace("<|im_end|>", "")
        yield "assistant\n"


def make_modules(seed: int) -> tuple[Any, Any, Any]:
    """Tokenizer, text encoder and transformer, fresh, float32, on the CPU."""
    import diffusers

    tokenizer = captions_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = make_text_encoder(tokenizer, TEXT_CONFIG, VISION_CONFIG)
        transformer = diffusers.QwenImageTransformer2DModel(**TRANSFORMER_CONFIG)
    with torch.no_grad():
        for block in transformer.transformer_blocks:  # blocks begin as the identity
            for modulation in (block.img_mod[1], block.txt_mod[1]):
                modulation.weight.zero_()
                modulation.bias.zero_()
        for layer in (transformer.norm_out.linear, transformer.proj_out):
            layer.weight.zero_()
            layer.bias.zero_()
    return tokenizer, text_encoder, transformer


def load_modules(folder: Path) -> tuple[Any, Any, Any]:
    """The same three out of a model folder, float32."""
    import diffusers
    import transformers

    return (
        transformers.Qwen2Tokenizer.from_pretrained(folder / "tokenizer"),
        transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder / "text_encoder", dtype=torch.float32
        ),
        diffusers.QwenImageTransformer2DModel.from_pretrained(
            folder / "transformer", torch_dtype=torch.float32
        ),
    )


def save_folder(folder: Path, tokenizer: Any, text_encoder: Any, transformer: Any, vae: Any) -> None:
    """Writes a complete model folder in diffusers' layout, weights in bfloat16."""
    import diffusers

    pipeline = diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULER_CONFIG),
        vae=vae.to(torch.bfloat16),
        text_encoder=text_encoder.to(torch.bfloat16),
        tokenizer=tokenizer,
        transformer=transformer.to(torch.bfloat16),
    )
    pipeline.save_pretrained(folder)
    for path in folder.glob("*/config.json"):
        _forget_its_origin(path)
    text = json.dumps(DEFAULTS, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")


def _forget_its_origin(path: Path) -> None:
    """Takes out of a config the folder that the part was loaded from, and the precision that it had then."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)
    for value in config.values():
        if isinstance(value, dict):
            value.pop("dtype", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
