"""The Triton kernels against their plain twins: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined, on the import below

pytest.importorskip("triton", reason="no Triton on this machine")

from offline_diffusion.kernels import fused  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(DEVICE, dtype)


def _error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 96, 3072])
def test_norm_modulate(dtype: torch.dtype, width: int) -> None:
    x = _randn(9, width, dtype=dtype) * 3 + 5
    mods = _randn(4, 6 * width, dtype=dtype).chunk(6, dim=-1)  # strided rows, as in the model
    index = torch.tensor([0, 3, 3, 1, 2, 0, 1, 3, 2], device=DEVICE)
    out = fused.norm_modulate(x, mods[0], mods[1], index, 1e-6)
    wide = x.double()
    normed = (wide - wide.mean(1, keepdim=True)) / (wide.var(1, keepdim=True, correction=0) + 1e-6).sqrt()
    expected = normed * (1 + mods[1].double()[index]) + mods[0].double()[index]
    assert out.dtype == dtype
    assert _error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_residual(dtype: torch.dtype) -> None:
    x, update = _randn(7, 96, dtype=dtype), _randn(7, 96, dtype=dtype)
    gate = _randn(3, 6 * 96, dtype=dtype).chunk(6, dim=-1)[2]
    index = torch.tensor([2, 0, 0, 1, 2, 1, 1], device=DEVICE)
    expected = x.double() + gate.double()[index] * update.double()
    assert _error(fused.gate_residual(x, update, gate, index), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 32), (3, 64), (24, 128)])
def test_scatter_qkv(dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
    num_tokens, num_joint = 5, 8
    qkv = _randn(num_tokens, 3, num_heads, head_dim, dtype=dtype)
    weights = [_randn(head_dim, dtype=dtype) for _ in range(2)]
    to_joint = torch.tensor([6, 0, 3, 7, 2], device=DEVICE)
    angles = _randn(num_joint, head_dim // 2, dtype=torch.float32)
    out = tuple(torch.full((num_joint, num_heads, head_dim), 9.0, device=DEVICE, dtype=dtype) for _ in "qkv")
    fused.scatter_qkv(qkv, *weights, 1e-6, to_joint, angles.cos(), angles.sin(), out)
    for part, weight, target in zip(qkv.double().unbind(1)[:2], weights, out[:2], strict=True):
        normed = part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        turned = torch.view_as_complex(normed.unflatten(-1, (-1, 2))) * torch.polar(
            torch.ones_like(angles), angles
        ).to(torch.complex128)[to_joint].unsqueeze(1)
        expected = torch.view_as_real(turned).flatten(-2)
        assert _error(target[to_joint], expected) < TOLERANCE[dtype]
    assert torch.equal(out[2][to_joint], qkv[:, 2])
    untouched = torch.tensor([1, 4, 5], device=DEVICE)
    assert all(bool((part[untouched] == 9).all()) for part in out)


def test_no_tokens_is_no_launch() -> None:
    empty = _randn(0, 64, dtype=torch.float32)
    index = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert fused.gate_residual(empty, empty, _randn(1, 64, dtype=torch.float32), index).shape == (0, 64)


needs_fp8 = pytest.mark.skipif(
    DEVICE == "cpu", reason="Triton's interpreter rounds 126.5 to 64 in e4m3: it drops the carry"
)


@needs_fp8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("width", [96, 12_288])
def test_quantize_rows(dtype: torch.dtype, gelu: bool, width: int) -> None:
    x = _randn(5, width, dtype=dtype) * torch.tensor([1, 1e-3, 30, 0, 1e4], device=DEVICE).unsqueeze(1).to(
        dtype
    )
    values, scale = fused.quantize_rows(x, gelu=gelu)
    wide = x.double()
    expected = torch.nn.functional.gelu(wide, approximate="tanh") if gelu else wide
    restored = values.double() * scale.double()
    largest = expected.abs().amax(1, keepdim=True)
    # e4m3 keeps 3 bits of the mantissa: half a step is 1/16 of a value, or of the smallest normal one
    assert bool(((restored - expected).abs() <= expected.abs() / 16 + largest * 2**-15 + 1e-9).all())
    assert values.dtype == torch.float8_e4m3fn
    assert torch.allclose(scale.double(), largest.clamp_min(1e-12) / 448, rtol=1e-5, atol=0)
    assert bool((restored[3] == 0).all())


@needs_fp8
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_modulate_quantized_is_both_in_turn(dtype: torch.dtype) -> None:
    x = _randn(9, 96, dtype=dtype) * 3 + 5
    mods = _randn(4, 6 * 96, dtype=dtype).chunk(6, dim=-1)
    index = torch.tensor([0, 3, 3, 1, 2, 0, 1, 3, 2], device=DEVICE)
    values, scale = fused.norm_modulate_quantized(x, mods[0], mods[1], index, 1e-6)
    wide = x.double()
    normed = (wide - wide.mean(1, keepdim=True)) / (wide.var(1, keepdim=True, correction=0) + 1e-6).sqrt()
    expected = normed * (1 + mods[1].double()[index]) + mods[0].double()[index]
    assert _error(values.double() * scale.double(), expected) < 0.04
    assert torch.allclose(scale.double(), expected.abs().amax(1, keepdim=True) / 448, rtol=1e-3)
