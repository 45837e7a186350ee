"""Elementwise work of a packed forward: on a GPU the Triton kernels of ``fused``, elsewhere, and as
their reference, plain torch.

``index`` maps a token to its row in a small per-request table, so nothing depends on how tokens
are packed. Shapes: T tokens, R requests, H channels, A heads of D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = 448.0
"""Largest float8_e4m3fn."""

SMALLEST_MAX = 1e-12
"""A row whose largest magnitude is below this is quantized as if it were this: rows of zeros stay zeros."""


def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float) -> Tensor:
    """``layer_norm(x) · (1 + scale[index]) + shift[index]``.

    Args:
        x: ``[T, H]``.
        shift, scale: ``[R, H]``, rows may be strided.
        index: ``[T]`` int64.
        eps: Of the norm.
    """
    if x.is_cuda:
        from offline_diffusion.kernels import fused

        return fused.norm_modulate(x, shift, scale, index, eps)
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    return torch.addcmul(shift.index_select(0, index), normed, (1 + scale).index_select(0, index))


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows in float8_e4m3fn: ``values · scale`` is what they stand for.

    Args:
        values: ``[T, N]``.
        scale: ``[T, 1]`` float32.
    """

    values: Tensor
    scale: Tensor


def norm_modulate_quantized(x: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float) -> Quantized:
    """`norm_modulate`, then `quantize_rows`; one kernel on a GPU."""
    if x.is_cuda:
        from offline_diffusion.kernels import fused

        return Quantized(*fused.norm_modulate_quantized(x, shift, scale, index, eps))
    return quantize_rows(norm_modulate(x, shift, scale, index, eps))


def quantize_rows(x: Tensor, *, gelu: bool = False) -> Quantized:
    """Every row scaled so that its largest magnitude is `FP8_MAX`; after tanh-approximated GELU if asked.

    Args:
        x: ``[T, N]``.
        gelu: Apply it first.
    """
    if x.is_cuda:
        from offline_diffusion.kernels import fused

        return Quantized(*fused.quantize_rows(x, gelu=gelu))
    wide = F.gelu(x.float(), approximate="tanh") if gelu else x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_MAX) / FP8_MAX
    return Quantized((wide / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale)


def gate_residual(x: Tensor, update: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    """``x + gate[index] · update``; ``x`` and ``update`` ``[T, H]``, ``gate`` ``[R, H]``."""
    if x.is_cuda:
        from offline_diffusion.kernels import fused

        return fused.gate_residual(x, update, gate, index)
    return torch.addcmul(x, update, gate.index_select(0, index))


def scatter_qkv(
    qkv: Tensor,
    weight_q: Tensor,
    weight_k: Tensor,
    eps: float,
    to_joint: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """RMS norm of q and k per head, their rotation, and the move of q, k, v to joint order.

    Args:
        qkv: ``[T, 3, A, D]`` of one stream.
        weight_q, weight_k: ``[D]``, of the norms.
        eps: Of the norms.
        to_joint: ``[T]`` int64, row of ``out`` for each token.
        cos, sin: ``[T_joint, D/2]`` float32, the angle of neighbouring channel pairs, in joint order.
        out: q, k, v ``[T_joint, A, D]``; only the rows of ``to_joint`` are written.
    """
    if qkv.is_cuda:
        from offline_diffusion.kernels import fused

        fused.scatter_qkv(qkv, weight_q, weight_k, eps, to_joint, cos, sin, out)
        return
    q, k, v = qkv.unbind(1)
    cos, sin = cos.index_select(0, to_joint), sin.index_select(0, to_joint)
    for part, weight, target in ((q, weight_q, out[0]), (k, weight_k, out[1])):
        normed = F.rms_norm(part, part.shape[-1:], weight, eps)
        target.index_copy_(0, to_joint, rotate(normed, cos, sin))
    out[2].index_copy_(0, to_joint, v)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbouring channel pairs of every head by the token's angle, in float32.

    Args:
        x: ``[T, A, D]``.
        cos, sin: ``[T, D/2]`` float32.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # [T, A, D/2] each
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return out.flatten(-2).to(x.dtype)
