"""8-bit products: their error against the full ones, and that rows stay apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from offline_diffusion.accel.quantize import QuantizedLinear
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.kernels.linear import PackedLinear
from offline_diffusion.kernels.packed_ops import FP8, INT8, QuantFormat
from offline_diffusion.models.loader import load_model
from offline_diffusion.request import Request

E4M3_RELATIVE_STEP = 2**-4  # half of the spacing 2**-3 of three mantissa bits


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(192, 320)


def test_a_product_is_off_by_what_int8_rounds(layer: nn.Linear) -> None:
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    x = torch.randn(40, 192)
    expected = x.double() @ weight.t() + bias
    out = QuantizedLinear(PackedLinear(layer), INT8)(x).double()
    error = (out - expected).norm() / (expected - bias).norm()
    # A step is 1/127 of the largest of 192 normal values, about 2.9: rounding is off by 2.9/127/sqrt(12)
    # of their deviation; the uniform weights' largest is sqrt(3) of theirs.
    assert 0.004 < error < 0.012


def test_the_int8_values_are_what_numpy_rounds_to(layer: nn.Linear) -> None:
    linear = QuantizedLinear(PackedLinear(layer), INT8)
    weight = layer.weight.detach().numpy()
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
    assert np.array_equal(linear.weight.numpy(), np.rint(weight / scale).astype(np.int8))


def test_a_product_is_off_by_what_e4m3_rounds(layer: nn.Linear) -> None:
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    x = torch.randn(40, 192)
    expected = x.double() @ weight.t() + bias
    out = QuantizedLinear(PackedLinear(layer), FP8)(x).double()
    error = (out - expected).norm() / (expected - bias).norm()
    # independent roundings of both factors, each uniform within a step: about step / sqrt(3) * sqrt(2)
    assert 0.01 < error < E4M3_RELATIVE_STEP


def test_the_quantized_values_are_what_torch_rounds_to(layer: nn.Linear) -> None:
    linear = QuantizedLinear(PackedLinear(layer), FP8)
    weight = layer.weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 448
    expected = (weight / scale).to(torch.float8_e4m3fn)
    assert torch.equal(linear.weight.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("quantize", [FP8, INT8])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 17, 129, 300])
def test_a_row_does_not_depend_on_how_many_there_are(
    layer: nn.Linear, num_rows: int, quantize: QuantFormat
) -> None:
    linear = QuantizedLinear(PackedLinear(layer), quantize)
    x = torch.randn(700, 192)
    assert torch.equal(linear(x[:num_rows].clone()), linear(x)[:num_rows])


def test_weights_are_freed(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), device="cpu", quantization="fp8")
    model = load_model(config)
    kinds = {type(getattr(owner, name)) for owner, name in model.quantizable()}
    assert kinds == {QuantizedLinear}
    blocks = model._transformer.transformer_blocks  # type: ignore[attr-defined]
    assert blocks[0].attn.to_q.weight.numel() == 0
    assert blocks[0].img_mod[1].weight.numel() > 0


def _requests() -> list[Request]:
    sizes = [(64, 96), (128, 64), (48, 48)]
    return [
        Request(
            request_id=str(index),
            prompt="a lamp " * (index + 1),
            negative_prompt=" " if index != 1 else None,
            height=height,
            width=width,
            num_inference_steps=3 + index,
            true_cfg_scale=3.0,
            seed=index,
        )
        for index, (height, width) in enumerate(sizes)
    ]


def _draw(folder: Path, **options: object) -> dict[str, np.ndarray]:
    config = EngineConfig(model=str(folder), device="cpu", **options)  # type: ignore[arg-type]
    outputs = Engine(load_model(config), config).generate(_requests())
    return {output.request_id: output.pixels for output in outputs}


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_pictures_are_near_the_full_ones_whatever_the_company(tiny_model: Path, quantization: str) -> None:
    full = _draw(tiny_model)
    packed = _draw(tiny_model, quantization=quantization)
    alone = _draw(tiny_model, quantization=quantization, max_num_seqs=1)
    for name, pixels in packed.items():
        assert np.array_equal(pixels, alone[name])
        difference = np.abs(pixels.astype(float) - full[name]).mean()
        assert 0 < difference < 12
