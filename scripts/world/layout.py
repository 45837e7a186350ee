"""Packs of training examples: the product's own ragged batches, laid out once and filled anew every step.

A layout says which sizes and caption lengths lie where in the two streams. It is packed by
``engine.packed_batch.PackedBatch``, as the engine packs requests; behind the last sequence both streams
are filled up to fixed lengths, so that all layouts share their shapes and one compiled step serves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from offline_diffusion.attention.metadata import AttentionMetadata, SequenceBounds
from offline_diffusion.engine.packed_batch import PackedBatch, PreparedRequest
from offline_diffusion.models.base import PromptEmbeds, RotaryTable, SequenceInputs
from offline_diffusion.request import Request
from world.supply import Size

NUM_FILLERS = 16
"""Sequences that the filling is cut into, lest attention over it cost more than the rest."""

MAX_SEQLEN = 512
"""Text and image tokens of a sequence, at most."""

PATCH_PIXELS = 16


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one example in a layout.

    Args:
        size: Height and width in pixels.
        num_text: Tokens of its text stream: caption and the template's tail.
        lowest, count: The examples that fit: so many from the lowest on in the pool.
        empty_row: Row of the pool's texts that stands in for the caption, None where it is kept.
    """

    size: Size
    num_text: int
    lowest: int
    count: int
    empty_row: int | None = None

    @property
    def num_image(self) -> int:
        """Image tokens."""
        return self.size[0] * self.size[1] // PATCH_PIXELS**2


@dataclass(slots=True)
class Layout:
    """A pack's shape on the device. N slots, T_img and T_txt rows of the streams, T of both.

    Args:
        lowest, count: ``[N]``, which examples fit a slot.
        empty_row: ``[N]``, row of the pool's texts in the caption's place, -1 where it is kept.
        img_request, txt_request: ``[T_img]``, ``[T_txt]``, slot of a row.
        img_offset: ``[T_img]``, row of the example that an image row is.
        txt_offset: ``[T_txt]``, token of the text that a text row is, after the template's head.
        txt_last: ``[N]``, a slot's last text row.
        img_weight: ``[T_img]``, of a row in the loss: smaller in larger images, 0 in the filling.
        img_to_joint, txt_to_joint: Place of a row in joint order.
        from_streams: ``[T]``, which row of both streams, text before image, stands at a place in joint order.
        cos, sin: ``[T, D/2]``, rotary angles in joint order.
        attention: Bounds of the sequences in joint order.
    """

    lowest: Tensor
    count: Tensor
    empty_row: Tensor
    img_request: Tensor
    txt_request: Tensor
    img_offset: Tensor
    txt_offset: Tensor
    txt_last: Tensor
    img_weight: Tensor
    img_to_joint: Tensor
    txt_to_joint: Tensor
    from_streams: Tensor
    cos: Tensor
    sin: Tensor
    attention: AttentionMetadata

    def tensors(self) -> dict[str, Tensor]:
        """All but the bounds."""
        return {own.name: getattr(self, own.name) for own in fields(self) if own.name != "attention"}

    def mean_over_tokens(self, values: Tensor) -> Tensor:
        """The mean of ``[T_img]`` by ``img_weight``."""
        return (values * self.img_weight).sum() / self.img_weight.sum()

    @property
    def bounds(self) -> Tensor:
        """``[N + fillers + 1]``, starts of the sequences in joint order."""
        return self.attention.queries.cu_seqlens


class _Shapes:
    """As much of `models.base.DiffusionModel` as packing asks for."""

    def __init__(self, transformer: Any) -> None:
        self.device = torch.device("cpu")
        self._pos_embed = transformer.pos_embed

    def prepare_sequence(self, request: Request, prompt: PromptEmbeds) -> SequenceInputs:
        grid = [(1, request.height // PATCH_PIXELS, request.width // PATCH_PIXELS)]
        img, txt = self._pos_embed(grid, max_txt_seq_len=len(prompt.stream), device=self.device)
        angles = torch.cat((txt, img))
        return SequenceInputs(rotary=RotaryTable(angles.real.contiguous(), angles.imag.contiguous()))

    def prepare_step(self, timesteps: Sequence[float], _later: Iterable[float]) -> Tensor:
        return torch.tensor(timesteps)


def lay_out(slots: Sequence[Slot], transformer: Any, num_img: int, num_txt: int, device: Any) -> Layout:
    """Packs ``slots`` and fills the streams up to ``num_img`` and ``num_txt`` rows."""
    packed = PackedBatch.build([_prepared(slot) for slot in slots], _Shapes(transformer)).model_input
    assert packed.rotary is not None
    own_img, own_txt = packed.img_sequence.shape[0], packed.txt_sequence.shape[0]
    spare_img, spare_txt = num_img - own_img, num_txt - own_txt
    assert min(spare_img, spare_txt) >= 0, (own_img, own_txt)
    first = own_img + own_txt  # of the filling in joint order
    filling = torch.arange(first, num_img + num_txt)
    lengths = [part.numel() for part in filling.tensor_split(NUM_FILLERS)]
    bounds = SequenceBounds.from_seqlens([*packed.seqlens, *filter(None, lengths)], device)
    assert bounds.max_seqlen <= MAX_SEQLEN
    bounds = replace(bounds, max_seqlen=MAX_SEQLEN)  # the same in all layouts
    angles = torch.ones(filling.numel(), packed.rotary.cos.shape[1])
    img_to_joint = torch.cat((packed.img_to_joint, filling[:spare_img]))
    txt_to_joint = torch.cat((packed.txt_to_joint, filling[spare_img:]))
    weights = torch.tensor([slot.num_image**-0.5 for slot in slots])
    layout = Layout(
        lowest=torch.tensor([slot.lowest for slot in slots]),
        count=torch.tensor([slot.count for slot in slots]),
        empty_row=torch.tensor([-1 if slot.empty_row is None else slot.empty_row for slot in slots]),
        img_request=_filled(packed.img_sequence, spare_img),
        txt_request=_filled(packed.txt_sequence, spare_txt),
        img_offset=_filled(_offsets([slot.num_image for slot in slots]), spare_img),
        txt_offset=_filled(_offsets([slot.num_text for slot in slots]), spare_txt),
        txt_last=torch.tensor([slot.num_text for slot in slots]).cumsum(0) - 1,
        img_weight=_filled(weights[packed.img_sequence], spare_img),
        img_to_joint=img_to_joint,
        txt_to_joint=txt_to_joint,
        from_streams=torch.cat((txt_to_joint, img_to_joint)).argsort(),
        cos=torch.cat((packed.rotary.cos, angles)),
        sin=torch.cat((packed.rotary.sin, 0 * angles)),
        attention=AttentionMetadata(bounds, bounds),
    )
    for name, tensor in layout.tensors().items():
        setattr(layout, name, tensor.to(device))
    return layout


def _prepared(slot: Slot) -> PreparedRequest:
    height, width = slot.size
    request = Request(
        request_id="",
        prompt="",
        height=height,
        width=width,
        num_inference_steps=1,
        true_cfg_scale=1.0,
        seed=0,
    )
    return PreparedRequest(
        request=request,
        prompt_embeds=PromptEmbeds(torch.empty(slot.num_text, 1)),
        negative_embeds=None,
        sigmas=torch.tensor([1.0, 0.0]),
        timesteps=torch.tensor([1000.0]),
        latents=torch.empty(slot.num_image, 1),
    )


def _filled(values: Tensor, spare: int) -> Tensor:
    return torch.cat((values, values.new_zeros(spare)))


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])
