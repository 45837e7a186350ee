"""What the speed does not show: exactness, the price of it, and the error of quantization."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from clock import Clock
from compositions import (
    SIZES,
    copy_of,
    forward,
    pixels,
    prepare,
    prepared_composition,
    random_job,
    resolved,
)
from ours import make_engine
from torch import Tensor
from workloads import make_workloads

from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.engine.packed_batch import PreparedRequest
from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.request import Request

Found = dict[str, Any]

# --- packed against alone ------------------------------------------------------------------------


def exactness(
    model: DiffusionModel,
    num_compositions: int,
    num_jobs: int,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> Found:
    """Largest differences between requests packed and the same requests alone.

    Args:
        num_compositions: Random packs, for noise predictions and latents after one step.
        num_jobs: Random whole jobs, for pixels; requests join and leave there.
        sizes: Heights and widths in pixels to choose from.
    """
    noise_pred, latents, num_requests = 0.0, 0.0, 0
    for seed in range(num_compositions):
        own_noise_pred, own_latents, count = _compare_composition(model, seed, sizes)
        noise_pred, latents = max(noise_pred, own_noise_pred), max(latents, own_latents)
        num_requests += count
    return {
        "max_abs_noise_pred": noise_pred,
        "max_abs_latents": latents,
        "max_abs_pixels": _compare_jobs(model, num_jobs, sizes) if num_jobs else None,
        "num_compositions": num_compositions,
        "num_requests": num_requests,
        "num_jobs": num_jobs,
    }


@torch.inference_mode()
def _compare_composition(
    model: DiffusionModel, seed: int, sizes: Sequence[tuple[int, int]]
) -> tuple[float, float, int]:
    prepared = prepared_composition(model, seed, sizes)
    noise_pred, latents = 0.0, 0.0
    for request, packed in zip(prepared, forward(model, prepared), strict=True):
        (alone,) = forward(model, [request])
        noise_pred = max(noise_pred, _max_abs(packed.noise_pred, alone.noise_pred))
        latents = max(latents, _max_abs(packed.latents, alone.latents))
    return noise_pred, latents, len(prepared)


def _max_abs(a: Tensor, b: Tensor) -> float:
    """NaN counts as a difference without end."""
    difference = float((a.double() - b.double()).abs().max())
    return sys.float_info.max if math.isnan(difference) else difference


def _compare_jobs(model: DiffusionModel, num_jobs: int, sizes: Sequence[tuple[int, int]]) -> int:
    many = make_engine(model, max_num_seqs=5, max_num_batched_tokens=12_000)
    one = make_engine(model, max_num_seqs=1, max_num_batched_tokens=12_000)
    largest = 0
    for seed in range(1000, 1000 + num_jobs):
        requests = [resolved(own, model.capabilities) for own in random_job(seed, sizes)]
        for packed, alone in zip(pixels(many, requests), pixels(one, requests), strict=True):
            largest = max(largest, int(np.abs(packed.astype(int) - alone.astype(int)).max()))
    return largest


# --- what the promise costs ----------------------------------------------------------------------

NUM_WARM_UP_STEPS, NUM_TURN_STEPS = 2, 4


@torch.inference_mode()
def promise_cost(model: DiffusionModel, clock: Clock, budget: int, *, scale: int, rounds: int = 4) -> Found:
    """How much longer a step takes for the rows that are padded so that no row depends on their number.

    Args:
        budget: Tokens of the full pack.
        scale: Of the sizes, see `workloads.make_workloads`.
        rounds: Turns of a few steps each, with and without.

    Returns:
        ``full_pack`` of 512² requests, and ``small_pack`` of a single 256² one, the worst case.
    """
    # Some steps more than are run: near its end a small pack is not worth recording.
    steps = 2 * rounds * (NUM_WARM_UP_STEPS + NUM_TURN_STEPS) + 10
    workloads = make_workloads(steps, scale=scale)
    runner = ModelRunner(model)
    small = [prepare(runner, workloads["256"].requests[0])]
    full: list[PreparedRequest] = []
    for request in workloads["512"].requests:
        full.append(prepare(runner, request))
        if sum(2 * own.num_image_tokens for own in full) >= budget:
            break
    return {
        "full_pack": _padding_cost(runner, full, clock, rounds),
        "small_pack": _padding_cost(runner, small, clock, rounds),
        "full_pack_requests": len(full),
    }


def _padding_cost(runner: ModelRunner, requests: list[PreparedRequest], clock: Clock, rounds: int) -> float:
    padded, unpadded = [], []
    for _ in range(rounds):
        padded += _turn(runner, requests, clock)
        with without_padding():
            unpadded += _turn(runner, requests, clock)
    return statistics.median(padded) / statistics.median(unpadded) - 1


def _turn(runner: ModelRunner, requests: list[PreparedRequest], clock: Clock) -> list[float]:
    """Seconds of a few steps of a new pack: a small one may be recorded at its second step and replayed."""
    runner.drop_batch()
    for _ in range(NUM_WARM_UP_STEPS):
        runner.denoise(requests)
    marks = [clock.mark()]
    for _ in range(NUM_TURN_STEPS):
        runner.denoise(requests)
        marks.append(clock.mark())
    runner.drop_batch()
    return [clock.seconds(*pair) for pair in pairwise(marks)]


@contextlib.contextmanager
def without_padding() -> Iterator[None]:
    """Inside, no product's rows are padded: faster perhaps, but not the same bits in every company.

    Raises:
        RuntimeError: Nothing in the package pads rows by ``pad_rows``: there is nothing to compare with.
    """
    owners = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("offline_diffusion.") and hasattr(module, "pad_rows")
    ]
    if not owners:
        raise RuntimeError("no module of offline_diffusion has pad_rows")
    before = [(module, module.pad_rows) for module in owners]
    for module in owners:
        module.pad_rows = _as_they_are
    try:
        yield
    finally:
        for module, function in before:
            module.pad_rows = function


def _as_they_are(x: Tensor, _min_rows: int) -> Tensor:
    return x


# --- what quantization changes -------------------------------------------------------------------


@dataclass(frozen=True)
class Drawing:
    """A request's way through the model, on the CPU.

    Args:
        noise_pred: Of its first step, all branches, ``[tokens, C]``.
        latents: After its last step, ``[tokens, C]``.
        image: float32 ``[height, width, 3]``, 0 … 1.
    """

    noise_pred: Tensor
    latents: Tensor
    image: Tensor


def error_requests(steps: int, scale: int) -> list[Request]:
    """Four of the uniform mix, one of them unguided."""
    requests = make_workloads(steps, scale=scale)["uniform"].requests[:5]
    return [replace(request, request_id=f"error-{request.request_id}") for request in requests[1:]]


@torch.inference_mode()
def draw(model: DiffusionModel, requests: Sequence[Request]) -> list[Drawing]:
    """All steps of ``requests``, which have equally many, in one pack, and their images."""
    runner = ModelRunner(model)
    prepared = [prepare(runner, request) for request in requests]
    first = forward(model, prepared)
    running = [copy_of(request) for request in prepared]
    for _ in range(requests[0].num_inference_steps):
        runner.denoise(running)
    runner.drop_batch()
    images = [model.post_decode(own.latents, own.request.height, own.request.width) for own in running]
    return [
        Drawing(step.noise_pred.cpu(), own.latents.cpu(), image.cpu())
        for step, own, image in zip(first, running, images, strict=True)
    ]


def quantization_error(reference: Sequence[Drawing], drawn: Sequence[Drawing]) -> Found:
    """How far ``drawn`` is from ``reference``, the means over requests and the worst of them."""
    pairs = list(zip(reference, drawn, strict=True))
    noise_pred = [relative_l2(b.noise_pred, a.noise_pred) for a, b in pairs]
    latents = [relative_l2(b.latents, a.latents) for a, b in pairs]
    ratios = [psnr(b.image, a.image) for a, b in pairs]
    finite = [ratio for ratio in ratios if ratio is not None]
    return {
        "noise_pred_relative_l2": statistics.fmean(noise_pred),
        "noise_pred_relative_l2_max": max(noise_pred),
        "latents_relative_l2": statistics.fmean(latents),
        "latents_relative_l2_max": max(latents),
        "psnr_db": statistics.fmean(finite) if finite else None,
        "psnr_db_min": min(finite) if finite else None,
        "num_requests": len(pairs),
    }


def relative_l2(value: Tensor, reference: Tensor) -> float:
    """``|value - reference| / |reference|``."""
    reference = reference.double()
    return float((value.double() - reference).norm() / reference.norm())


def psnr(value: Tensor, reference: Tensor) -> float | None:
    """Peak signal-to-noise ratio of images from 0 to 1 in decibels; None where they are equal."""
    mean_square = float((value.double() - reference.double()).square().mean())
    return -10 * math.log10(mean_square) if mean_square else None
