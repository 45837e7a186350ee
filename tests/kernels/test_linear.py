"""Fused linear layers against the modules they were made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offline_diffusion.kernels.linear import PackedLinear, pad_rows


@pytest.mark.parametrize("biases", [(True,), (False,), (True, True, True), (True, False)])
def test_the_product_is_the_modules(biases: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 5 + n, bias=bias) for n, bias in enumerate(biases)]
    x = torch.randn(3, 8)
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    packed = PackedLinear(*layers)
    assert torch.allclose(packed(x), expected, atol=1e-6)
    assert torch.allclose(torch.cat([layer(x) for layer in layers], dim=1), expected, atol=1e-6)


def test_fused_weights_are_in_memory_once() -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    packed = PackedLinear(*layers)
    storages = {layer.weight.untyped_storage().data_ptr() for layer in layers}
    assert storages == {packed.weight.untyped_storage().data_ptr()}


def test_a_packed_layer_tracks_no_gradients() -> None:
    packed = PackedLinear(nn.Linear(4, 4), nn.Linear(4, 4))
    assert not packed(torch.randn(2, 4)).requires_grad


def test_rows_are_not_padded_on_a_cpu() -> None:
    x = torch.randn(3, 4)
    assert pad_rows(x, 64) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "columns"), [(64, 192), (64, 64), (256, 64)])
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype: torch.dtype, width: int, columns: int) -> None:
    torch.manual_seed(0)
    packed = PackedLinear(nn.Linear(width, columns, dtype=dtype))
    x = torch.randn(700, width, dtype=dtype)
    together = packed(x)
    for start, stop in [(0, 1), (3, 4), (0, 17), (100, 229), (37, 700), (699, 700)]:
        assert torch.equal(packed(x[start:stop]), together[start:stop])
