"""What the scene's truth adds to a training: two linear readers that learn to name it, then are thrown away.

Nearly all of flow matching's error comes from noise and from where things happen to lie, so it teaches slowly
which word belongs to which thing. From the text encoder's last token a reader tells the pair that a caption
relates, in the order of the picture; from the middle of the transformer another tells, for each image token,
what stands there. Their errors count less and less, and in the end not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from world.layout import PATCH_PIXELS, Layout
from world.scenes import COLOURS, RELATIONS, SHAPES, SIZES, Scene, Thing

WEIGHT = 0.1
"""Of either reader's error beside that of flow matching, at first."""

NUM_SHAPES, NUM_COLOURS = len(SHAPES), len(COLOURS)
PAIR_CLASSES = (2, *(NUM_SHAPES, NUM_COLOURS, len(SIZES)) * 2)
"""The axis, then shape, colour and size of the thing ahead, left or above, and of the other."""

TOKEN_CLASSES = (1 + NUM_SHAPES, 1 + NUM_COLOURS)
"""Shape and colour at a token; first that there is none."""

UNTOLD = -100
"""In the place of a class: nothing is to be read there."""

LEAST_SHARE = 0.2
"""Of a token that a thing's box must cover to stand there: a quarter of the smallest thing at 64 pixels."""


@dataclass(slots=True)
class Hints:
    """Truth of a pack.

    Args:
        pair: ``[N, 7]``, classes in the order of ``PAIR_CLASSES``; ``UNTOLD`` where no relation is stated.
        token: ``[T_img, 2]``, classes in the order of ``TOKEN_CLASSES``.
    """

    pair: Tensor
    token: Tensor


class Readers(nn.Module):
    """Both, one linear layer each.

    Args:
        text_dim, image_dim: Widths of what they read.
    """

    def __init__(self, text_dim: int, image_dim: int) -> None:
        super().__init__()
        self.text = nn.Linear(text_dim, sum(PAIR_CLASSES))
        self.image = nn.Linear(image_dim, sum(TOKEN_CLASSES))

    def forward(self, text: Tensor, image: Tensor, hints: Hints, layout: Layout) -> Tensor:
        """Errors of the text's and the image's reader, ``[2]``, not weighed.

        Args:
            text: ``[N, E]``, the text encoder's last tokens.
            image: ``[T_img, H]``, from the middle of the transformer.
        """
        by_request = _errors(self.text(text), hints.pair, PAIR_CLASSES)
        told = (hints.pair[:, 0] != UNTOLD).sum().clamp(min=1)
        by_token = _errors(self.image(F.layer_norm(image, image.shape[-1:])), hints.token, TOKEN_CLASSES)
        return torch.stack((by_request.sum() / told, layout.mean_over_tokens(by_token)))


def _errors(logits: Tensor, classes: Tensor, sizes: Sequence[int]) -> Tensor:
    """Cross entropy ``[R]``, added over the questions; 0 where untold."""
    parts = zip(logits.float().split(sizes, dim=1), classes.unbind(1), strict=True)
    errors = [F.cross_entropy(part, own, ignore_index=UNTOLD, reduction="none") for part, own in parts]
    return torch.stack(errors).sum(dim=0)


def pair_classes(scene: Scene) -> list[int]:
    """A row of `Hints.pair`."""
    if scene.relation is None:
        return [UNTOLD] * len(PAIR_CLASSES)
    step = RELATIONS[scene.relation]
    ahead, behind = scene.things if sum(step) < 0 else scene.things[::-1]
    return [0 if step[0] else 1, *_kind(ahead), *_kind(behind)]


def _kind(thing: Thing) -> tuple[int, int, int]:
    return SHAPES.index(thing.shape), tuple(COLOURS).index(thing.colour), SIZES.index(thing.size)


def token_classes(scenes: Sequence[Scene], height: int, width: int) -> Tensor:
    """``[B, rows · columns, 2]``, rows of `Hints.token`: the thing whose box covers most of each token.

    Args:
        scenes: Of pictures of one size.
        height, width: In pixels.
    """
    slots = max(len(scene.things) for scene in scenes)
    nothing = ((0, 0), (0.0, 0.0, 0.0))  # it covers nothing
    things = [
        ([(_kind(t), (t.x, t.y, t.radius)) for t in s.things] + [nothing] * slots)[:slots] for s in scenes
    ]
    places = torch.tensor([[place for _, place in own] for own in things])  # [B, slots, 3]
    kinds = torch.tensor([[(0, 0), *((1 + k[0], 1 + k[1]) for k, _ in own)] for own in things])
    side = PATCH_PIXELS / min(height, width)
    across, down = (
        _overlap(places[..., axis], places[..., 2], length // PATCH_PIXELS, side)
        for axis, length in ((0, width), (1, height))
    )
    shares = down.unsqueeze(3) * across.unsqueeze(2) / side**2  # [B, slots, rows, columns]
    most = shares.flatten(2).max(dim=1)
    chosen = torch.where(most.values >= LEAST_SHARE, 1 + most.indices, 0)
    return kinds.gather(1, chosen.unsqueeze(2).expand(-1, -1, 2))


def _overlap(middles: Tensor, radii: Tensor, count: int, side: float) -> Tensor:
    """``[B, slots, count]``: how much of each of ``count`` tokens in a row lies within a box."""
    starts = torch.arange(count) * side
    low, high = (middles - radii).unsqueeze(2), (middles + radii).unsqueeze(2)
    return (torch.minimum(high, starts + side) - torch.maximum(low, starts)).clamp(min=0)
