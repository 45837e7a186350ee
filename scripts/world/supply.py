"""Scenes and captions for training, made in worker processes ahead of need.

What a step gets follows from the seed and the step's number alone, whatever the number of workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from world.captions import caption, is_held_out
from world.scenes import Scene, sample_scene

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True, slots=True)
class Example:
    """A scene with one of its captions."""

    scene: Scene
    caption: str


def sample_example(rng: random.Random, size: Size, *, related: float, held_out: bool = False) -> Example:
    """A scene of ``size`` whose caption is, or is not, held out from training."""
    while True:
        scene = sample_scene(rng, *size, related=related)
        text = caption(scene, rng)
        if is_held_out(text) == held_out:
            return Example(scene, text)


def sample_examples(
    key: str, size: Size, count: int, *, related: float, held_out: bool = False
) -> list[Example]:
    """``count`` examples of ``size`` that follow from ``key`` alone."""
    rng = random.Random(key)
    return [sample_example(rng, size, related=related, held_out=held_out) for _ in range(count)]


def examples_ahead(
    keys: Iterator[tuple[str, Size, int]] | Sequence[tuple[str, Size, int]],
    num_workers: int,
    *,
    related: float,
) -> Iterator[list[Example]]:
    """The examples of every key in turn, made by ``num_workers`` processes; by this one when 0."""
    if num_workers == 0:
        for key, size, count in keys:
            yield sample_examples(key, size, count, related=related)
        return
    with get_context("spawn").Pool(num_workers) as pool:
        yield from pool.imap(partial(_of_key, related=related), keys, chunksize=4)


def _of_key(task: tuple[str, Size, int], *, related: float) -> list[Example]:
    return sample_examples(*task, related=related)
