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
from torch.nn import functional as F

from offline_diffusion.errors import BackendError
from offline_diffusion.kernels.linear import PackedLinear, pad_rows, product_in_blocks
from offline_diffusion.kernels.packed_ops import FP8, INT8, QuantFormat, Quantized, quantize_rows


class QuantizedLinear:
    """A ``PackedLinear`` with 8-bit weights, a scale per output channel, made from one.

    On a GPU fp8 runs through the library's row-wise product with fast accumulation, int8 through
    ``kernels.int8``, exact in its sums. Elsewhere the quantized values are multiplied in the working
    precision, which gives the same error.
    """

    def __init__(self, linear: PackedLinear, quantize: QuantFormat) -> None:
        weight = quantize_rows(linear.weight, quantize)
        self.takes, self.weight, self.bias = quantize, weight.values, linear.bias
        self.weight_scale = weight.scale.t().contiguous()  # [1, out]
        self._min_rows = linear.min_rows

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        """``[T, in]`` → ``[T, out]``."""
        x = quantize_rows(x, self.takes) if isinstance(x, Tensor) else x
        if not x.values.is_cuda:
            dtype = self.bias.dtype
            weight = self.weight.to(dtype) * self.weight_scale.t().to(dtype)
            return product_in_blocks(x.values.to(dtype) * x.scale.to(dtype), weight, self.bias)
        return self._int8_product(x) if self.takes is INT8 else self._fp8_product(x)

    def feed_forward(self, out: QuantizedLinear, x: Tensor | Quantized) -> Tensor:
        """See ``PackedLinear.feed_forward``."""
        return out(quantize_rows(self(x), out.takes, gelu=True))

    def gelu(self, x: Tensor | Quantized) -> Tensor:
        """See ``PackedLinear.gelu``."""
        return F.gelu(self(x), approximate="tanh")

    def _int8_product(self, x: Quantized) -> Tensor:
        from offline_diffusion.kernels.int8 import int8_product

        return int8_product(x.values, self.weight, x.scale, self.weight_scale, self.bias)

    def _fp8_product(self, x: Quantized) -> Tensor:
        out: Tensor = torch._scaled_mm(
            pad_rows(x.values, self._min_rows),
            self.weight.t(),
            scale_a=pad_rows(x.scale, self._min_rows),
            scale_b=self.weight_scale,
            bias=self.bias,
            out_dtype=self.bias.dtype,
            use_fast_accum=True,
        )
        return out[: x.values.shape[0]]


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
    quantize, capability = _FORMATS[name]
    if model.device.type == "cuda" and torch.cuda.get_device_capability(model.device) < capability:
        wanted = ".".join(map(str, capability))
        raise BackendError(
            f"--quantization {name} needs a GPU of compute capability {wanted} or newer",
            hint="use --quantization none" if quantize is INT8 else "use --quantization int8 or none",
        )
    for owner, attribute in model.quantizable():
        linear = getattr(owner, attribute)
        setattr(owner, attribute, QuantizedLinear(linear, quantize))
        linear.free()


_FORMATS = {"fp8": (FP8, (8, 9)), "int8": (INT8, (8, 0))}
"""Format, and the least compute capability that multiplies it."""
