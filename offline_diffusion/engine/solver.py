"""Guidance and the Euler step for all tokens of a pack in one pass, without touching the host."""

from __future__ import annotations

import torch
from torch import Tensor

from offline_diffusion.models.base import GuidanceRule


class SigmaTable:
    """Every request's sigmas and timesteps on the device, and where each request stands.

    Args:
        sigmas: Per request ``[steps + 1]`` float32 on the CPU.
        timesteps: Per request ``[steps]`` float32 on the CPU.
        step_indices: The step each request is at.
        device: Of the tables.
    """

    def __init__(
        self, sigmas: list[Tensor], timesteps: list[Tensor], step_indices: list[int], device: torch.device
    ) -> None:
        pad = torch.nn.utils.rnn.pad_sequence
        self.sigmas = pad(sigmas, batch_first=True).to(device, non_blocking=True)  # [R, steps + 1]
        self.timesteps = pad(timesteps, batch_first=True).to(device, non_blocking=True)  # [R, steps]
        indices = torch.tensor(step_indices, dtype=torch.int64).unsqueeze(1)
        self.step_index = indices.to(device, non_blocking=True)  # [R, 1]

    def current_timesteps(self) -> Tensor:
        """``[R]``, what the model is given."""
        return self.timesteps.gather(1, self.step_index).squeeze(1)

    def sigma_deltas(self) -> Tensor:
        """``[R]``, next sigma minus this one: the Euler step's length."""
        here, there = self.sigmas.gather(1, torch.cat((self.step_index, self.step_index + 1), 1)).unbind(1)
        return there - here

    def advance(self) -> None:
        """Every request is one step further."""
        self.step_index += 1


def combine_guidance(positive: Tensor, negative: Tensor, scale: Tensor, rule: GuidanceRule) -> Tensor:
    """Classifier-free guidance per token, in float32.

    ``negative + scale · (positive - negative)``; under ``norm_rescale`` each token is then given the
    norm of its positive prediction, as diffusers' Qwen-Image pipeline does.

    Args:
        positive, negative: ``[T, C]``.
        scale: ``[T, 1]``.
    """
    combined = negative + scale * (positive - negative)
    if rule == "plain":
        return combined
    return combined * (_token_norm(positive) / _token_norm(combined))


def _token_norm(x: Tensor) -> Tensor:
    """``[T, C]`` → ``[T, 1]``."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm


def euler_step(latents: Tensor, noise_pred: Tensor, delta: Tensor) -> Tensor:
    """``latents + delta · noise_pred`` in float32; ``[T, C]``, ``[T, C]``, ``[T, 1]``."""
    return torch.addcmul(latents, delta, noise_pred)
