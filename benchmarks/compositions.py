"""Random packs, stepped together and alone: what exactness means, for tests and benchmarks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.engine.packed_batch import PreparedRequest
from offline_diffusion.models.base import DiffusionModel, PackedInput
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import Request

SIZES = [(256, 256), (512, 512), (256, 768), (384, 640), (64, 64), (1024, 1024), (80, 176), (768, 512)]
"""Height and width in pixels."""

WORDS = ["storm", "lamp", "violet", "river", "seven", "quiet", "engines", "☂", "雨", "under", "glass"]


@dataclass(frozen=True)
class Forward:
    """What one step made of one request: noise predictions of its branches, and its latents after it."""

    noise_pred: Tensor
    latents: Tensor


def random_request(rng: random.Random, name: str, sizes: Sequence[tuple[int, int]] = SIZES) -> Request:
    """A request of random size, prompt length, step count and guidance."""
    height, width = rng.choice(sizes)
    return Request(
        request_id=name,
        prompt=" ".join(rng.choices(WORDS, k=rng.choice([1, 5, 30, 120]))),
        negative_prompt=rng.choice([None, "", "blurry, low quality"]),
        height=height,
        width=width,
        num_inference_steps=rng.choice([2, 3, 5, 8]),
        true_cfg_scale=rng.choice([1.0, 2.0, 7.5]),
        seed=rng.getrandbits(64),
    )


def resolved(request: Request, capabilities: Capabilities) -> Request:
    """The request with its guidance as the family reads it."""
    scales = request.true_cfg_scale, request.guidance_scale
    guidance = capabilities.resolve_guidance(*scales, request.negative_prompt)
    return replace(request, **guidance._asdict())


def prepare(runner: ModelRunner, request: Request, step_index: int = 0) -> PreparedRequest:
    """The request as it enters a pack, ``step_index`` steps on."""
    model = runner.model
    negative = model.tokenize(request.negative_prompt or "") if request.cfg_active else None
    prepared = runner.prepare(request, model.tokenize(request.prompt), negative)
    prepared.step_index = step_index
    return prepared


def prepared_composition(
    model: DiffusionModel, seed: int, sizes: Sequence[tuple[int, int]] = SIZES
) -> list[PreparedRequest]:
    """2 to 9 random requests, each at a random step of its own. Latents are the noise at every step."""
    rng = random.Random(seed)
    runner = ModelRunner(model)
    count = rng.choice([2, 3, 5, 9])
    requests = [resolved(random_request(rng, str(i), sizes), model.capabilities) for i in range(count)]
    return [prepare(runner, request, rng.randrange(request.num_inference_steps)) for request in requests]


def copy_of(prepared: PreparedRequest) -> PreparedRequest:
    """The same request with latents of its own: a step may change them in place."""
    return replace(prepared, latents=prepared.latents.clone())


def forward(model: DiffusionModel, requests: Sequence[PreparedRequest]) -> list[Forward]:
    """One step of copies of ``requests`` in one pack."""
    runner = ModelRunner(model)
    own = [copy_of(request) for request in requests]
    seen: list[Tensor] = []
    denoise_step = model.denoise_step

    def watched(batch: PackedInput) -> Tensor:
        seen.append(denoise_step(batch).clone())
        return seen[-1]

    model.denoise_step = watched  # type: ignore[method-assign]
    try:
        runner.denoise(own)
    finally:
        model.denoise_step = denoise_step  # type: ignore[method-assign]
    runner.drop_batch()
    (noise_pred,) = seen
    return [
        Forward(pred, request.latents)
        for pred, request in zip(_by_request(noise_pred, own), own, strict=True)
    ]


def _by_request(noise_pred: Tensor, requests: Sequence[PreparedRequest]) -> list[Tensor]:
    """A pack holds the positive branch of every request, then the negative ones of those guided."""
    guided = [index for index, request in enumerate(requests) if request.negative_embeds is not None]
    lengths = [request.num_image_tokens for request in requests]
    parts = noise_pred.split(lengths + [lengths[index] for index in guided])
    negatives = dict(zip(guided, parts[len(requests) :], strict=True))
    return [
        torch.cat([parts[index], negatives[index]]) if index in negatives else parts[index]
        for index in range(len(requests))
    ]


def random_job(seed: int, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Request]:
    """3 to 6 random requests, for whole runs."""
    rng = random.Random(seed)
    return [random_request(rng, str(index), sizes) for index in range(rng.choice([3, 4, 6]))]


def pixels(engine: Engine, requests: Sequence[Request]) -> list[np.ndarray]:
    """The images of ``requests`` in their order, uint8 ``[height, width, 3]``.

    Raises:
        RuntimeError: A request failed.
    """
    outputs = {output.request_id: output for output in engine.generate(requests)}
    images = []
    for request in requests:
        output = outputs[request.request_id]
        if output.pixels is None:
            raise RuntimeError(f"request {request.request_id} failed: {output.error}")
        images.append(output.pixels)
    return images
