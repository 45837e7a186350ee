"""Scenes with captions, for training and for measuring: what comes follows from a key alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from world.captions import caption, is_held_out
from world.scenes import COUNTS, Scene, sample_scene

Size = tuple[int, int]
"""Height and width in pixels."""


COLOURLESS = 0.06
"""Share of captions that leave the colour open, in training alone."""


@dataclass(frozen=True, slots=True)
class Example:
    """A scene with one of its captions."""

    scene: Scene
    caption: str


def sample_example(
    rng: random.Random,
    size: Size,
    *,
    related: float,
    counts: Sequence[int] = COUNTS,
    held_out: bool = False,
) -> Example:
    """One example of ``size`` whose caption is, or is not, held out from training.

    Args:
        rng: All randomness.
        size: In pixels.
        related: Probability of two things whose relation the caption states.
        counts: How often the others have one, two and three things.
        held_out: Which captions.
    """
    while True:
        scene = sample_scene(rng, *size, related=related, counts=counts)
        text = caption(scene, rng, with_colour=held_out or rng.random() >= COLOURLESS)
        if is_held_out(text) == held_out:
            return Example(scene, text)


def sample_examples(
    key: str,
    size: Size,
    count: int,
    *,
    related: float,
    counts: Sequence[int] = COUNTS,
    held_out: bool = False,
) -> list[Example]:
    """``count`` of them that follow from ``key`` and ``size`` alone."""
    rng = random.Random(f"{key}/{size}")
    return [
        sample_example(rng, size, related=related, counts=counts, held_out=held_out) for _ in range(count)
    ]
