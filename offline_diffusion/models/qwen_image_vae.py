"""Decodes one image with Qwen-Image's VAE: the video decoder's work on a first frame, and no more.

diffusers' ``AutoencoderKLQwenImage`` (0.42) convolves in space and time. A first frame has only zeros
before it, so of each kernel just the last slice in time counts: a third of the work. The temporal
upsampling leaves a first frame as it is.

Large images go through the upper half in tiles. Everything there is a convolution or a norm of single
positions, so a tile that sees far enough around itself gets the values it has in the whole image: no
seams, and nothing to blend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TILED_ABOVE_PIXELS = 2048 * 2048
"""Larger images are decoded in tiles, whatever memory is free: an image's bits depend on its size alone."""

MAX_TILE_PIXELS = 1024
"""Most rows or columns of pixels in a tile, without what it sees around itself."""

SMALLEST_NORM = 1e-12
"""No vector is divided by a smaller norm, as in diffusers."""

Span = tuple[int, int]
"""First row or column, and the one after the last."""


class ImageDecoder:
    """Latents of one image to its pixels.

    Args:
        vae: A loaded ``AutoencoderKLQwenImage``. A third of its decoder's kernels is copied (at full size
            48 MiB in bfloat16), so that it can still be used itself.
    """

    def __init__(self, vae: Any) -> None:
        decoder = vae.decoder
        self._post_quant, self._conv_in = _Conv(vae.post_quant_conv), _Conv(decoder.conv_in)
        self._mid = _MidBlock(decoder.mid_block)
        self._layers = list(_local_layers(decoder))
        self._margins = [0]  # what each layer has to see around a tile, at the layer's own size
        for layer in reversed(self._layers):
            self._margins.insert(0, layer.margin(self._margins[0]))
        self.scale = math.prod(layer.scale for layer in self._layers)

    @property
    def halo(self) -> int:
        """How many latents beyond a tile its pixels depend on, after the mid block."""
        return self._margins[0]

    def __call__(self, latents: Tensor) -> Tensor:
        """The image, float32 ``[height, width, 3]``, 0 … 1.

        Args:
            latents: ``[1, C, rows, columns]`` in the VAE's dtype, as its ``decode`` takes them.
        """
        rows, columns = latents.shape[2:]
        x = self._post_quant(latents.contiguous(memory_format=torch.channels_last))
        x = self._mid(self._conv_in(x))
        is_tiled = rows * columns * self.scale**2 > TILED_ABOVE_PIXELS
        max_side = MAX_TILE_PIXELS // self.scale if is_tiled else max(rows, columns)
        image = torch.empty((rows * self.scale, columns * self.scale, 3), device=x.device)
        for tile_rows in _spans(rows, max_side):
            for tile_columns in _spans(columns, max_side):
                self._decode_tile(x, tile_rows, tile_columns, image)
        return image

    def _decode_tile(self, x: Tensor, rows: Span, columns: Span, image: Tensor) -> None:
        """Writes a tile's pixels to their place in ``image``.

        Before each layer the tile is cut to what the layers to come depend on. The image's own edges
        stay edges, where the convolutions see zeros as they do in the whole image.

        Args:
            x: ``[1, C, rows, columns]`` of the whole image, after the mid block.
            rows: Of the tile, in latents.
            columns: Likewise.
            image: ``[height, width, 3]``, 0 … 1.
        """
        down, across = _Axis(rows, x.shape[2]), _Axis(columns, x.shape[3])
        for layer, margin in zip(self._layers, self._margins[:-1], strict=True):
            part = across.cut(down.cut(x, 2, margin), 3, margin)
            x = layer(part.contiguous(memory_format=torch.channels_last))
            down.grow(layer.scale)
            across.grow(layer.scale)
        tile = across.cut(down.cut(x, 2, 0), 3, 0)[0].permute(1, 2, 0)
        image[slice(*down.tile), slice(*across.tile)].copy_(tile).clamp_(-1, 1).mul_(0.5).add_(0.5)


