"""On a GPU: a product's rows do not depend on how many there are, whatever its width and depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offline_diffusion.accel.quantize import QuantizedLinear
from offline_diffusion.kernels.linear import PackedLinear
from offline_diffusion.kernels.packed_ops import FP8, INT8

pytestmark = pytest.mark.gpu

MOST_ROWS = 16_384
NUM_ROWS = [1, 63, 64, 65, 80, 81, 97, 128, 129, 200, 257, 513, 1025, 2047, 2048, 5000]
COLUMNS = [64, 512, 768, 1280, 1536, 1920, 2432, 3072]
DEPTHS = [256, 1536, 3072, 6144, 12_288]


def made(columns: int, depth: int, quantize: Any) -> Any:
    torch.manual_seed(columns + depth)
    linear = PackedLinear(torch.nn.Linear(depth, columns, device="cuda", dtype=torch.bfloat16))
    return linear if quantize is None else QuantizedLinear(linear, quantize)


@pytest.mark.parametrize("quantize", [None, FP8, INT8])
@pytest.mark.parametrize("columns", COLUMNS)
@torch.inference_mode()
def test_rows_do_not_depend_on_their_number(columns: int, quantize: Any) -> None:
    for depth in DEPTHS:
        linear = made(columns, depth, quantize)
        x = torch.randn(MOST_ROWS, depth, device="cuda", dtype=torch.bfloat16)
        for run in (linear, linear.gelu):
            together = run(x)
            for count in NUM_ROWS:
                alone = run(x[-count:].contiguous())
                assert torch.equal(alone, together[-count:]), (depth, count, run)
