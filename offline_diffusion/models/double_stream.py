"""Double-stream blocks over packed sequences: image and text have weights of their own and attend jointly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offline_diffusion.attention.backends import AttentionFunction
from offline_diffusion.attention.metadata import AttentionMetadata
from offline_diffusion.kernels.linear import PackedLinear
from offline_diffusion.kernels.packed_ops import (
    QuantFormat,
    Quantized,
    gate_residual_norm,
    norm_modulate,
    scatter_qkv,
)
from offline_diffusion.models.base import PackedInput, RotaryTable

EPS = 1e-6
"""Of all layer norms."""

Rows = Tensor | Quantized
"""A stream's rows as the next product takes them."""

Modulation = tuple[Tensor, ...]
"""What a stream needs of the conditioning in a block, ``[slots, H]`` each, in the checkpoint's order: mostly
shift, scale and gate of attention, then of the feed-forward."""


class Projections:
    """Queries, keys and values of a stream. ``large`` names its products that may be quantized.

    Args:
        to_qkv: The three linear layers.
        norms: RMS norms of queries and keys, or twice None.
        num_heads: A.
    """

    large: tuple[str, ...] = ("to_qkv",)

    def __init__(self, to_qkv: Sequence[nn.Linear], norms: tuple[Any, Any], num_heads: int) -> None:
        self.to_qkv = PackedLinear(*to_qkv)
        norm_q, norm_k = norms
        self._weight_q = None if norm_q is None else norm_q.weight.detach()
        self._weight_k = None if norm_k is None else norm_k.weight.detach()
        self._eps: float = 0.0 if norm_q is None else norm_q.eps
        self._num_heads = num_heads

    def qkv_into(self, k: Tensor, v: Tensor, h: Rows, to_joint: Tensor, rotary: RotaryTable | None) -> Tensor:
        """The stream's q ``[T, A, D]``; rows ``to_joint`` of ``k`` and ``v`` ``[S, A, D]`` are filled."""
        qkv = self.to_qkv(h).unflatten(-1, (3, *k.shape[1:]))
        q = k.new_empty(qkv.shape[0], *k.shape[1:])
        cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
        scatter_qkv(qkv, self._weight_q, self._weight_k, self._eps, to_joint, cos, sin, (q, k, v))
        return q

    def room(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of so many tokens, not filled: ``[S, A, D]``."""
        like = self.to_qkv.bias
        shape = num_tokens, self._num_heads, like.shape[0] // 3 // self._num_heads
        return like.new_empty(shape), like.new_empty(shape)

    def attend_alone(
        self, h: Rows, attention: AttentionMetadata, rotary: RotaryTable | None, attend: AttentionFunction
    ) -> Tensor:
        """Attention of a stream to itself, ``[T, H]``; ``rotary`` is in the stream's own order."""
        num_tokens = sum(attention.queries.seqlens)
        k, v = self.room(num_tokens)
        q = self.qkv_into(k, v, h, torch.arange(num_tokens, device=k.device), rotary)
        return attend(q, k, v, attention).flatten(1)


class ReadStream(Projections):
    """A stream that a block's attention reads and nothing follows.

    Args:
        modulation: Linear layer from the conditioning to the block's `Modulation`.
        to_qkv, norms, num_heads: See `Projections`.
    """

    def __init__(
        self, modulation: nn.Linear, to_qkv: Sequence[nn.Linear], norms: tuple[Any, Any], num_heads: int
    ) -> None:
        super().__init__(to_qkv, norms, num_heads)
        self.modulation = PackedLinear(modulation)


class Stream(ReadStream):
    """One stream's weights in a block: image or text.

    Args:
        modulation: See `ReadStream`.
        to_qkv, norms, num_heads: See `Projections`.
        to_out: Linear layer behind attention.
        mlp: Feed-forward with tanh-approximated GELU, as diffusers lays it out.
    """

    large = ("to_qkv", "to_out", "mlp_in", "mlp_out")

    def __init__(
        self,
        modulation: nn.Linear,
        to_qkv: Sequence[nn.Linear],
        norms: tuple[Any, Any],
        to_out: nn.Linear,
        mlp: Any,
        num_heads: int,
    ) -> None:
        super().__init__(modulation, to_qkv, norms, num_heads)
        self.to_out = PackedLinear(to_out)
        self.mlp_in, self.mlp_out = PackedLinear(mlp.net[0].proj), PackedLinear(mlp.net[2])

    def finish(
        self,
        x: Tensor,
        attn: Tensor,
        own: Modulation,
        following: Modulation,
        takes: QuantFormat | None,
        index: Tensor,
    ) -> tuple[Tensor, Rows]:
        """From attention to the next block: both residuals and the feed-forward between.

        Args:
            x: ``[T, H]``.
            attn: ``[T, H]``, what attention gave.
            own: This block's modulation.
            following: Shift and scale of what reads the stream next.
            takes: The format in which that wants it.
            index: ``[T]``, slot of each token.
        """
        _, _, gate, shift, scale, last_gate = own[:6]
        update = self.to_out(attn)
        x, h = gate_residual_norm(x, update, gate, shift, scale, index, EPS, self.mlp_in.takes)
        update = self.mlp_in.feed_forward(self.mlp_out, h)
        shift, scale = following
        return gate_residual_norm(x, update, last_gate, shift, scale, index, EPS, takes)


class SelfAttention(Projections):
    """Attention of the image stream to itself, beside joint attention.

    Args:
        to_qkv, norms, num_heads: See `Projections`.
        to_out: Linear layer behind attention.
    """

    large = ("to_qkv", "to_out")

    def __init__(
        self, to_qkv: Sequence[nn.Linear], norms: tuple[Any, Any], to_out: nn.Linear, num_heads: int
    ) -> None:
        super().__init__(to_qkv, norms, num_heads)
        self.to_out = PackedLinear(to_out)

    def __call__(
        self, x: Tensor, own: Modulation, index: Tensor, batch: PackedInput, attend: AttentionFunction
    ) -> Tensor:
        """``x`` ``[T_img, H]`` with this attention's residual; ``own``: its shift, scale and gate."""
        shift, scale, gate = own
        h = norm_modulate(x, shift, scale, index, EPS, self.to_qkv.takes)
        images = batch.img_attention.queries
        attn = self.attend_alone(h, AttentionMetadata(images, images), None, attend)
        summed, _ = gate_residual_norm(x, self.to_out(attn), gate, shift, scale, index, EPS)
        return summed


class DoubleBlock:
    """Joint attention, then each stream's feed-forward.

    Args:
        img, txt: Its streams; the last block's text may be only read.
        img_own: A second attention of the image, whose modulation follows the stream's own; mostly None.
    """

    def __init__(self, img: Stream, txt: ReadStream, img_own: SelfAttention | None = None) -> None:
        self.img, self.txt, self.img_own = img, txt, img_own

    def quantizable(self) -> Iterator[tuple[object, str]]:
        """Its large products, for ``accel.quantize``."""
        for part in (self.img, self.txt, self.img_own):
            if part is not None:
                yield from ((part, name) for name in part.large)

    def attention(
        self, img: Rows, txt: Rows, batch: PackedInput, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        """Joint attention over all sequences: image ``[T_img, H]`` and text ``[T_txt, H]``.

        Each stream's queries are a call of their own, so that neither they nor what comes of them change
        their order.
        """
        k, v = self.img.room(sum(batch.seqlens))
        img_q = self.img.qkv_into(k, v, img, batch.img_to_joint, batch.rotary)
        txt_q = self.txt.qkv_into(k, v, txt, batch.txt_to_joint, batch.rotary)
        img_attn = attend(img_q, k, v, batch.img_attention).flatten(1)
        return img_attn, attend(txt_q, k, v, batch.txt_attention).flatten(1)


def run_blocks(
    blocks: Sequence[DoubleBlock],
    img: Tensor,
    txt: Tensor,
    modulations: Sequence[Modulation],
    slots: tuple[Tensor, Tensor],
    batch: PackedInput,
    attend: AttentionFunction,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both streams through all blocks, up to the attention of the last.

    What follows on that differs between families: `Stream.finish` of the streams that are still needed.

    Args:
        blocks: In order.
        img, txt: ``[T_img, H]`` and ``[T_txt, H]``.
        modulations: Of each block the image's, then the text's.
        slots: Row of the modulations for each token of the image and of the text.
        batch: How tokens fall into sequences.
        attend: The attention backend.

    Returns:
        Both streams before the last block's residuals, and what its attention gave to each.
    """
    img_slot, txt_slot = slots
    img_h = read_stream(blocks[0].img, img, modulations[0], img_slot)
    txt_h = read_stream(blocks[0].txt, txt, modulations[1], txt_slot)
    for index, block in enumerate(blocks):
        own_img, own_txt = modulations[2 * index : 2 * index + 2]
        img_attn, txt_attn = block.attention(img_h, txt_h, batch, attend)
        if block.img_own is not None:
            img = block.img_own(img, own_img[6:], img_slot, batch, attend)
        if index + 1 < len(blocks):
            assert isinstance(block.txt, Stream)
            following = blocks[index + 1]
            next_img, next_txt = (own[:2] for own in modulations[2 * index + 2 : 2 * index + 4])
            img, img_h = block.img.finish(
                img, img_attn, own_img, next_img, following.img.to_qkv.takes, img_slot
            )
            txt, txt_h = block.txt.finish(
                txt, txt_attn, own_txt, next_txt, following.txt.to_qkv.takes, txt_slot
            )
    return img, txt, img_attn, txt_attn


def read_stream(stream: Projections, x: Tensor, own: Modulation, index: Tensor) -> Rows:
    """The stream ``x`` ``[T, H]`` as its projections take it."""
    return norm_modulate(x, own[0], own[1], index, EPS, stream.to_qkv.takes)


def split_modulation(rows: Tensor, counts: Sequence[int]) -> list[Modulation]:
    """A table ``[slots, sum(counts) · H]`` as views ``[slots, H]``, ``counts`` of them for each reader."""
    parts = rows.split(rows.shape[1] // sum(counts), dim=1)
    stops = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [parts[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
