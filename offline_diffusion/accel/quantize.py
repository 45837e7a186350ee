"""Quantized products: weights per output channel, inputs per token, both at run time.

Only the blocks' large products are quantized (q/k/v, attention output, feed-forward of both streams);
embeddings, modulation, the final norm and the output projection stay as they are. A token's scale is its
own largest magnitude, so a row's bits depend on no neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from offline_diffusion.errors import BackendError
from offline_diffusion.kernels.linear import MIN_ROWS, PackedLinear, pad_rows, product_in_blocks
from offline_diffusion.kernels.packed_ops import (
    Quantized,
    norm_modulate_quantized,
    quantize_rows,
)


class QuantizedLinear:
    """A ``PackedLinear`` with fp8 weights (e4m3, a scale per output channel), made from one.

    Products run in fp8 with fast accumulation on GPUs from compute capability 8.9 on; elsewhere the
    quantized values are multiplied in the working precision, which gives the same error.
    """

    def __init__(self, linear: PackedLinear) -> None:
        weight = quantize_rows(linear.weight)
        self.weight, self.bias = weight.values, linear.bias
        self.weight_scale = weight.scale.t().contiguous()  # [1, out]

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in]`` → ``[T, out]``."""
        return self._product(quantize_rows(x))

    def of_modulated(self, x: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float) -> Tensor:
        """See ``PackedLinear.of_modulated``."""
        return self._product(norm_modulate_quantized(x, shift, scale, index, eps))

    def feed_forward(
        self, out: QuantizedLinear, x: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float
    ) -> Tensor:
        """See ``PackedLinear.feed_forward``."""
        hidden = self.of_modulated(x, shift, scale, index, eps)
        return out._product(quantize_rows(hidden, gelu=True))

    def _product(self, x: Quantized) -> Tensor:
        num_rows = x.values.shape[0]
        if not x.values.is_cuda:
            dtype = self.bias.dtype
            weight = self.weight.to(dtype) * self.weight_scale.t().to(dtype)
            return product_in_blocks(x.values.to(dtype) * x.scale.to(dtype), weight, self.bias)
        out: Tensor = torch._scaled_mm(
            pad_rows(x.values, MIN_ROWS),
            self.weight.t(),
            scale_a=pad_rows(x.scale, MIN_ROWS),
            scale_b=self.weight_scale,
            bias=self.bias,
            out_dtype=self.bias.dtype,
            use_fast_accum=True,
        )
        return out[:num_rows]


class HasQuantizableLayers(Protocol):
    """A model that lends its large products."""

    device: torch.device

    def quantizable(self) -> Iterable[tuple[object, str]]:
        """Owner and attribute name of each ``PackedLinear`` that may be replaced."""
        ...


def apply_quantization(model: HasQuantizableLayers, name: str) -> None:
    """Replaces a model's large products; ``none`` leaves them.

    Raises:
        BackendError: The device cannot do it.
    """
    if name == "none":
        return
    if model.device.type == "cuda" and torch.cuda.get_device_capability(model.device) < (8, 9):
        raise BackendError(
            "--quantization fp8 needs a GPU of compute capability 8.9 or newer",
            hint="use --quantization none",
        )
    for owner, attribute in model.quantizable():
        linear = getattr(owner, attribute)
        setattr(owner, attribute, QuantizedLinear(linear))
        linear.free()
