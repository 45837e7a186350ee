"""8-bit products on a GPU: bits do not depend on company, and the error is what the format rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compositions import forward, prepare, prepared_composition

from offline_diffusion.accel.quantize import QuantizedLinear, apply_quantization
from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.kernels.linear import PackedLinear
from offline_diffusion.kernels.packed_ops import FP8, INT8, QuantFormat
from offline_diffusion.models.loader import model_from_pipeline

pytestmark = pytest.mark.gpu

NUM_LAYERS = 4
NUM_COMPOSITIONS = 50


@pytest.fixture(scope="module", params=["fp8", "int8"])
def quantized_model(request: pytest.FixtureRequest) -> Any:
    from full_size import build_pipeline, checkpoint

    device = torch.device("cuda")
    pipeline = build_pipeline(device, num_layers=NUM_LAYERS, num_text_layers=2)
    model = model_from_pipeline(pipeline, checkpoint(NUM_LAYERS), device)
    apply_quantization(model, request.param)
    return model


@pytest.mark.parametrize("composition", range(NUM_COMPOSITIONS))
@torch.inference_mode()
def test_a_step_does_not_depend_on_company(quantized_model: Any, composition: int) -> None:
    model = quantized_model
    prepared = prepared_composition(model, 500 + composition)
    for request, packed in zip(prepared, forward(model, prepared), strict=True):
        (alone,) = forward(model, [prepare(ModelRunner(model), request.request, request.step_index)])
        assert torch.equal(packed.noise_pred, alone.noise_pred)
        assert torch.equal(packed.latents, alone.latents)


@pytest.mark.parametrize("quantize", [FP8, INT8])
@pytest.mark.parametrize("num_rows", [1, 63, 64, 1000])
@torch.inference_mode()
def test_a_product(num_rows: int, quantize: QuantFormat) -> None:
    layer = torch.nn.Linear(12_288, 3072, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(num_rows, 12_288, device="cuda", dtype=torch.bfloat16)
    bias = layer.bias.double()
    expected = x.double() @ layer.weight.double().t() + bias
    out = QuantizedLinear(PackedLinear(layer), quantize)(x).double()
    error = (out - expected).norm() / (expected - bias).norm()
    # int8: the largest of 12,288 normal values is about 4, a step 4/127, rounding off by a step / sqrt(12)
    assert (0.01 < error < 2**-4) if quantize is FP8 else (0.005 < error < 0.015)


@torch.inference_mode()
def test_an_int8_products_rows_do_not_depend_on_their_number() -> None:
    layer = torch.nn.Linear(3072, 9216, device="cuda", dtype=torch.bfloat16)
    linear = QuantizedLinear(PackedLinear(layer), INT8)
    x = torch.randn(5000, 3072, device="cuda", dtype=torch.bfloat16)
    together = linear(x)
    for start, stop in [(0, 1), (17, 80), (4000, 4129), (4999, 5000), (130, 3000)]:
        assert torch.equal(linear(x[start:stop].contiguous()), together[start:stop])
