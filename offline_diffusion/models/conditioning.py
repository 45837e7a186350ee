"""Modulation that follows from a timestep and a prompt as one vector: of every sequence, anew in every step.

Where a timestep alone decides, a table by timestep spares most of this, see ``modulation``; here no two
sequences have a row in common. All of it is work of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offline_diffusion.kernels.linear import MIN_ROWS, PackedLinear, pad_rows
from offline_diffusion.models.double_stream import Modulation, split_modulation
from offline_diffusion.upload import upload


class TimeTextEmbedding:
    """What a sequence is conditioned on, as one vector ``[H]``.

    Args:
        embedder: A loaded ``CombinedTimestepTextProjEmbeddings``, or the one with guidance, of diffusers.
        dtype: Of the model.
    """

    def __init__(self, embedder: Any, dtype: torch.dtype) -> None:
        self._time_proj, self._dtype = embedder.time_proj, dtype
        self._time, self._text = _two_layers(embedder.timestep_embedder), _two_layers(embedder.text_embedder)
        guidance = getattr(embedder, "guidance_embedder", None)
        self._guidance = None if guidance is None else _two_layers(guidance)

    def vector(self, pooled: Tensor, guidance_scale: float | None) -> Tensor:
        """What stays the same at every step, ``[H]``.

        Args:
            pooled: ``[P]``, the prompt.
            guidance_scale: Taken by models that were distilled with one.
        """
        vector = _through(self._text, pooled.unsqueeze(0).to(self._dtype))
        if self._guidance is not None:
            assert guidance_scale is not None
            scale = upload(torch.tensor([guidance_scale], dtype=torch.float32), pooled.device)
            vector = vector + _through(self._guidance, self._sinusoids(scale.to(self._dtype) * 1000))
        return vector[0].clone()  # the product's rows are padded, and this is kept for long

    def __call__(self, timesteps: Tensor, vectors: Tensor) -> Tensor:
        """``[N, H]``.

        Args:
            timesteps: ``[N]``, 0 … 1000, in the dtype that the transformer gives them.
            vectors: ``[N, H]``.
        """
        return _through(self._time, self._sinusoids(timesteps)) + vectors

    def _sinusoids(self, values: Tensor) -> Tensor:
        sinusoids: Tensor = self._time_proj(values)
        return sinusoids.to(self._dtype)


class SequenceModulation:
    """The modulation of every block from each sequence's embedding.

    Args:
        layers: Of each reader the linear layer and how many parts ``[H]`` it makes.
    """

    def __init__(self, layers: Sequence[tuple[PackedLinear, int]]) -> None:
        self._layers, self._counts = [layer for layer, _ in layers], [count for _, count in layers]

    def __call__(self, embedding: Tensor) -> list[Modulation]:
        """``[N, H]`` → of each reader its parts, views of one table with N rows at least."""
        rows = pad_rows(F.silu(embedding), MIN_ROWS)  # once for all
        return split_modulation(torch.cat([layer(rows) for layer in self._layers], dim=1), self._counts)


Layers = tuple[PackedLinear, PackedLinear]


def _two_layers(module: Any) -> Layers:
    first, second = module.linear_1, module.linear_2
    return PackedLinear(first), PackedLinear(second)


def _through(layers: Layers, x: Tensor) -> Tensor:
    return layers[1](F.silu(layers[0](x)))