class _Conv:
    """A convolution that keeps the size; a causal one in time sees its last slice only."""

    def __init__(self, conv: Any) -> None:
        weight = conv.weight.detach()
        weight = weight[:, :, -1] if weight.ndim == 5 else weight  # [out, in, kh, kw]
        self.weight = weight.clone(memory_format=torch.channels_last)
        self.bias = conv.bias.detach()
        self.reach: int = weight.shape[-1] // 2
        """Rows or columns seen to each side."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding=self.reach)


class _Norm:
    """RMS norm of every position over its channels, of ``[1, C, h, w]`` in channels-last memory."""

    def __init__(self, norm: Any) -> None:
        self.weight = norm.gamma.detach().flatten()
        self.eps = SMALLEST_NORM**2 / self.weight.numel()  # diffusers norms by length, this by mean square

    def __call__(self, x: Tensor) -> Tensor:
        positions = x.permute(0, 2, 3, 1)
        return F.rms_norm(positions, self.weight.shape, self.weight, self.eps).permute(0, 3, 1, 2)


class _ResidualBlock:
    scale = 1

    def __init__(self, block: Any) -> None:
        self.norm1, self.conv1 = _Norm(block.norm1), _Conv(block.conv1)
        self.norm2, self.conv2 = _Norm(block.norm2), _Conv(block.conv2)
        self.shortcut = _Conv(block.conv_shortcut) if block.in_dim != block.out_dim else None

    def __call__(self, x: Tensor) -> Tensor:
        update = self.conv1(F.silu(self.norm1(x), inplace=True))
        update = F.silu(self.norm2(update), inplace=True)  # lets go of the first convolution's output
        return self.conv2(update).add_(x if self.shortcut is None else self.shortcut(x))

    def margin(self, margin: int) -> int:
        """As `_Upsampling.margin`."""
        return margin + self.conv1.reach + self.conv2.reach


class _Attention:
    """One head over all positions."""

    def __init__(self, attention: Any) -> None:
        self.norm = _Norm(attention.norm)
        self.to_qkv, self.proj = _Conv(attention.to_qkv), _Conv(attention.proj)

    def __call__(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.norm(x)).permute(0, 2, 3, 1).flatten(1, 2).unsqueeze(1)  # [1, 1, h·w, 3C]
        q, k, v = qkv.chunk(3, dim=-1)
        attn = F.scaled_dot_product_attention(q, k, v)
        return self.proj(attn.view(1, *x.shape[2:], -1).permute(0, 3, 1, 2)).add_(x)


class _MidBlock:
    """The only place where far positions meet."""

    def __init__(self, block: Any) -> None:
        first, *resnets = map(_ResidualBlock, block.resnets)
        self.layers: list[_ResidualBlock | _Attention] = [first]
        for attention, resnet in zip(block.attentions, resnets, strict=True):
            self.layers += [_Attention(attention), resnet]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Upsampling:
    """Twice the size."""

    scale = 2

    def __init__(self, upsampler: Any) -> None:
        self.conv = _Conv(upsampler.resample[1])

    def __call__(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest-exact"))

    def margin(self, margin: int) -> int:
        """Positions around its input that ``margin`` around its output depend on."""
        return -((margin + self.conv.reach) // -2)  # rounded up


class _Head:
    """From features to red, green and blue."""

    scale = 1

    def __init__(self, decoder: Any) -> None:
        self.norm, self.conv = _Norm(decoder.norm_out), _Conv(decoder.conv_out)

    def __call__(self, x: Tensor) -> Tensor:
        return self.conv(F.silu(self.norm(x), inplace=True))

    def margin(self, margin: int) -> int:
        """As `_Upsampling.margin`."""
        return margin + self.conv.reach


def _local_layers(decoder: Any) -> Iterator[_ResidualBlock | _Upsampling | _Head]:
    """All after the mid block, in order."""
    for block in decoder.up_blocks:
        yield from map(_ResidualBlock, block.resnets)
        yield from map(_Upsampling, block.upsamplers or ())
    yield _Head(decoder)


class _Axis:
    """Which rows, or columns, of the whole image are at hand while a tile goes through the layers.

    Args:
        tile: Those of the tile.
        size: Of the whole image.
    """

    def __init__(self, tile: Span, size: int) -> None:
        self.tile, self.size, self.held = tile, size, (0, size)

    def cut(self, x: Tensor, dim: int, margin: int) -> Tensor:
        """The tile's part of ``x`` with ``margin`` on both sides, where the image does not end before."""
        start, stop = max(0, self.tile[0] - margin), min(self.size, self.tile[1] + margin)
        origin, self.held = self.held[0], (start, stop)
        return x.narrow(dim, start - origin, stop - start)

    def grow(self, scale: int) -> None:
        """After a layer that makes ``scale`` positions of one."""
        self.size *= scale
        self.tile, self.held = _scaled(self.tile, scale), _scaled(self.held, scale)


def _scaled(span: Span, scale: int) -> Span:
    return span[0] * scale, span[1] * scale


def _spans(size: int, max_side: int) -> list[Span]:
    """``size`` in the fewest spans of at most ``max_side``, of about equal length."""
    count = -(size // -max_side)
    return list(pairwise(size * index // count for index in range(count + 1)))
