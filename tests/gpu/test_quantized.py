"""fp8 on a GPU: bits do not depend on company, and the error is what e4m3 rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compositions import forward, prepare, prepared_composition

from offline_diffusion.accel.quantize import QuantizedLinear, apply_quantization
from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.kernels.linear import PackedLinear
from offline_diffusion.models.loader import model_from_pipeline

pytestmark = pytest.mark.gpu

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def fp8_model() -> Any:
    from full_size import build_pipeline, checkpoint

    device = torch.device("cuda")
    pipeline = build_pipeline(device, num_layers=NUM_LAYERS, num_text_layers=2)
    model = model_from_pipeline(pipeline, checkpoint(NUM_LAYERS), device)
    apply_quantization(model, "fp8")
    return model


@pytest.mark.parametrize("composition", range(20))
@torch.inference_mode()
def test_fp8_does_not_depend_on_company(fp8_model: Any, composition: int) -> None:
    prepared = prepared_composition(fp8_model, 500 + composition)
    for request, packed in zip(prepared, forward(fp8_model, prepared), strict=True):
        (alone,) = forward(fp8_model, [prepare(ModelRunner(fp8_model), request.request, request.step_index)])
        assert torch.equal(packed.noise_pred, alone.noise_pred)
        assert torch.equal(packed.latents, alone.latents)


@pytest.mark.parametrize("num_rows", [1, 63, 64, 1000])
@torch.inference_mode()
def test_an_fp8_product(num_rows: int) -> None:
    layer = torch.nn.Linear(12_288, 3072, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(num_rows, 12_288, device="cuda", dtype=torch.bfloat16)
    bias = layer.bias.double()
    expected = x.double() @ layer.weight.double().t() + bias
    out = QuantizedLinear(PackedLinear(layer))(x).double()
    error = (out - expected).norm() / (expected - bias).norm()
    assert 0.01 < error < 2**-4
