"""W8A8 product of rows with a scale each: int8 values, sums in int32, one kernel (Triton).

Sums are integers and therefore exact in any order, so a row's bits depend on no tile size and no
neighbour; tiles may follow the number of rows. ``torch._int_mm`` was slower than bfloat16 here, see
benchmarks/LOG.md. Imported only where Triton is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Tile in all three directions: the best of six shapes on an H200, at 1,024 rows as at 16,384."""


@triton.jit
def _int8_product(
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # Tiles that run at the same time share rows and columns: GROUP_M tiles high, then the next column.
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + (pid % (GROUP_M * tiles_n)) % height
    tile_n = (pid % (GROUP_M * tiles_n)) // height
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the end are read from the last one and never stored: no mask in the inner loop.
    x_row = tl.minimum(rows, M - 1).to(tl.int64)
    w_row = tl.minimum(columns, N - 1).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_row[:, None] * K + inner[None, :]
    w_ptrs = weight_ptr + w_row[None, :] * K + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        left = inner < K - start
        x = tl.load(x_ptrs, mask=left[None, :], other=0)
        weight = tl.load(w_ptrs, mask=left[:, None], other=0)
        total = tl.dot(x, weight, total, out_dtype=tl.int32)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    x_scale = tl.load(x_scale_ptr + x_row)
    weight_scale = tl.load(weight_scale_ptr + w_row)
    bias = tl.load(bias_ptr + w_row).to(tl.float32)
    out = total.to(tl.float32) * x_scale[:, None] * weight_scale[None, :] + bias[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def int8_product(values: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor) -> Tensor:
    """``(values · scale) @ (weight · weight_scale).T + bias``.

    Args:
        values: ``[T, K]`` int8.
        weight: ``[N, K]`` int8.
        scale: ``[T, 1]`` float32.
        weight_scale: ``[1, N]`` float32.
        bias: ``[N]``; its dtype is that of the result.

    Returns:
        ``[T, N]``.
    """
    assert values.is_contiguous()
    assert weight.is_contiguous()
    (num_rows, inner), columns = values.shape, weight.shape[0]
    out = torch.empty(num_rows, columns, dtype=bias.dtype, device=values.device)
    if num_rows:
        grid = (triton.cdiv(num_rows, BLOCK) * triton.cdiv(columns, BLOCK),)
        _int8_product[grid](
            values, weight, scale, weight_scale, bias, out, num_rows, columns, inner,
            BLOCK_M=BLOCK, BLOCK_N=BLOCK, BLOCK_K=BLOCK, GROUP_M=8, num_warps=8, num_stages=3,
        )  # fmt: skip
    return out
