"""How many tokens a step may have on this device, measured at start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offline_diffusion.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from offline_diffusion.engine.packed_batch import PackedBatch, PreparedRequest
from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.request import Request

logger = logging.getLogger(__name__)

RESERVE = 0.05
"""Share of the device's memory left to fragmentation and libraries."""


IMAGE_BYTES_PER_PIXEL = 3 * (4 + 4 + 1)
"""The least a decode holds at once: the image in float32, its scaled copy and the bytes."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or a CPU, whose allocator has no error class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


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
class MemoryProfile:
    """Peaks over the resident weights, in bytes."""

    free_bytes: int
    denoise_bytes: int
    decode_bytes: int


@torch.inference_mode()
def fit_token_budget(model: DiffusionModel, max_num_batched_tokens: int | None) -> int:
    """The budget asked for (None: the default), or less where one step and one decode would not fit.

    On a GPU one real step of about that many tokens is run, and one decode at the model's default size;
    peaks are taken to grow linearly with tokens. Elsewhere the budget is returned as it is.
    """
    if max_num_batched_tokens is None:
        max_num_batched_tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS
    if model.device.type != "cuda":
        return max_num_batched_tokens
    profile = measure_memory(model, max_num_batched_tokens)
    room = profile.free_bytes - profile.decode_bytes
    if profile.denoise_bytes <= room:
        return max_num_batched_tokens
    budget = max(1, int(max_num_batched_tokens * room / profile.denoise_bytes))
    logger.warning(
        "a step of %d tokens takes %.1f GiB, a decode %.1f GiB, free are %.1f GiB: the budget is %d tokens",
        max_num_batched_tokens,
        profile.denoise_bytes / 2**30,
        profile.decode_bytes / 2**30,
        profile.free_bytes / 2**30,
        budget,
    )
    return budget


def measure_memory(model: DiffusionModel, num_tokens: int) -> MemoryProfile:
    """Runs one step and one decode and reads the allocator's peaks."""
    free, total = torch.cuda.mem_get_info(model.device)
    reserved = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    caps = model.capabilities
    decode = _peak(model, lambda: _decode_once(model, caps.default_height, caps.default_width))
    try:
        denoise = _step_peak(model, num_tokens, num_tokens)
    except torch.OutOfMemoryError:
        denoise = _step_peak(model, num_tokens, max(1, num_tokens // 8))
    return MemoryProfile(int(free + reserved - RESERVE * total), denoise, decode)


def _step_peak(model: DiffusionModel, num_tokens: int, num_measured: int) -> int:
    """The peak of a step of ``num_tokens``, from a real one of about ``num_measured``."""
    requests = _measured_requests(model, num_measured)
    num_run = sum(request.num_image_tokens + request.prompt_embeds.shape[0] for request in requests)
    return _peak(model, lambda: _step_once(model, requests)) * num_tokens // num_run


def _peak(model: DiffusionModel, work: Callable[[], None]) -> int:
    torch.cuda.synchronize(model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    work()
    torch.cuda.synchronize(model.device)
    return int(torch.cuda.max_memory_allocated(model.device)) - before


def _measured_requests(model: DiffusionModel, num_tokens: int) -> list[PreparedRequest]:
    caps = model.capabilities
    prompt = model.prepare_encode(model.tokenize("measure"))
    side = caps.size_multiple * max(1, int(num_tokens**0.5) * caps.patch_pixels // caps.size_multiple)
    side = min(side, 2048)
    tokens_each = caps.num_image_tokens(side, side) + prompt.shape[0]
    requests = []
    for index in range(max(1, num_tokens // tokens_each)):
        request = Request(
            request_id=str(index),
            prompt="measure",
            height=side,
            width=side,
            num_inference_steps=2,
            true_cfg_scale=1.0,
            seed=index,
        )
        sigmas, timesteps = model.prepare_timesteps(request)
        latents = model.prepare_latents(request).to(model.device).float()
        requests.append(PreparedRequest(request, prompt, None, sigmas, timesteps, latents))
    return requests


def _step_once(model: DiffusionModel, requests: list[PreparedRequest]) -> None:
    batch = PackedBatch.build(requests, model)
    batch.step_scheduler(model.denoise_step(batch.refresh()), model)


def _decode_once(model: DiffusionModel, height: int, width: int) -> None:
    num_tokens = model.capabilities.num_image_tokens(height, width)
    latents = torch.randn(num_tokens, model.num_latent_channels, device=model.device)
    model.post_decode(latents, height, width)
