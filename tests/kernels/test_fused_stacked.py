"""The UNet's Triton kernels against plain formulas: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math
import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined, on the import below

pytest.importorskip("triton", reason="no Triton on this machine")

from offline_diffusion.kernels import fused_stacked, stacked_ops  # noqa: E402
from offline_diffusion.kernels.packed_ops import INT8, Quantized  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(DEVICE, dtype)


def _error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _gated(x: torch.Tensor) -> torch.Tensor:
    value, gate = x.double().chunk(2, dim=-1)
    return value * gate * (1 + torch.erf(gate / math.sqrt(2))) / 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 64, 1280])
def test_geglu(dtype: torch.dtype, width: int) -> None:
    x = _randn(7, 2 * width, dtype=dtype) * 2
    out = fused_stacked.geglu(x, None)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == dtype
    assert _error(out, _gated(x)) < TOLERANCE[dtype]
    plain = stacked_ops.geglu(x.cpu())
    assert isinstance(plain, torch.Tensor)
    assert _error(plain.to(DEVICE), _gated(x)) < TOLERANCE[dtype]


def test_geglu_quantized() -> None:
    x = _randn(7, 96, dtype=torch.float32) * 2
    for out in (fused_stacked.geglu(x, INT8), stacked_ops.geglu(x.cpu(), INT8)):
        assert isinstance(out, Quantized)
        assert out.values.dtype == torch.int8
        assert _error(out.values.to(DEVICE).double() * out.scale.to(DEVICE).double(), _gated(x)) < 0.012


def _normed(x: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    wide = x.double().unflatten(1, (groups, -1))  # [N, G, C/G, h, w]
    mean = wide.mean((2, 3, 4), keepdim=True)
    variance = wide.var((2, 3, 4), keepdim=True, correction=0)
    out = ((wide - mean) / (variance + 1e-5).sqrt()).flatten(1, 2)
    return out * weight.double()[:, None, None] + bias.double()[:, None, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    ("channels", "groups", "size"),
    [(16, 8, (3, 5)), (60, 3, (9, 7)), (320, 32, (16, 12)), (96, 32, (33, 40))],
)
def test_group_norm(
    dtype: torch.dtype, silu: bool, channels: int, groups: int, size: tuple[int, int]
) -> None:
    x = _randn(2, channels, *size, dtype=dtype) * 2 + 0.5
    weight, bias = _randn(channels, dtype=dtype), _randn(channels, dtype=dtype)
    expected = _normed(x, groups, weight, bias)
    if silu:
        expected = expected * torch.sigmoid(expected)
    out = fused_stacked.group_norm(x, groups, weight, bias, 1e-5, silu=silu)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert out.dtype == dtype
    assert _error(out, expected) < TOLERANCE[dtype]
    plain = stacked_ops.group_norm(x.cpu(), groups, weight.cpu(), bias.cpu(), 1e-5, silu=silu)
    assert _error(plain.to(DEVICE), expected) < TOLERANCE[dtype]


def test_a_rows_company_changes_no_bit_of_its_norm() -> None:
    x = _randn(5, 64, 12, 10, dtype=torch.bfloat16)
    weight, bias = _randn(64, dtype=torch.bfloat16), _randn(64, dtype=torch.bfloat16)
    together = fused_stacked.group_norm(x, 8, weight, bias, 1e-5, silu=True)
    for row in (0, 3):
        alone = fused_stacked.group_norm(x[row : row + 1], 8, weight, bias, 1e-5, silu=True)
        assert torch.equal(together[row : row + 1], alone)
