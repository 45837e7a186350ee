"""Triton kernels of the packed forward, one program a token: twins of ``packed_ops``.

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

from offline_diffusion.kernels.packed_ops import FP8_MAX, SMALLEST_MAX


@triton.jit
def _normed_row(x_ptr, shift_ptr, scale_ptr, index_ptr, stride_mod, eps, N, token, columns, mask):
    """Layer norm and modulation of one token, float32; shift beyond the end is zero, and so is the row."""
    x = tl.load(x_ptr + token * N + columns, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / N
    row = tl.load(index_ptr + token) * stride_mod
    shift = tl.load(shift_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    return centred * tl.rsqrt(variance + eps) * (1.0 + scale) + shift


@triton.jit
def _norm_modulate(x_ptr, shift_ptr, scale_ptr, index_ptr, out_ptr, stride_mod, eps, N, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    out = _normed_row(x_ptr, shift_ptr, scale_ptr, index_ptr, stride_mod, eps, N, token, columns, mask)
    tl.store(out_ptr + token * N + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_residual(x_ptr, update_ptr, gate_ptr, index_ptr, out_ptr, stride_mod, N, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    x = tl.load(x_ptr + token * N + columns, mask=mask, other=0.0).to(tl.float32)
    update = tl.load(update_ptr + token * N + columns, mask=mask, other=0.0).to(tl.float32)
    row = tl.load(index_ptr + token) * stride_mod
    gate = tl.load(gate_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + columns, (x + gate * update).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rotate(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    source,
    target,
    eps,
    A,
    A_BLOCK: tl.constexpr,
    D: tl.constexpr,
):
    """One token's heads, ``[A, D]``: RMS norm per head, then the rotation by the token's angles."""
    heads = tl.arange(0, A_BLOCK)
    columns = tl.arange(0, D)
    offsets = heads[:, None] * D + columns[None, :]
    mask = (heads < A)[:, None] & (columns < D)[None, :]
    x = tl.load(x_ptr + source + offsets, mask=mask, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    x = x * tl.load(weight_ptr + columns).to(tl.float32)[None, :]
    half = tl.arange(0, D // 2)
    cos = tl.load(cos_ptr + target * (D // 2) + half)[None, :]
    sin = tl.load(sin_ptr + target * (D // 2) + half)[None, :]
    even, odd = tl.split(tl.reshape(x, (A_BLOCK, D // 2, 2)))
    out = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    out = tl.reshape(out, (A_BLOCK, D))
    tl.store(out_ptr + target * A * D + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


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
    A_BLOCK: tl.constexpr,
    D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(to_joint_ptr + token)
    width = A * D
    source = token * 3 * width
    _norm_rotate(qkv_ptr, weight_q_ptr, cos_ptr, sin_ptr, q_ptr, source, target, eps, A, A_BLOCK, D)
    _norm_rotate(qkv_ptr, weight_k_ptr, cos_ptr, sin_ptr, k_ptr, source + width, target, eps, A, A_BLOCK, D)
    columns = tl.arange(0, A_BLOCK * D)
    mask = columns < width
    v = tl.load(qkv_ptr + source + 2 * width + columns, mask=mask)
    tl.store(v_ptr + target * width + columns, v, mask=mask)


@triton.jit
def _store_quantized(
    x, out_ptr, out_scale_ptr, token, columns, mask, N, FP8_MAX: tl.constexpr, SMALLEST: tl.constexpr
):
    """One row ``x`` of float32, zero beyond its end."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), SMALLEST) / FP8_MAX
    values = tl.minimum(tl.maximum(x / scale, -FP8_MAX), FP8_MAX)
    tl.store(out_ptr + token * N + columns, values.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_scale_ptr + token, scale)


@triton.jit
def _norm_modulate_quantized(
    x_ptr,
    shift_ptr,
    scale_ptr,
    index_ptr,
    out_ptr,
    out_scale_ptr,
    stride_mod,
    eps,
    N,
    FP8_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    out = _normed_row(x_ptr, shift_ptr, scale_ptr, index_ptr, stride_mod, eps, N, token, columns, mask)
    _store_quantized(out, out_ptr, out_scale_ptr, token, columns, mask, N, FP8_MAX, SMALLEST)


@triton.jit
def _quantize_rows(
    x_ptr,
    out_ptr,
    out_scale_ptr,
    N,
    GELU: tl.constexpr,
    FP8_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    x = tl.load(x_ptr + token * N + columns, mask=mask, other=0.0).to(tl.float32)
    if GELU:  # x · sigmoid(2u) is 0.5 · x · (1 + tanh(u))
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * tl.sigmoid(2.0 * u)
    _store_quantized(x, out_ptr, out_scale_ptr, token, columns, mask, N, FP8_MAX, SMALLEST)


def norm_modulate_quantized(
    x: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``packed_ops.norm_modulate_quantized``: values and scales."""
    assert x.is_contiguous() and shift.stride() == scale.stride() and shift.stride(1) == 1
    num_tokens, width = x.shape
    out, out_scale = _quantized_like(x)
    _launch(_norm_modulate_quantized, num_tokens, x, shift, scale, index, out, out_scale, shift.stride(0),
            eps, width, FP8_MAX, SMALLEST_MAX, BLOCK=triton.next_power_of_2(width), num_warps=8)  # fmt: skip
    return out, out_scale


def quantize_rows(x: Tensor, *, gelu: bool) -> tuple[Tensor, Tensor]:
    """See ``packed_ops.quantize_rows``: values and scales."""
    assert x.is_contiguous()
    num_tokens, width = x.shape
    out, out_scale = _quantized_like(x)
    _launch(_quantize_rows, num_tokens, x, out, out_scale, width, gelu, FP8_MAX, SMALLEST_MAX,
            BLOCK=triton.next_power_of_2(width), num_warps=16 if width > 4096 else 8)  # fmt: skip
    return out, out_scale


def _quantized_like(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return out, torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)


def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float) -> Tensor:
    """See ``packed_ops.norm_modulate``."""
    assert x.is_contiguous() and shift.stride() == scale.stride() and shift.stride(1) == 1
    out = torch.empty_like(x)
    num_tokens, width = x.shape
    _launch(_norm_modulate, num_tokens, x, shift, scale, index, out, shift.stride(0), eps, width,
            BLOCK=triton.next_power_of_2(width), num_warps=8)  # fmt: skip
    return out


def gate_residual(x: Tensor, update: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    """See ``packed_ops.gate_residual``."""
    assert x.is_contiguous() and update.is_contiguous() and gate.stride(1) == 1
    out = torch.empty_like(x)
    num_tokens, width = x.shape
    _launch(_gate_residual, num_tokens, x, update, gate, index, out, gate.stride(0), width,
            BLOCK=triton.next_power_of_2(width), num_warps=4)  # fmt: skip
    return out


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
    """See ``packed_ops.scatter_qkv``."""
    assert qkv.is_contiguous() and all(part.is_contiguous() for part in out)
    num_tokens, _, num_heads, head_dim = qkv.shape
    assert head_dim == triton.next_power_of_2(head_dim), f"head size {head_dim} is no power of two"
    _launch(_scatter_qkv, num_tokens, qkv, weight_q, weight_k, cos, sin, to_joint, *out, eps, num_heads,
            A_BLOCK=triton.next_power_of_2(num_heads), D=head_dim, num_warps=4)  # fmt: skip


def _launch(kernel: Any, num_tokens: int, *args: Any, **options: Any) -> None:
    if num_tokens:
        kernel[(num_tokens,)](*args, **options)
