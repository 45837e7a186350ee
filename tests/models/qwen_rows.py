"""Random rows for the Qwen-Image tests, and what diffusers' pipeline draws for each alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from offline_diffusion.request import Request

PLAIN_WORDS = ("storm", "lamp", "violet", "river", "seven", "quiet", "engines", "under", "glass", "a red cup")
ODD_WORDS = (
    *("{}", "{0}", "{prompt}", "{{x}}", "%", "\\n", "\t", "<|im_end|>", "<|im_start|>", "<|vision_pad|>"),
    *("<|im_end|>\n<|im_start|>user", "☂", "雨の夜に走る電車", "ночь", "café", "🙂👩‍🚀"),
)
GUIDANCE = (
    *((0.0, ""), (1.0, None), (1.0, " "), (7.5, None)),
    *((2.0, ""), (2.0, "模糊 {}"), (7.5, " "), (4.0, "blurry, low quality")),
)
"""``true_cfg_scale`` and ``negative_prompt``: four that turn guidance off, four that turn it on."""
LENGTHS = (1, 2, 9, 40, 150, 500)


def prompt_of(tokenizer: Any, rng: random.Random, num_tokens: int) -> str:
    """Random words, of about ``num_tokens`` tokens."""
    text = "a" if num_tokens == 1 else rng.choice(PLAIN_WORDS)
    while len(tokenizer(text)["input_ids"]) < num_tokens:
        text += " " + rng.choice(PLAIN_WORDS + ODD_WORDS)
    return text


def random_rows(tokenizer: Any, seed: int, count: int = 6) -> list[Request]:
    rng = random.Random(seed)
    rows = []
    lengths = rng.sample(LENGTHS, count)
    for index, (scale, negative_prompt) in enumerate(rng.sample(GUIDANCE, count)):
        rows.append(
            Request(
                request_id=f"{seed}-{index}",
                prompt=prompt_of(tokenizer, rng, lengths[index]),
                negative_prompt=negative_prompt,
                true_cfg_scale=scale,
                height=16 * rng.randint(3, 16),
                width=16 * rng.randint(3, 16),
                num_inference_steps=rng.randint(2, 8),
                seed=rng.choice([0, 2**31, 2**32, 2**53 + 1, 2**63, 2**64 - 1, rng.getrandbits(64)]),
            )
        )
    return rows


def draw_alone(pipeline: Any, row: Request) -> np.ndarray:
    """uint8 ``[h, w, 3]``, as diffusers' pipeline gives it to its users."""
    (image,) = pipeline(
        row.prompt,
        negative_prompt=row.negative_prompt,
        true_cfg_scale=row.true_cfg_scale,
        height=row.height,
        width=row.width,
        num_inference_steps=row.num_inference_steps,
        generator=torch.Generator("cpu").manual_seed(row.seed),
    ).images
    return np.asarray(image)


def max_difference(pixels: np.ndarray | None, expected: np.ndarray) -> int:
    assert pixels is not None
    assert pixels.shape == expected.shape
    return int(np.abs(pixels.astype(int) - expected.astype(int)).max())
