"""How many tokens a step may have on this device, measured at start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from offline_diffusion.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from offline_diffusion.engine.batch import Batch, build_batch
from offline_diffusion.engine.packed_batch import PreparedRequest
from offline_diffusion.errors import BackendError
from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.request import Request, SamplingParams

logger = logging.getLogger(__name__)

RESERVE = 0.05
"""Share of the device's memory left to fragmentation and libraries."""

BUDGETS = (67_584, 33_792)
"""Token budgets of which one is chosen, in tokens of 16 × 16 pixels: 8 or 4 guided images of 1024 × 1024
pixels with 128 text tokens a branch. Smaller ones, even where as fast, leave mixed packs with gaps."""

MEASURED_TOKENS = 8_192
"""Of the step whose peak of memory is measured."""

LARGEST_WHOLE_PIXELS = 2048 * 2048
"""An image up to which a decode's memory grows with the pixels, where larger ones are decoded in tiles."""

GOOD_SHARE = 0.99
"""Of the best measured rate: what is left is noise, and not worth longer steps."""

MEASURED_SIDE = 720
"""Pixels along a side of the images in what is measured: about 2,000 tokens."""

SIGNS_OF_NO_MEMORY = (
    "DefaultCPUAllocator",  # torch on a CPU
    "CUDA error: out of memory",  # pinned memory, graphs
    "CUBLAS_STATUS_ALLOC_FAILED",
    "unable to find an engine to execute this computation",  # cuDNN, when no algorithm gets its workspace
)

