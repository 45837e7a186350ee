"""Elementwise work of a packed forward: plain torch, the reference of any fused kernel to come.

``index`` maps a token to its row in a small per-request table, so nothing depends on how tokens
are packed. Shapes: T tokens, R requests, H channels, A heads of D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float) -> Tensor:
    """``layer_norm(x) · (1 + scale[index]) + shift[index]``.

    Args:
        x: ``[T, H]``.
        shift, scale: ``[R, H]``.
        index: ``[T]`` int64.
    """
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    return torch.addcmul(shift.index_select(0, index), normed, (1 + scale).index_select(0, index))


def gate_residual(x: Tensor, update: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    """``x + gate[index] · update``; ``x`` and ``update`` ``[T, H]``, ``gate`` ``[R, H]``."""
    return torch.addcmul(x, update, gate.index_select(0, index))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbouring channel pairs of every head by the token's angle, in float32.

    Args:
        x: ``[T, A, D]``.
        cos, sin: ``[T, D/2]`` float32.
    """
    pairs = x.float().unflatten(-1, (-1, 2))  # [T, A, D/2, 2]
    even, odd = pairs.unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return out.flatten(-2).to(x.dtype)
