"""Elementwise work of a UNet's step: on a GPU the Triton kernels of ``fused_stacked``, elsewhere, and as
their reference, plain torch.

No row's bits depend on another's. Shapes: N rows of S positions, C channels, T = N · S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from offline_diffusion.kernels.packed_ops import QuantFormat, Quantized, quantize_rows


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


def geglu(x: Tensor, quantize: QuantFormat | None = None) -> Tensor | Quantized:
    """The first half of every row times the exact GELU of its second half.

    Args:
        x: ``[T, 2·N]``.
        quantize: Format of the result ``[T, N]``, None for that of ``x``.
    """
    if x.is_cuda:
        from offline_diffusion.kernels import fused_stacked

        return fused_stacked.geglu(x, quantize)
    value, gate = x.chunk(2, dim=-1)
    out = value * F.gelu(gate)
    return out if quantize is None else quantize_rows(out, quantize)


def group_norm(x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float, *, silu: bool) -> Tensor:
    """Group norm over positions and the channels of a group, and SiLU behind it where wanted.

    Args:
        x: ``[N, C, rows, columns]``; on a GPU the result is in channels-last order.
        num_groups: C is a multiple of it.
        weight, bias: ``[C]``.
        eps: Of the norm.
        silu: Whether ``y · sigmoid(y)`` follows.
    """
    if x.is_cuda:
        from offline_diffusion.kernels import fused_stacked

        return fused_stacked.group_norm(x, num_groups, weight, bias, eps, silu=silu)
    normed = F.group_norm(x, num_groups, weight, bias, eps)
    return F.silu(normed) if silu else normed
