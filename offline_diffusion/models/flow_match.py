"""What flow-matching families share: the noise, its 2 × 2 patches, and the noise scheduler's tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from offline_diffusion.errors import UnsupportedModelError


def draw_patches(seed: int, grid: tuple[int, int], channels: int, dtype: torch.dtype) -> Tensor:
    """Noise as diffusers' pipelines draw it on the CPU for one image, ``[rows · columns, 4 · channels]``.

    Args:
        seed: Of the request.
        grid: Rows and columns of patches.
        channels: Of the latents.
        dtype: In which it is drawn.
    """
    rows, columns = grid
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.randn((channels, 2 * rows, 2 * columns), generator=generator, dtype=dtype)
    patches = noise.view(channels, rows, 2, columns, 2).permute(1, 3, 0, 2, 4)
    return patches.reshape(rows * columns, 4 * channels)


def patches_to_latents(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """``[rows · columns, 4 · C]`` → ``[1, C, 2 · rows, 2 · columns]``."""
    rows, columns = grid
    latents = patches.view(rows, columns, -1, 2, 2).permute(2, 0, 3, 1, 4)
    return latents.reshape(1, -1, 2 * rows, 2 * columns)


def flow_tables(
    noise_scheduler: Any, num_steps: int, num_image_tokens: int, *, own_sigmas: bool = True
) -> tuple[Tensor, Tensor]:
    """``sigmas`` ``[steps + 1]`` and ``timesteps`` ``[steps]`` of diffusers' noise scheduler.

    One step: the schedule's only sigma is 1, which the stretch to ``shift_terminal`` turns into 0/0; there is
    nothing to stretch then, so it stays 1.

    Args:
        noise_scheduler: A ``FlowMatchEulerDiscreteScheduler``.
        num_steps: At least 1.
        num_image_tokens: Decides on the shift where it is dynamic.
        own_sigmas: Whether the pipeline gives sigmas from 1 to 1/steps, or leaves them to the scheduler.
    """
    config = noise_scheduler.config
    if num_steps == 1 and config.shift_terminal:
        return torch.tensor([1.0, 0.0]), torch.tensor([float(config.num_train_timesteps)])
    shift = {"mu": dynamic_shift(num_image_tokens, config)} if config.use_dynamic_shifting else {}
    if own_sigmas:
        noise_scheduler.set_timesteps(
            sigmas=np.linspace(1.0, 1 / num_steps, num_steps), device="cpu", **shift
        )
    else:
        noise_scheduler.set_timesteps(num_steps, device="cpu", **shift)
    return noise_scheduler.sigmas.clone(), noise_scheduler.timesteps.clone()


def dynamic_shift(num_image_tokens: int, config: Any) -> float:
    """The timestep shift ``mu``: linear in the image's tokens, from ``base_shift`` to ``max_shift``."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (top - base) / (high - low)
    return float(num_image_tokens * slope + (base - slope * low))


def refuse_noise_scheduler(noise_scheduler: Any, family: str) -> None:
    """Names what of a noise scheduler the solver here cannot do.

    Raises:
        UnsupportedModelError: With the name of the class or key.
    """
    name = type(noise_scheduler).__name__
    if name != "FlowMatchEulerDiscreteScheduler":
        raise UnsupportedModelError(
            f"noise scheduler {name} is not supported for {family}",
            hint="allowed: FlowMatchEulerDiscreteScheduler",
        )
    for key in ("stochastic_sampling", "invert_sigmas"):
        if noise_scheduler.config.get(key):
            raise UnsupportedModelError(
                f"scheduler config has {key}=true, which is not supported for {family}"
            )
