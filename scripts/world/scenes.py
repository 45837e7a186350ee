"""Scenes that a caption can describe and a scorer can read: a few shapes on a soft background.

Lengths are in units of the picture's shorter side, x to the right, y downward, so one scene is the
same picture at 64 and at 256 pixels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "diamond")

# At least 95 apart in RGB, so that noise and slightly wrong colours cannot turn one into another.
COLOURS = {
    "red": (220, 30, 35),
    "orange": (250, 125, 15),
    "yellow": (255, 225, 30),
    "green": (35, 150, 60),
    "cyan": (30, 205, 215),
    "blue": (35, 70, 215),
    "purple": (140, 35, 180),
    "pink": (245, 80, 165),
    "brown": (125, 75, 35),
    "black": (20, 20, 20),
    "white": (255, 255, 255),
    "gray": (120, 120, 120),
}

# Backgrounds: these, and every mix of two of them, are at least 75 away from every colour above.
TONES = {
    "light gray": (205, 205, 205),
    "pale blue": (180, 205, 240),
    "pale green": (185, 225, 190),
    "pale yellow": (245, 235, 165),
    "pale pink": (240, 190, 200),
    "pale purple": (205, 175, 235),
    "beige": (230, 200, 160),
}

RADII = {"small": 0.13, "medium": 0.175, "large": 0.22}  # a small thing spans 17 of 64 pixels
SIZES = tuple(RADII)

# Where the first thing lies, seen from the second: a unit step (x, y).
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}

COUNTS = (5, 3, 2)  # of scenes without a relation, so many have one, two and three things
DIRECTIONS = ("horizontal", "vertical", "diagonal")
MARGIN = 0.02  # to the picture's edge
GAP = 0.06  # between the boxes of two things: 4 of 64 pixels
LEAN = 0.35  # of a pair's distance along the stated axis: the most that it may be apart across it


@dataclass(frozen=True, slots=True)
class Thing:
    """One shape; ``x``, ``y`` is the middle of its box."""

    shape: str
    colour: str
    size: str
    x: float
    y: float

    @property
    def radius(self) -> float:
        """Half the side of the box that the shape fits in."""
        return RADII[self.size]


@dataclass(frozen=True, slots=True)
class Background:
    """One soft tone, or two as stripes or as a gradient from the first to the second.

    ``direction`` is the direction in which the tone changes: to the right, downward or both;
    ``period`` and ``phase`` (a share of the period) are the stripes'.
    """

    kind: str  # plain | striped | gradient
    tones: tuple[str, ...]
    direction: str = "horizontal"
    period: float = 0.25
    phase: float = 0.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What is in a picture of ``width`` by ``height`` shorter sides: the smaller of both is 1.

    With a ``relation`` there are two things, and the first is (left of | right of | above | below) the
    second. Things that share colour and shape share their size too.
    """

    things: tuple[Thing, ...]
    background: Background
    relation: str | None
    width: float
    height: float


Kind = tuple[str, str, str]  # shape, colour, size


def sample_scene(
    rng: random.Random, height: int, width: int, *, related: float = 0.25, counts: Sequence[int] = COUNTS
) -> Scene:
    """Draw a scene for a picture of ``height`` by ``width`` pixels.

    ``related`` is the probability of two things in a stated relation; the others hold one to three
    things, as often as ``counts`` weighs them, some of one kind, in free places.
    """
    shorter = min(height, width)
    span = (width / shorter, height / shorter)
    relation = rng.choice(tuple(RELATIONS)) if rng.random() < related else None
    if relation:
        kinds = _different_kinds(rng, 2)
        places = _related_places(rng, kinds, relation, span)
    else:
        kinds, places = _free(rng, span, counts)
    things = tuple(Thing(*kind, *place) for kind, place in zip(kinds, places, strict=True))
    return Scene(things, _background(rng), relation, *span)


