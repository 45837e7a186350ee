"""The contract between the engine and a family whose requests share a step as rows of one shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.request import Request


@dataclass(slots=True)
class StackedInput:
    """What a stacked family's forward sees: N rows, one a guidance branch, of S latent positions each.

    All but ``latents`` and ``timesteps`` are set by ``StackedBatch`` when the composition changes and stay;
    those two are refilled in place every step.

    Args:
        latents: ``[N, S, C]`` float32, noisy and scaled as the noise scheduler has it.
        timesteps: ``[N]`` float32.
        prompt_embeds: ``[N, L, H]``.
        vectors: ``[N, V]``, see ``SequenceInputs``; None in families that have none.
        height, width: Pixels of every row.
    """

    latents: Tensor
    timesteps: Tensor
    prompt_embeds: Tensor
    vectors: Tensor | None
    height: int
    width: int


class StackedModel(DiffusionModel, Protocol):
    """A loaded model whose key holds the latent shape.

    What the engine carries from step to step as a request's latents is its state, ``[S, K·C]``: the noisy
    image and what its noise scheduler remembers, see ``linear_steps``. So ``num_latent_channels`` is K·C,
    ``prepare_latents`` makes a state and ``post_decode`` takes one. The first tensor of
    ``prepare_timesteps`` is ``LinearSteps.columns``.
    """

    num_sample_channels: int
    """C: channels of the image in the state, and of the model's output."""

    def prepare_noise(self, request: Request) -> Tensor | None:
        """The noise that the steps of a request add, ``[draws, S, C]`` on the CPU, as diffusers draws it.

        One draw for each of its first steps; None where none of its steps adds any.
        """
        ...

    def denoise_step(self, batch: StackedInput) -> Tensor:
        """The model's output, ``[N, S, C]`` in its dtype."""
        ...
