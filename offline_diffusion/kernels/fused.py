"""Triton kernels of the packed forward, one program a token or a few: twins of ``packed_ops``.

A row's arithmetic never depends on how many rows there are: block shapes follow from the channel
counts alone and nothing is autotuned, so a token's bits are the same in any company. Sums are in
float32. Imported only where Triton is (GPU machines, and tests under ``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offline_diffusion.kernels.packed_ops import SMALLEST_MAX, QuantFormat, Quantized

SMALLEST = tl.constexpr(SMALLEST_MAX)
ROUNDER = tl.constexpr(1.5 * 2**23)
"""Added to a small float32 and taken away again, it rounds to the nearest integer, ties to even."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_row(out, out_ptr, out_scale_ptr, token, columns, mask, N, QUANTIZE: tl.constexpr):
    """One row of float32, zero beyond its end, as it is or in eight bits with its scale.

    ``QUANTIZE`` is the format's largest value; 0 leaves the row as it is. Nothing exceeds that value by more
    than a rounding, so nothing is clamped; a NaN makes the scale NaN and is not lost in integers.
    """
    if QUANTIZE:
        largest = tl.maximum(tl.reduce(tl.abs(out), 0, _larger), SMALLEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out_scale_ptr + token, largest / QUANTIZE)
        out = out * (QUANTIZE / largest)
        if out_ptr.dtype.element_ty == tl.int8:
            out = (out + ROUNDER) - ROUNDER
    tl.store(out_ptr + token * N + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _normed_row(x, shift_ptr, scale_ptr, row, eps, N, columns, mask):
    """Layer norm and modulation of one row ``x`` of float32; zero beyond its end, as ``x`` is."""
    mean = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / N
    shift = tl.load(shift_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    return centred * tl.rsqrt(variance + eps) * (1.0 + scale) + shift


@triton.jit
def _norm_modulate(
    x_ptr,
    shift_ptr,
    scale_ptr,
    index_ptr,
    out_ptr,
    out_scale_ptr,
    stride_mod,
    eps,
    N,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    x = tl.load(x_ptr + token * N + columns, mask=mask, other=0.0).to(tl.float32)
    row = tl.load(index_ptr + token) * stride_mod
    out = _normed_row(x, shift_ptr, scale_ptr, row, eps, N, columns, mask)
    _store_row(out, out_ptr, out_scale_ptr, token, columns, mask, N, QUANTIZE)


@triton.jit
def _gate_residual_norm(
    x_ptr,
    update_ptr,
    gate_ptr,
    shift_ptr,
    scale_ptr,
    index_ptr,
    sum_ptr,
    out_ptr,
    out_scale_ptr,
    stride_mod,
    eps,
    N,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    x = tl.load(x_ptr + token * N + columns, mask=mask, other=0.0).to(tl.float32)
    update = tl.load(update_ptr + token * N + columns, mask=mask, other=0.0).to(tl.float32)
    row = tl.load(index_ptr + token) * stride_mod
    gate = tl.load(gate_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    summed = (x + gate * update).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + token * N + columns, summed, mask=mask)
    out = _normed_row(summed.to(tl.float32), shift_ptr, scale_ptr, row, eps, N, columns, mask)
    _store_row(out, out_ptr, out_scale_ptr, token, columns, mask, N, QUANTIZE)


@triton.jit
def _quantize_rows(
    x_ptr,
    out_ptr,
    out_scale_ptr,
    N,
    GELU: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    x = tl.load(x_ptr + token * N + columns, mask=mask, other=0.0).to(tl.float32)
    if GELU:  # 0.5 · x · (1 + tanh(u)) is x / (1 + 2^(-2u / ln 2)), with u = sqrt(2/π) · (x + 0.044715 · x³)
        x = x / (1.0 + tl.exp2(x * (-2.302208198 - 0.1029432396 * x * x)))
    _store_row(x, out_ptr, out_scale_ptr, token, columns, mask, N, QUANTIZE)


@triton.jit
def _guided_step(
    latents_ptr,
    pred_ptr,
    owner_ptr,
    negative_ptr,
    guidance_ptr,
    sigmas_ptr,
    step_ptr,
    num_tokens,
    stride_sigmas,
    C,
    RESCALE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = token < num_tokens
    channel = tl.arange(0, BLOCK_C)[None, :]
    mask = exists[:, None] & (channel < C)
    owner = tl.load(owner_ptr + token, mask=exists, other=0)
    negative_row = tl.load(negative_ptr + token, mask=exists, other=-1)
    guided = negative_row[:, None] >= 0
    offsets = token[:, None] * C + channel
    positive = tl.load(pred_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    negative_offsets = negative_row[:, None] * C + channel
    negative = tl.load(pred_ptr + negative_offsets, mask=mask & guided, other=0.0).to(tl.float32)
    guidance = tl.load(guidance_ptr + owner, mask=exists, other=1.0)[:, None]
    combined = negative + guidance * (positive - negative)
    if RESCALE:
        wanted = tl.sqrt(tl.sum(positive * positive, axis=1))[:, None]
        found = tl.sqrt(tl.sum(combined * combined, axis=1))[:, None]
        combined = combined * (wanted / tl.where(guided, found, 1.0))
    combined = tl.where(guided, combined, positive)
    sigma_ptr = sigmas_ptr + owner * stride_sigmas + tl.load(step_ptr + owner, mask=exists, other=0)
    here = tl.load(sigma_ptr, mask=exists, other=0.0)
    there = tl.load(sigma_ptr + 1, mask=exists, other=0.0)
    latents = tl.load(latents_ptr + offsets, mask=mask, other=0.0)
    tl.store(latents_ptr + offsets, latents + (there - here)[:, None] * combined, mask=mask)


@triton.jit
def _norm_rotate(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    source,
    angle,
    target,
    eps,
    A,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    A_BLOCK: tl.constexpr,
    D: tl.constexpr,
):
    """One token's heads, ``[A, D]``: RMS norm per head, then the rotation by the angles of row ``angle``."""
    heads = tl.arange(0, A_BLOCK)
    columns = tl.arange(0, D)
    offsets = heads[:, None] * D + columns[None, :]
    mask = (heads < A)[:, None] & (columns < D)[None, :]
    x = tl.load(x_ptr + source + offsets, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = x * tl.load(weight_ptr + columns).to(tl.float32)[None, :]
    if ROTATE:
        half = tl.arange(0, D // 2)
        cos = tl.load(cos_ptr + angle * (D // 2) + half)[None, :]
        sin = tl.load(sin_ptr + angle * (D // 2) + half)[None, :]
        even, odd = tl.split(tl.reshape(x, (A_BLOCK, D // 2, 2)))
        x = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        x = tl.reshape(x, (A_BLOCK, D))
    tl.store(out_ptr + target * A * D + offsets, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scatter_qkv(
    qkv_ptr,
    weight_q_ptr,
    weight_k_ptr,
    cos_ptr,
    sin_ptr,
    to_joint_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    eps,
    A,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    A_BLOCK: tl.constexpr,
    D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    joint = tl.load(to_joint_ptr + token)
    width = A * D
    q = token * 3 * width
    k = q + width
    _norm_rotate(qkv_ptr, weight_q_ptr, cos_ptr, sin_ptr, q_ptr, q, joint, token, eps, A,
                 NORM, ROTATE, A_BLOCK, D)  # fmt: skip
    _norm_rotate(qkv_ptr, weight_k_ptr, cos_ptr, sin_ptr, k_ptr, k, joint, joint, eps, A,
                 NORM, ROTATE, A_BLOCK, D)  # fmt: skip
    columns = tl.arange(0, A_BLOCK * D)
    mask = columns < width
    v = tl.load(qkv_ptr + k + width + columns, mask=mask)
    tl.store(v_ptr + joint * width + columns, v, mask=mask)


def norm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float, quantize: QuantFormat | None
) -> Tensor | Quantized:
    """See ``packed_ops.norm_modulate``."""
    _check_rows(x, shift, scale)
    num_tokens, width = x.shape
    out, out_scale = _out_like(x, quantize)
    _launch(_norm_modulate, num_tokens, x, shift, scale, index, out, out_scale, shift.stride(0), eps, width,
            QUANTIZE=_largest(quantize), BLOCK=triton.next_power_of_2(width), num_warps=4)  # fmt: skip
    return Quantized(out, out_scale) if quantize else out


def gate_residual_norm(
    x: Tensor,
    update: Tensor,
    gate: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    eps: float,
    quantize: QuantFormat | None,
) -> tuple[Tensor, Tensor | Quantized]:
    """See ``packed_ops.gate_residual_norm``."""
    _check_rows(x, gate, shift, scale)
    assert update.is_contiguous()
    num_tokens, width = x.shape
    summed = torch.empty_like(x)
    out, out_scale = _out_like(x, quantize)
    _launch(_gate_residual_norm, num_tokens, x, update, gate, shift, scale, index, summed, out, out_scale,
            gate.stride(0), eps, width, QUANTIZE=_largest(quantize), BLOCK=triton.next_power_of_2(width),
            num_warps=4)  # fmt: skip
    return summed, Quantized(out, out_scale) if quantize else out


def quantize_rows(x: Tensor, quantize: QuantFormat, *, gelu: bool) -> Quantized:
    """See ``packed_ops.quantize_rows``."""
    assert x.is_contiguous()
    num_tokens, width = x.shape
    out, out_scale = _out_like(x, quantize)
    _launch(_quantize_rows, num_tokens, x, out, out_scale, width, gelu, _largest(quantize),
            BLOCK=triton.next_power_of_2(width), num_warps=8 if width > 4096 else 4)  # fmt: skip
    return Quantized(out, out_scale)


def _check_rows(x: Tensor, *tables: Tensor) -> None:
    assert x.is_contiguous()
    assert all(table.stride() == tables[0].stride() and table.stride(1) == 1 for table in tables)


def _largest(quantize: QuantFormat | None) -> int:
    return 0 if quantize is None else int(quantize.largest)


def _out_like(x: Tensor, quantize: QuantFormat | None) -> tuple[Tensor, Tensor]:
    """Room for rows like those of ``x``, and for their scales (unused where nothing is quantized)."""
    if quantize is None:
        out = torch.empty_like(x)
        return out, out
    out = torch.empty(x.shape, dtype=quantize.dtype, device=x.device)
    return out, torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)


def guided_step_(
    latents: Tensor,
    noise_pred: Tensor,
    owner: Tensor,
    negative_row: Tensor,
    guidance: Tensor,
    sigmas: Tensor,
    step_index: Tensor,
    *,
    rescale: bool,
) -> None:
    """See ``packed_ops.guided_step_``."""
    assert latents.is_contiguous() and noise_pred.is_contiguous()
    num_tokens, channels = latents.shape
    block = 16
    _launch(_guided_step, triton.cdiv(num_tokens, block), latents, noise_pred, owner, negative_row, guidance,
            sigmas, step_index, num_tokens, sigmas.stride(0), channels, RESCALE=rescale, BLOCK_T=block,
            BLOCK_C=triton.next_power_of_2(channels), num_warps=4)  # fmt: skip


def scatter_qkv(
    qkv: Tensor,
    weight_q: Tensor | None,
    weight_k: Tensor | None,
    eps: float,
    to_joint: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """See ``packed_ops.scatter_qkv``."""
    assert qkv.is_contiguous() and all(part.is_contiguous() for part in out)
    num_tokens, _, num_heads, head_dim = qkv.shape
    assert head_dim == triton.next_power_of_2(head_dim), f"head size {head_dim} is no power of two"
    _launch(_scatter_qkv, num_tokens, qkv, weight_q, weight_k, cos, sin, to_joint, *out, eps, num_heads,
            NORM=weight_q is not None, ROTATE=cos is not None, A_BLOCK=triton.next_power_of_2(num_heads),
            D=head_dim, num_warps=4)  # fmt: skip


def _launch(kernel: Any, num_programs: int, *args: Any, **options: Any) -> None:
    if num_programs:
        kernel[(num_programs,)](*args, **options)
