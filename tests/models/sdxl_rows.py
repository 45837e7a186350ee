"""Random rows for the SDXL tests, and what diffusers' pipeline draws for each alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import MICRO_CONDITIONING, Pair, Request, SamplingParams

WORDS = ("storm", "lamp", "violet", "river", "seven", "quiet", "glass", "a red cup", "☂", "雨の夜", "café!")
GUIDANCE = (
    *((0.0, ""), (1.0, None), (0.7, "blurry")),
    *((5.0, None), (2.0, ""), (7.5, " "), (3.0, "blurry, low quality")),
)
"""``guidance_scale`` and ``negative_prompt``: three that turn guidance off, four that turn it on, the first
of them against nothing at all."""
MICRO: tuple[dict[str, Pair], ...] = (
    {},
    {"original_size": (512, 2048)},
    {"crops_coords_top_left": (0, 300), "target_size": (1024, 768)},
)
SIZES = ((64, 96), (72, 64), (64, 96), (128, 64))
"""Height and width; one is twice as likely, one is no multiple of what the UNet divides by."""


def random_rows(capabilities: Capabilities, seed: int, count: int = 7, max_steps: int = 6) -> list[Request]:
    """As a job resolves them."""
    rng = random.Random(seed)
    rows = []
    for index, (scale, negative_prompt) in enumerate(rng.sample(GUIDANCE, count)):
        height, width = rng.choice(SIZES)
        params = SamplingParams(
            height=height,
            width=width,
            num_inference_steps=rng.randint(1, max_steps),
            guidance_scale=scale,
            negative_prompt=negative_prompt,
            **MICRO[index % len(MICRO)],
        )
        prompt = " ".join(rng.choices(WORDS, k=rng.choice([1, 3, 20, 90])))
        image_seed = rng.choice([0, 2**53 + 1, 2**64 - 1, rng.getrandbits(64)])
        rows.append(capabilities.resolve(f"{seed}-{index}", prompt, params, seed=image_seed))
    return rows


def draw_alone(pipeline: Any, row: Request) -> np.ndarray:
    """uint8 ``[h, w, 3]``, as diffusers' pipeline gives it to its users."""
    (image,) = pipeline(
        row.prompt,
        negative_prompt=row.negative_prompt,
        guidance_scale=row.guidance_scale,
        height=row.height,
        width=row.width,
        num_inference_steps=row.num_inference_steps,
        **{name: pair for name in MICRO_CONDITIONING if (pair := getattr(row, name)) is not None},
        generator=torch.Generator("cpu").manual_seed(row.seed),
    ).images
    return np.asarray(image)
