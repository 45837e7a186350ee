"""Scenes with captions, for training and for measuring: what comes follows from a key alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from world.captions import caption, is_held_out
from world.scenes import Scene, sample_scene

Size = tuple[int, int]
"""Height and width in pixels."""


COLOURLESS = 0.06
"""Share of captions that leave the colour open, in training alone."""


@dataclass(frozen=True, slots=True)
class Example:
    """A scene with one of its captions."""

    scene: Scene
    caption: str


def sample_examples(
    key: str, size: Size, count: int, *, related: float, held_out: bool = False
) -> list[Example]:
    """``count`` examples of ``size`` whose captions are, or are not, held out from training.

    Args:
        key: All randomness follows from it.
        size: In pixels.
        count: How many.
        related: Probability of two things whose relation the caption states.
        held_out: Which captions.
    """
    rng = random.Random(f"{key}/{size}")
    examples: list[Example] = []
    while len(examples) < count:
        scene = sample_scene(rng, *size, related=related)
        text = caption(scene, rng, with_colour=held_out or rng.random() >= COLOURLESS)
        if is_held_out(text) == held_out:
            examples.append(Example(scene, text))
    return examples
