"""Triton kernels of a UNet's step: twins of ``stacked_ops``.

How a row is cut into tiles follows from its own shape alone, so its bits are the same in any company. Sums
are in float32. Imported only where Triton is (GPU machines, and tests under ``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from offline_diffusion.kernels.fused import _largest, _launch, _store_row
from offline_diffusion.kernels.packed_ops import QuantFormat, Quantized

ELEMENTS = 8_192
"""Of a row that a program of group norm holds at once, padding included."""

MAX_TILES = 64
"""Parts of a row whose sums are taken apart; every program of the second pass reads them all."""


@triton.jit
def _geglu(x_ptr, out_ptr, out_scale_ptr, N, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    value = tl.load(x_ptr + token * 2 * N + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + token * 2 * N + N + columns, mask=mask, other=0.0).to(tl.float32)
    out = value * gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    _store_row(out, out_ptr, out_scale_ptr, token, columns, mask, N, QUANTIZE)


def geglu(x: Tensor, quantize: QuantFormat | None) -> Tensor | Quantized:
    """See ``stacked_ops.geglu``."""
    assert x.is_contiguous()
    num_tokens, width = x.shape[0], x.shape[1] // 2
    dtype = x.dtype if quantize is None else quantize.dtype
    out = torch.empty(num_tokens, width, dtype=dtype, device=x.device)
    scale = torch.empty(num_tokens, 1, dtype=torch.float32, device=x.device) if quantize else out
    _launch(_geglu, num_tokens, x, out, scale, width, _largest(quantize),
            BLOCK=triton.next_power_of_2(width), num_warps=8 if width > 4096 else 4)  # fmt: skip
    return Quantized(out, scale) if quantize else out


@triton.jit
def _group_sums(
    x_ptr,
    sums_ptr,
    S,
    tile_rows,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILES: tl.constexpr,
):
    """Sum and sum of squares of each group over a tile's positions: ``[N, TILES, 2, BLOCK_G]``."""
    row, tile = tl.program_id(0).to(tl.int64) // TILES, tl.program_id(0) % TILES
    group = tl.arange(0, BLOCK_G)[None, :, None]
    inner = tl.arange(0, BLOCK_W)[None, None, :]
    column = group * WIDTH + inner
    exists = (group < GROUPS) & (inner < WIDTH)
    total = tl.zeros((BLOCK_G,), dtype=tl.float32)
    squares = tl.zeros((BLOCK_G,), dtype=tl.float32)
    end = tl.minimum((tile + 1) * tile_rows, S)
    for start in range(tile * tile_rows, end, BLOCK_S):
        position = start + tl.arange(0, BLOCK_S)[:, None, None]
        offsets = (row * S + position) * (GROUPS * WIDTH) + column
        x = tl.load(x_ptr + offsets, mask=exists & (position < end), other=0.0).to(tl.float32)
        by_group = tl.sum(x, axis=2)
        total += tl.sum(by_group, axis=0)
        squares += tl.sum(tl.sum(x * x, axis=2), axis=0)
    out = (row * TILES + tile) * 2 * BLOCK_G + tl.arange(0, BLOCK_G)
    tl.store(sums_ptr + out, total)
    tl.store(sums_ptr + out + BLOCK_G, squares)


@triton.jit
def _group_apply(
    x_ptr,
    sums_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    S,
    tile_rows,
    eps,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILES: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64) // TILES, tl.program_id(0) % TILES
    tiles = row * TILES + tl.arange(0, TILES)[:, None]
    part = tiles * 2 * BLOCK_G + tl.arange(0, BLOCK_G)[None, :]
    count = S * WIDTH
    mean = tl.sum(tl.load(sums_ptr + part), axis=0) / count
    mean_square = tl.sum(tl.load(sums_ptr + part + BLOCK_G), axis=0) / count
    scale = tl.rsqrt(tl.maximum(mean_square - mean * mean, 0.0) + eps)
    group = tl.arange(0, BLOCK_G)[None, :, None]
    inner = tl.arange(0, BLOCK_W)[None, None, :]
    column = group * WIDTH + inner
    exists = (group < GROUPS) & (inner < WIDTH)
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0).to(tl.float32) * scale[None, :, None]
    bias = tl.load(bias_ptr + column, mask=exists, other=0.0).to(tl.float32)
    end = tl.minimum((tile + 1) * tile_rows, S)
    for start in range(tile * tile_rows, end, BLOCK_S):
        position = start + tl.arange(0, BLOCK_S)[:, None, None]
        offsets = (row * S + position) * (GROUPS * WIDTH) + column
        mask = exists & (position < end)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        out = (x - mean[None, :, None]) * weight + bias
        if SILU:
            out = out / (1.0 + tl.exp(-out))
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def group_norm(x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float, *, silu: bool) -> Tensor:
    """See ``stacked_ops.group_norm``."""
    x = x.contiguous(memory_format=torch.channels_last)
    num_rows, channels, height, width = x.shape
    positions, group_width = height * width, channels // num_groups
    block_g, block_w = triton.next_power_of_2(num_groups), triton.next_power_of_2(group_width)
    block_s = max(1, ELEMENTS // (block_g * block_w))
    tiles = min(MAX_TILES, triton.next_power_of_2(triton.cdiv(positions, block_s)))
    tile_rows = triton.cdiv(positions, tiles)
    sums = torch.empty(num_rows, tiles, 2, block_g, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)  # in the order of x
    shape = {"WIDTH": group_width, "GROUPS": num_groups, "BLOCK_S": block_s, "BLOCK_G": block_g}
    options = shape | {"BLOCK_W": block_w, "TILES": tiles, "num_warps": 8}
    _launch(_group_sums, num_rows * tiles, x, sums, positions, tile_rows, **options)
    _launch(_group_apply, num_rows * tiles, x, sums, weight, bias, out, positions, tile_rows, eps, silu,
            **options)  # fmt: skip
    return out
