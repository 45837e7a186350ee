"""Layers of a packed forward whose rows do not depend on one another, to the last bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offline_diffusion.kernels.packed_ops import QuantFormat, Quantized

MIN_ROWS = 64
"""A row of a cuBLAS product with 2048 output columns or more is the same bits for every row count from this
one up (tests/gpu/test_products.py)."""

MIN_OUTPUTS = 2**17
"""Rows times columns from which that holds for narrower products: below it the library splits the sums of
long rows, and has no row-wise fp8 product for some."""

CPU_BLOCK_ROWS = 128
"""On a CPU a product is made of so many rows at a time: only then no row's bits depend on how many there
are. Costs 5 to 25 % against one product of 2048 rows, more for fewer rows."""


class PackedLinear:
    """``x @ weight.T + bias`` over the rows of a ragged batch: the one place where linear layers run.

    On a GPU, small inputs are padded with zero rows so that the library picks the same kernel
    whatever else is in the batch; the padding is cut off again. On a CPU, rows go in blocks of a fixed
    number, for the same reason.

    Args:
        layers: Linear layers of one input, fused into one product; outputs are concatenated. Their
            weights become views of the fused one, so that memory holds them once.
    """

    takes: QuantFormat | None = None
    """Format in which it wants its input; None: as the stream is."""

    def __init__(self, *layers: nn.Linear) -> None:
        self._layers = layers
        if len(layers) == 1:
            self.weight, self.bias = layers[0].weight.detach(), _bias(layers[0])
        else:
            self.weight = torch.cat([layer.weight.detach() for layer in layers])
            self.bias = torch.cat([_bias(layer) for layer in layers])
            for layer, rows in zip(layers, self.weight.split([x.out_features for x in layers]), strict=True):
                layer.weight.data = rows
        self.min_rows = max(MIN_ROWS, -(MIN_OUTPUTS // -self.weight.shape[0]))

    def free(self) -> None:
        """Lets go of the weights, also where the layers it was made from hold them. Unusable afterwards."""
        for layer in self._layers:
            layer.weight.data = self.weight.new_empty(0)
        self.weight = self.weight.new_empty(0)

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        """``[T, in]`` → ``[T, out]``."""
        assert isinstance(x, Tensor)
        if x.is_cuda:
            return F.linear(pad_rows(x, self.min_rows), self.weight, self.bias)[: x.shape[0]]
        return product_in_blocks(x, self.weight, self.bias)

    def feed_forward(self, out: PackedLinear, x: Tensor | Quantized) -> Tensor:
        """``out`` of the tanh-approximated GELU of this product."""
        return out(self.gelu(x))

    def gelu(self, x: Tensor | Quantized) -> Tensor:
        """The product followed by tanh-approximated GELU: one kernel on a GPU, where cuBLAS fuses both."""
        assert isinstance(x, Tensor)
        if not x.is_cuda:
            return F.gelu(self(x), approximate="tanh")
        padded = pad_rows(x, self.min_rows)
        fused = torch._addmm_activation(self.bias, padded, self.weight.t(), use_gelu=True)
        return fused[: x.shape[0]]


def product_in_blocks(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x @ weight.T + bias`` on a CPU, `CPU_BLOCK_ROWS` rows at a time.

    Args:
        x: ``[T, in]``.
        weight: ``[out, in]``.
        bias: ``[out]``.
    """
    num_rows = x.shape[0]
    blocks = F.pad(x, (0, 0, 0, -num_rows % CPU_BLOCK_ROWS)).split(CPU_BLOCK_ROWS)
    return torch.cat([F.linear(block, weight, bias) for block in blocks])[:num_rows]


def pad_rows(x: Tensor, min_rows: int) -> Tensor:
    """``x`` with zero rows appended up to ``min_rows`` on a GPU; as it is elsewhere."""
    if not x.is_cuda or x.shape[0] >= min_rows:
        return x
    return torch.cat((x, x.new_zeros(min_rows - x.shape[0], *x.shape[1:])))


def _bias(layer: nn.Linear) -> Tensor:
    if layer.bias is None:
        return torch.zeros(layer.out_features, dtype=layer.weight.dtype, device=layer.weight.device)
    return layer.bias.detach()
