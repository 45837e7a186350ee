"""The Triton kernels against their plain twins: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined, on the import below

pytest.importorskip("triton", reason="no Triton on this machine")

from offline_diffusion.kernels import fused, packed_ops  # noqa: E402
from offline_diffusion.kernels.int8 import int8_product  # noqa: E402
from offline_diffusion.kernels.packed_ops import FP8, INT8, QuantFormat, Quantized  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]
needs_fp8 = pytest.mark.skipif(
    DEVICE == "cpu", reason="Triton's interpreter rounds 126.5 to 64 in e4m3: it drops the carry"
)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(DEVICE, dtype)


def _error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _modulated(
    x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """Layer norm and modulation in float64."""
    wide = x.double()
    normed = (wide - wide.mean(1, keepdim=True)) / (wide.var(1, keepdim=True, correction=0) + 1e-6).sqrt()
    return normed * (1 + scale.double()[index]) + shift.double()[index]


def _restored(rows: Quantized) -> torch.Tensor:
    return rows.values.double() * rows.scale.double()


FORMATS = [INT8, pytest.param(FP8, marks=needs_fp8)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 96, 3072])
def test_norm_modulate(dtype: torch.dtype, width: int) -> None:
    x = _randn(9, width, dtype=dtype) * 3 + 5
    mods = _randn(4, 6 * width, dtype=dtype).chunk(6, dim=-1)  # strided rows, as in the model
    index = torch.tensor([0, 3, 3, 1, 2, 0, 1, 3, 2], device=DEVICE)
    out = fused.norm_modulate(x, mods[0], mods[1], index, 1e-6, None)
    assert out.dtype == dtype
    assert _error(out, _modulated(x, mods[0], mods[1], index)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", FORMATS)
def test_norm_modulate_quantized(dtype: torch.dtype, quantize: QuantFormat) -> None:
    x = _randn(9, 96, dtype=dtype) * 3 + 5
    mods = _randn(4, 6 * 96, dtype=dtype).chunk(6, dim=-1)
    index = torch.tensor([0, 3, 3, 1, 2, 0, 1, 3, 2], device=DEVICE)
    out = fused.norm_modulate(x, mods[0], mods[1], index, 1e-6, quantize)
    expected = _modulated(x, mods[0], mods[1], index)
    assert out.values.dtype == quantize.dtype
    assert _error(_restored(out), expected) < (0.04 if quantize is FP8 else 0.012)
    largest = expected.abs().amax(1, keepdim=True)
    assert torch.allclose(out.scale.double(), largest / quantize.largest, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 3072])
def test_gate_residual_norm(dtype: torch.dtype, width: int) -> None:
    x, update = _randn(7, width, dtype=dtype), _randn(7, width, dtype=dtype)
    mods = _randn(3, 6 * width, dtype=dtype).chunk(6, dim=-1)
    index = torch.tensor([2, 0, 0, 1, 2, 1, 1], device=DEVICE)
    summed, out = fused.gate_residual_norm(x, update, mods[2], mods[3], mods[4], index, 1e-6, None)
    expected = x.double() + mods[2].double()[index] * update.double()
    assert summed.dtype == out.dtype == dtype
    assert _error(summed, expected) < TOLERANCE[dtype]
    # the norm is of the sum as it is stored, so that it is what a reader of the sum would compute
    assert _error(out, _modulated(summed, mods[3], mods[4], index)) < TOLERANCE[dtype]
    assert torch.equal(out, fused.norm_modulate(summed, mods[3], mods[4], index, 1e-6, None))


@pytest.mark.parametrize("quantize", FORMATS)
def test_gate_residual_norm_quantized(quantize: QuantFormat) -> None:
    x, update = _randn(7, 96, dtype=torch.bfloat16), _randn(7, 96, dtype=torch.bfloat16)
    mods = _randn(3, 6 * 96, dtype=torch.bfloat16).chunk(6, dim=-1)
    index = torch.tensor([2, 0, 0, 1, 2, 1, 1], device=DEVICE)
    summed, out = fused.gate_residual_norm(x, update, mods[2], mods[3], mods[4], index, 1e-6, quantize)
    expected = _modulated(summed, mods[3], mods[4], index)
    assert _error(_restored(out), expected) < (0.04 if quantize is FP8 else 0.012)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 32), (3, 64), (24, 128)])
def test_scatter_qkv(dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
    num_tokens, num_joint = 5, 8
    qkv = _randn(num_tokens, 3, num_heads, head_dim, dtype=dtype)
    weights = [_randn(head_dim, dtype=dtype) for _ in range(2)]
    to_joint = torch.tensor([6, 0, 3, 7, 2], device=DEVICE)
    angles = _randn(num_joint, head_dim // 2, dtype=torch.float32)
    rows = (num_tokens, num_joint, num_joint)  # q stays in the stream's order
    out = tuple(torch.full((n, num_heads, head_dim), 9.0, device=DEVICE, dtype=dtype) for n in rows)
    fused.scatter_qkv(qkv, *weights, 1e-6, to_joint, angles.cos(), angles.sin(), out)
    for part, weight, target in zip(
        qkv.double().unbind(1)[:2], weights, (out[0], out[1][to_joint]), strict=True
    ):
        normed = part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        turned = torch.view_as_complex(normed.unflatten(-1, (-1, 2))) * torch.polar(
            torch.ones_like(angles), angles
        ).to(torch.complex128)[to_joint].unsqueeze(1)
        expected = torch.view_as_real(turned).flatten(-2)
        assert _error(target, expected) < TOLERANCE[dtype]
    assert torch.equal(out[2][to_joint], qkv[:, 2])
    untouched = torch.tensor([1, 4, 5], device=DEVICE)
    assert all(bool((part[untouched] == 9).all()) for part in out[1:])


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("has_angles", [False, True])
def test_scatter_qkv_leaves_out_what_a_family_has_not(has_norms: bool, has_angles: bool) -> None:
    """Norms by a weight of ones and rotation by no angle are told apart from none at all."""
    qkv = _randn(4, 3, 3, 64, dtype=torch.float32)
    to_joint = torch.tensor([5, 0, 3, 1], device=DEVICE)
    weights = [_randn(64, dtype=torch.float32) if has_norms else None for _ in range(2)]
    angles = _randn(6, 32, dtype=torch.float32)
    turn = (angles.cos(), angles.sin()) if has_angles else (None, None)
    out, expected = (
        tuple(torch.zeros(n, 3, 64, device=device) for n in (4, 6, 6)) for device in (DEVICE, "cpu")
    )
    fused.scatter_qkv(qkv, *weights, 1e-6, to_joint, *turn, out)
    on_cpu = [None if x is None else x.cpu() for x in (*weights, *turn)]
    packed_ops.scatter_qkv(qkv.cpu(), *on_cpu[:2], 1e-6, to_joint.cpu(), *on_cpu[2:], expected)
    for part, wanted in zip(out, expected, strict=True):
        assert torch.allclose(part.cpu(), wanted, atol=1e-5)
    if not has_norms and not has_angles:
        assert torch.equal(out[0], qkv[:, 0])
        assert torch.equal(out[1][to_joint], qkv[:, 1])


def test_no_tokens_is_no_launch() -> None:
    empty, mods = _randn(0, 64, dtype=torch.float32), _randn(1, 64, dtype=torch.float32)
    index = torch.empty(0, dtype=torch.int64, device=DEVICE)
    summed, out = fused.gate_residual_norm(empty, empty, mods, mods, mods, index, 1e-6, None)
    assert summed.shape == out.shape == (0, 64)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of -2e12 is 0, as it should be
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", FORMATS)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("width", [96, 12_288])
def test_quantize_rows(dtype: torch.dtype, quantize: QuantFormat, gelu: bool, width: int) -> None:
    sizes = torch.tensor([1, 1e-3, 30, 0, 1e4], device=DEVICE).unsqueeze(1).to(dtype)
    x = _randn(5, width, dtype=dtype) * sizes
    out = fused.quantize_rows(x, quantize, gelu=gelu)
    wide = x.double()
    expected = torch.nn.functional.gelu(wide, approximate="tanh") if gelu else wide
    restored = _restored(out)
    largest = expected.abs().amax(1, keepdim=True)
    # Half a step: of e4m3's 3 bits 1/16 of a value or of the smallest normal one; of int8 1/254 of the row's.
    step = expected.abs() / 16 + largest * 2**-15 if quantize is FP8 else largest / 254 * 1.001
    assert bool(((restored - expected).abs() <= step + 1e-9).all())
    assert out.values.dtype == quantize.dtype
    wanted = largest.clamp_min(1e-12) / quantize.largest
    assert torch.allclose(out.scale.double(), wanted, rtol=1e-5, atol=0)
    assert bool((restored[3] == 0).all())


def test_int8_rounds_ties_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -3.5]], device=DEVICE)
    out = fused.quantize_rows(x, INT8, gelu=False)
    assert out.values.tolist() == [[127, 0, 2, 2, 0, -2, 126, -4]]


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_guided_step_is_its_plain_twin(dtype: torch.dtype, rescale: bool) -> None:
    """The twin is held against diffusers and numpy in test_guided_step."""
    num_tokens, channels = 37, 6
    latents = _randn(num_tokens, channels, dtype=torch.float32)
    pred = _randn(num_tokens + 20, channels, dtype=dtype)
    owner = torch.randint(0, 3, (num_tokens,))
    negative_row = torch.full((num_tokens,), -1)
    negative_row[torch.randperm(num_tokens)[:20]] = torch.arange(num_tokens, num_tokens + 20)
    tables = torch.tensor([1.0, 4.0, 0.5]), torch.rand(3, 5).sort(1, descending=True).values
    args = [owner, negative_row, *tables, torch.tensor([0, 3, 1])]
    expected = latents.cpu().clone()
    packed_ops.guided_step_(expected, pred.cpu(), *args, rescale=rescale)
    fused.guided_step_(latents, pred, *(arg.to(DEVICE) for arg in args), rescale=rescale)
    assert torch.allclose(latents.cpu(), expected, atol=1e-5)


@pytest.mark.parametrize(("num_rows", "columns", "inner"), [(5, 40, 96), (130, 300, 160), (700, 64, 128)])
def test_int8_product_is_exact(num_rows: int, columns: int, inner: int) -> None:
    values = torch.randint(-127, 128, (num_rows, inner), dtype=torch.int8, device=DEVICE)
    weight = torch.randint(-127, 128, (columns, inner), dtype=torch.int8, device=DEVICE)
    scale, weight_scale = torch.rand(num_rows, 1, device=DEVICE), torch.rand(1, columns, device=DEVICE)
    bias = torch.randn(columns, device=DEVICE)
    out = int8_product(values, weight, scale, weight_scale, bias)
    sums = values.cpu().long() @ weight.cpu().long().t()
    expected = sums.double() * scale.cpu().double() * weight_scale.cpu().double() + bias.cpu().double()
    assert torch.allclose(out.cpu().double(), expected, rtol=1e-6, atol=1e-2)
    assert torch.equal(int8_product(values[3:5], weight, scale[3:5], weight_scale, bias), out[3:5])