IMAGE_BYTES_PER_PIXEL = 3 * (4 + 4 + 1)
"""The least a decode holds at once: the image in float32, its scaled copy and the bytes."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or a CPU: libraries say so in many ways."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS_OF_NO_MEMORY)


def check_memory(request: Request, device: torch.device) -> str | None:
    """Why ``request`` cannot fit even into the empty device, or None; with its numbers."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = request.height * request.width * IMAGE_BYTES_PER_PIXEL
    if needed <= total:
        return None
    return (
        f"{request.height}x{request.width} px need at least {needed / 2**30:.0f} GiB, "
        f"the device has {total / 2**30:.0f} GiB"
    )


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What fits beside the resident weights, from measured peaks that are taken to grow linearly.

    Args:
        free_bytes: Of the device, less `RESERVE`.
        step_bytes: Peak of a step, a token of it.
        decode_bytes: Peak of a decode, a pixel of it.
        tiled_decode: Whether the family decodes large images in tiles.
    """

    free_bytes: int
    step_bytes: float
    decode_bytes: float
    tiled_decode: bool = False

    @property
    def max_tokens(self) -> int:
        """Tokens of a step that has the device for itself."""
        return max(1, int(self.free_bytes / self.step_bytes))

    def decode_tokens(self, num_pixels: int) -> int:
        """Tokens that take the room of decoding an image of so many pixels.

        Tiles of a large image take what the largest whole one takes; of the rest a pixel holds an eighth.
        """
        if self.tiled_decode:
            num_pixels = max(min(num_pixels, LARGEST_WHOLE_PIXELS), num_pixels // 8)
        return int(num_pixels * self.decode_bytes / self.step_bytes)


@torch.inference_mode()
def measure_limits(model: DiffusionModel) -> DeviceLimits | None:
    """From a real step and a real decode; None where the device does not tell.

    Raises:
        BackendError: Not even a small step fits beside the weights.
    """
    if model.device.type != "cuda":
        return None
    caps = model.capabilities
    try:
        step_bytes = _step_bytes(model)
        decode = _peak(model, lambda: _decode_once(model, caps.default_height, caps.default_width))
    except torch.OutOfMemoryError as error:
        raise BackendError(
            f"the model's weights leave no room for a step and a decode: {error}",
            hint="use a larger device or --quantization fp8",
        ) from None
    free, total = torch.cuda.mem_get_info(model.device)
    cached = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return DeviceLimits(
        free_bytes=int(free + cached - RESERVE * total),
        step_bytes=step_bytes,
        decode_bytes=decode / (caps.default_height * caps.default_width),
        tiled_decode=caps.tiled_decode,
    )


def _step_bytes(model: DiffusionModel) -> float:
    """Peak of a step by its tokens: a short one first, in which libraries take their share of the device."""
    _step_once(_measured_pack(model, 1), model)
    try:
        pack = _measured_pack(model, model.capabilities.own_tokens(MEASURED_TOKENS))
        return _peak(model, lambda: _step_once(pack, model)) / pack.num_tokens
    except torch.OutOfMemoryError:
        pack = _measured_pack(model, 1)
        return _peak(model, lambda: _step_once(pack, model)) / pack.num_tokens


@torch.inference_mode()
def fit_token_budget(model: DiffusionModel, asked: int | None, limits: DeviceLimits | None) -> int:
    """The token budget of a step.

    Args:
        model: A loaded family.
        asked: What the user wants; lowered, with a warning, where it does not fit. None: the smallest
            budget whose measured rate is within `GOOD_SHARE` of the best, or the default where nothing
            can be measured.
        limits: Of the device, beside one decode at the model's default size.
    """
    if limits is None:
        return model.capabilities.own_tokens(DEFAULT_MAX_NUM_BATCHED_TOKENS) if asked is None else asked
    caps = model.capabilities
    most = max(1, limits.max_tokens - limits.decode_tokens(caps.default_height * caps.default_width))
    if asked is None:
        return _measured_budget(model, most)
    if asked > most:
        logger.warning("a step of %d tokens does not fit on the device: the budget is %d", asked, most)
    return min(asked, most)


def _measured_budget(model: DiffusionModel, most: int) -> int:
    """Large packs first, so that all are measured on a warm device."""
    rates: dict[int, float] = {}
    for size in (own for own in map(model.capabilities.own_tokens, BUDGETS) if own <= most):
        try:
            pack = _measured_pack(model, size)
            if not rates:
                _step_once(pack, model)
            rates[size] = pack.num_tokens / min(_step_seconds(pack, model) for _ in range(2))
        except torch.OutOfMemoryError:
            most = size // 2
    if not rates:
        return most
    logger.info("tokens/s by token budget: %s", {size: round(rate) for size, rate in rates.items()})
    return choose_budget(rates)


def choose_budget(rates: Mapping[int, float]) -> int:
    """The smallest budget whose rate, in any unit, is within `GOOD_SHARE` of the best."""
    return min(size for size, rate in rates.items() if rate >= GOOD_SHARE * max(rates.values()))


def _step_seconds(pack: Batch, model: DiffusionModel) -> float:
    """On the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    _step_once(pack, model)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _peak(model: DiffusionModel, work: Callable[[], None]) -> int:
    torch.cuda.synchronize(model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    work()
    torch.cuda.synchronize(model.device)
    return int(torch.cuda.max_memory_allocated(model.device)) - before


def _measured_pack(model: DiffusionModel, num_tokens: int) -> Batch:
    """About ``num_tokens`` in squares of about `MEASURED_SIDE` pixels."""
    caps = model.capabilities
    (prompt,) = model.prepare_encode([model.tokenize("measure")])
    side = caps.size_multiple * max(1, round(MEASURED_SIDE / caps.size_multiple))
    tokens_each = caps.num_image_tokens(side, side) + prompt.num_tokens
    params = SamplingParams(
        height=side, width=side, num_inference_steps=8, true_cfg_scale=1.0, guidance_scale=1.0
    )
    requests = []
    for index in range(max(1, round(num_tokens / tokens_each))):
        request = caps.resolve(str(index), "measure", params, seed=index)
        sigmas, timesteps = model.prepare_timesteps(request)
        latents = model.prepare_latents(request).to(model.device).float()
        requests.append(PreparedRequest(request, prompt, None, sigmas, timesteps, latents))
    return build_batch(requests, model)


def _step_once(pack: Batch, model: DiffusionModel) -> None:
    pack.step_scheduler(pack.forward(model), model)


def _decode_once(model: DiffusionModel, height: int, width: int) -> None:
    num_tokens = model.capabilities.num_image_tokens(height, width)
    latents = torch.randn(num_tokens, model.num_latent_channels, device=model.device)
    model.post_decode(latents, height, width)
