"""The step of stacked rows: plain tensor operations, in which no row's bits depend on another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def linear_step_(state: Tensor, output: Tensor, noise: Tensor | None, matrices: Tensor) -> None:
    """One step of every row's noise scheduler, in float32; changes ``state``.

    Row by row, ``state`` becomes ``matrix · (state, output, noise)``; see ``models.linear_steps``.

    Args:
        state: ``[R, S, K·C]`` float32.
        output: ``[R, S, C]`` float32, guidance done.
        noise: ``[R, S, C]`` float32; None is none.
        matrices: ``[R, K, K + 2]`` float32.
    """
    num_slots = matrices.shape[1]
    parts = [*state.unflatten(-1, (num_slots, -1)).unbind(2), output]
    if noise is not None:
        parts.append(noise)
    weights = matrices[:, :, : len(parts), None, None].unbind(1)  # [R, parts, 1, 1] each

    state.copy_(torch.cat([_weighted_sum(own.unbind(1), parts) for own in weights], dim=-1))


def _weighted_sum(weights: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    total = weights[0] * parts[0]
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total.addcmul_(weight, part)
    return total
