"""Encoded pictures and tokenized captions of many examples on the device, from which every pack is filled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from offline_diffusion.models.tiny import TEMPLATE_PREFIX
from world.drawing import draw
from world.hints import UNTOLD, Hints, pair_classes, token_classes
from world.layout import Layout, Slot
from world.recipe import SIZES
from world.supply import Example, Size, sample_examples
from world.vae import encode, to_tokens

CHUNK = 256
"""Examples sampled, drawn and encoded together."""

DROPOUT = 0.1
"""Share of slots whose caption is left out, for guidance."""

EMPTY = ("", " ")
"""What stands in its place: both are customary as negative prompts."""


@dataclass(slots=True)
class Pool:
    """E examples in the order of size and length.

    Args:
        tokens: ``[P, C]`` bfloat16, latents of all examples, normalized, one after the other.
        starts: ``[E]``, first of an example's rows in ``tokens``.
        hints: Of all examples, ``[E, 7]`` and, as bytes, ``[P, 2]``.
        texts: ``[E + 2, L]``, token ids with the template; the last two rows are ``EMPTY``.
        sizes: Of every example.
        num_text: ``[E + 2]`` tokens of the text stream, on the host.
    """

    tokens: Tensor
    starts: Tensor
    hints: Hints
    texts: Tensor
    sizes: list[Size]
    num_text: list[int]

    def fill(self, layout: Layout, generator: torch.Generator) -> tuple[Tensor, Tensor, Hints]:
        """Random examples that fit ``layout``: input ids ``[N, L]``, clean latents ``[T_img, C]``, and hints.

        Of a pair nothing is told where its caption is left out.
        """
        draws = torch.rand(layout.count.shape[0], generator=generator, device=self.tokens.device)
        example = layout.lowest + (draws * layout.count).long()
        rows = self.starts[example].index_select(0, layout.img_request) + layout.img_offset
        is_told = layout.empty_row < 0
        input_ids = self.texts[torch.where(is_told, example, layout.empty_row)]
        pair = torch.where(is_told.unsqueeze(1), self.hints.pair[example], UNTOLD)
        hints = Hints(pair, self.hints.token.index_select(0, rows).long())
        return input_ids, self.tokens.index_select(0, rows).float(), hints

    def slots(self) -> list[Slot]:
        """One slot for every example: which others could stand in its place."""
        slots: list[Slot] = []
        for (size, num_text), group in groupby(zip(self.sizes, self.num_text, strict=False)):
            count = len(list(group))
            slots += [Slot(size, num_text, len(slots), count)] * count
        return slots

    def empty_slots(self) -> dict[Size, list[Slot]]:
        """For each size the slots whose caption is left out: any example of the size fits."""
        slots: dict[Size, list[Slot]] = {}
        lowest = 0
        for size, group in groupby(self.sizes):
            count = len(list(group))
            rows = range(len(self.sizes), len(self.sizes) + len(EMPTY))
            slots[size] = [Slot(size, self.num_text[row], lowest, count, row) for row in rows]
            lowest += count
        return slots


@torch.no_grad()
def make_pool(
    count: int,
    vae: Any,
    tokenizer: Any,
    device: torch.device,
    *,
    seed: int,
    related: float,
    counts: Sequence[int],
) -> Pool:
    """Samples, draws and encodes ``count`` examples; smaller pictures more often, by a root of their tokens.

    Args:
        vae: On ``device``, seeing one frame, with the latents' mean and deviation in its config.
    """
    sizes = random.Random(f"sizes/{seed}").choices(
        SIZES, [1 / (height * width) ** 0.5 for height, width in SIZES], k=-(count // -CHUNK)
    )
    latents: list[Tensor] = []
    kinds: list[Tensor] = []
    examples: list[Example] = []
    for index, size in enumerate(sizes):
        chunk = sample_examples(f"pool/{seed}/{index}", size, CHUNK, related=related, counts=counts)
        scenes = [example.scene for example in chunk]
        latents += _latents(vae, draw(scenes, *size, device=device)).unbind(0)
        kinds += token_classes(scenes, *size).byte().unbind(0)
        examples += chunk
    texts = [_with_template(example.caption) for example in examples] + [_with_template(e) for e in EMPTY]
    ids: list[list[int]] = tokenizer(texts)["input_ids"]
    num_head = len(tokenizer(TEMPLATE_PREFIX)["input_ids"])
    own_sizes = [size for size in sizes for _ in range(CHUNK)]
    order = sorted(range(len(examples)), key=lambda index: (own_sizes[index], len(ids[index])))
    rows = [latents[index] for index in order]
    starts = torch.tensor([0] + [len(row) for row in rows[:-1]]).cumsum(0)
    ids = [ids[index] for index in order] + ids[len(examples) :]
    return Pool(
        tokens=torch.cat(rows),
        starts=starts.to(device),
        hints=Hints(
            pair=torch.tensor([pair_classes(examples[index].scene) for index in order]).to(device),
            token=torch.cat([kinds[index] for index in order]).to(device),
        ),
        texts=_padded(ids).to(device),
        sizes=[own_sizes[index] for index in order],
        num_text=[len(own) - num_head for own in ids],
    )


def _latents(vae: Any, pictures: Tensor) -> Tensor:
    """``[B, S, C]`` bfloat16, normalized by the config."""
    with torch.autocast(pictures.device.type, torch.bfloat16):
        mean, _ = encode(vae, pictures)
    shift, scale = (
        torch.tensor(values, device=mean.device).view(1, -1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return to_tokens((mean - shift) / scale).bfloat16()


def _with_template(prompt: str) -> str:
    return f"{TEMPLATE_PREFIX}{prompt}<|im_end|>\n<|im_start|>assistant\n"


def _padded(ids: Sequence[Sequence[int]]) -> Tensor:
    texts = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.int64)
    for row, own in zip(texts, ids, strict=True):
        row[: len(own)] = torch.tensor(own)
    return texts