def _different_kinds(rng: random.Random, count: int) -> list[Kind]:
    """Kinds that differ in colour or in shape: mostly in both, sometimes in one only."""
    kinds: dict[tuple[str, str], Kind] = {}
    shape, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
    while len(kinds) < count:
        kinds.setdefault((shape, colour), (shape, colour, rng.choice(SIZES)))
        keep = rng.random()
        shape = shape if keep < 0.15 else rng.choice(SHAPES)
        colour = colour if keep > 0.85 else rng.choice(tuple(COLOURS))
    return list(kinds.values())


def _free(
    rng: random.Random, span: tuple[float, float], counts: Sequence[int]
) -> tuple[list[Kind], list[tuple[float, float]]]:
    """One to three things, with equal ones among them at times, and where they are."""
    count = rng.choices((1, 2, 3), counts)[0]
    while True:
        kinds = _different_kinds(rng, rng.choice((1, count, count)))
        kinds = (kinds + kinds[:1] * 2)[:count] if len(kinds) == 1 else kinds
        if count == 3 and rng.random() < 0.3:
            kinds[1] = kinds[0]
        if count == 1 and rng.random() < 0.5:
            return kinds, [_named_place(rng, kinds[0], span)]
        places = _free_places(rng, kinds, span)
        if places:
            return kinds, places


def _named_place(rng: random.Random, kind: Kind, span: tuple[float, float]) -> tuple[float, float]:
    """A place that has a name: a corner, the middle of a side, the centre, all slightly off."""
    edge = MARGIN + RADII[kind[2]]
    x, y = (
        rng.choice((edge + slip, length / 2 + slip - 0.03, length - edge - slip))
        for length, slip in ((length, rng.uniform(0, 0.06)) for length in span)
    )
    return x, y


def _free_places(
    rng: random.Random, kinds: list[Kind], span: tuple[float, float]
) -> list[tuple[float, float]] | None:
    """Places whose boxes are apart, or None when twenty attempts found no room for a thing."""
    taken: list[tuple[float, float, float]] = []
    for _, _, size in kinds:
        radius = RADII[size]
        edge = MARGIN + radius
        for _ in range(20):
            x, y = rng.uniform(edge, span[0] - edge), rng.uniform(edge, span[1] - edge)
            if all(max(abs(x - u), abs(y - v)) >= radius + r + GAP for u, v, r in taken):
                taken.append((x, y, radius))
                break
        else:
            return None
    return [(x, y) for x, y, _ in taken]


def _related_places(
    rng: random.Random, kinds: list[Kind], relation: str, span: tuple[float, float]
) -> list[tuple[float, float]]:
    """Places of a pair: boxes apart along the stated axis, and much nearer to each other across it."""
    step = RELATIONS[relation]
    axis = 0 if step[0] else 1
    radii = [RADII[size] for _, _, size in kinds]
    ahead, behind = (0, 1) if sum(step) < 0 else (1, 0)  # ahead: the one with the smaller coordinate
    slack = span[axis] - 2 * MARGIN - GAP - 2 * sum(radii)
    assert slack > 0, (kinds, span)
    near, far = sorted((rng.uniform(0, slack), rng.uniform(0, slack)))
    along = {
        ahead: MARGIN + radii[ahead] + near,
        behind: MARGIN + 2 * radii[ahead] + GAP + far + radii[behind],
    }
    lean = LEAN * (along[behind] - along[ahead])
    low, high = MARGIN + max(radii), span[1 - axis] - MARGIN - max(radii)
    first = rng.uniform(low, high)
    across = (first, rng.uniform(max(low, first - lean), min(high, first + lean)))
    return [(along[i], across[i]) if axis == 0 else (across[i], along[i]) for i in (0, 1)]


def _background(rng: random.Random) -> Background:
    kind = rng.choices(("plain", "striped", "gradient"), (2, 1, 1))[0]
    if kind == "plain":
        return Background(kind, (rng.choice(tuple(TONES)),))
    tones = tuple(rng.sample(tuple(TONES), 2))
    return Background(kind, tones, rng.choice(DIRECTIONS), rng.uniform(0.25, 0.5), rng.random())
