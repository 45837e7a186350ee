"""Captions of scenes: several ways to say what is there, all of them true."""

from __future__ import annotations

import hashlib
import random

from .scenes import Background, Scene, Thing

PLURALS = {"cross": "crosses"}
NUMBERS = {2: "two", 3: "three"}
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
LONG = {"left of": "to the left of", "right of": "to the right of", "above": "above", "below": "below"}
BESIDE = {"left of": "on its left", "right of": "on its right", "above": "above it", "below": "below it"}

# The first thing is `relation` the second; the second is `opposite` the first.
PAIRS = (
    "{first} {relation} {second}",
    "{first} {long} {second}",
    "{second} {opposite} {first}",
    "{second} with {first} {beside}",
)
PAIR_SENTENCES = (
    "{first} is {long} {second}",
    "{second} is {long_opposite} {first}",
    "{long} {second} there is {first}",
)
OPENINGS = ("", "", "a picture of ", "an image of ", "a drawing of ")

PLACES = {
    ("left", "top"): ("in the top left corner", "at the top left"),
    ("right", "top"): ("in the top right corner", "at the top right"),
    ("left", "bottom"): ("in the bottom left corner", "at the bottom left"),
    ("right", "bottom"): ("in the bottom right corner", "at the bottom right"),
    ("center", "top"): ("at the top",),
    ("center", "bottom"): ("at the bottom",),
    ("left", "center"): ("on the left", "at the left"),
    ("right", "center"): ("on the right", "at the right"),
    ("center", "center"): ("in the center", "in the middle"),
}
HELD_OUT_OF = 50  # one caption in so many is kept from training


def caption(scene: Scene, rng: random.Random, *, with_colour: bool = True) -> str:
    """One of many true captions of ``scene``.

    Without colour, "two stars" may be of any, and a negative prompt can keep one away; only where all things
    are of one kind.

    Always named: every thing with its colour and shape, how many there are, a size that is not medium
    and the relation, if there is one. The background is named in about half, the place of a single
    thing in about half of those that are in a place with a name.
    """
    is_sentence = rng.random() < 0.3
    if scene.relation:
        text = _pair(scene, rng, is_sentence)
    else:
        text = _group(scene, rng, is_sentence, with_colour=with_colour)
    if rng.random() < 0.5:
        behind = _behind(scene.background, rng)
        text = f"{text} {behind}" if rng.random() < 0.8 else f"{behind}, {text}"
    return f"{text[0].upper()}{text[1:]}." if rng.random() < 0.25 else text


def is_held_out(text: str) -> bool:
    """Whether ``text`` is one of the about 2 % of captions that no training may see: a hash of the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) % HELD_OUT_OF == 0


def place(scene: Scene) -> tuple[str, str] | None:
    """The column and row of a lone thing where both are plain to see, such as ``("left", "top")``."""
    if len(scene.things) != 1:
        return None
    thing = scene.things[0]
    column = _third(thing.x / scene.width, "left", "right")
    row = _third(thing.y / scene.height, "top", "bottom")
    return (column, row) if column and row else None


def _third(share: float, low: str, high: str) -> str | None:
    if abs(share - 0.5) <= 0.06:
        return "center"
    return low if share < 0.36 else high if share > 0.64 else None


def _group(scene: Scene, rng: random.Random, is_sentence: bool, *, with_colour: bool) -> str:
    """Such as "two small stars and a heart": things of one colour and shape are counted."""
    counts: dict[str, list[Thing]] = {}
    for thing in scene.things:
        counts.setdefault(f"{thing.colour} {thing.shape}", []).append(thing)
    with_article = is_sentence or rng.random() < 0.8
    parts = [_noun(things, with_article, with_colour or len(counts) > 1) for things in counts.values()]
    rng.shuffle(parts)
    text = " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else parts[0]
    where = place(scene)
    if where and rng.random() < 0.5:
        text = f"{text} {rng.choice(PLACES[where])}"
    if is_sentence:
        return f"there {'is' if text.startswith(('a ', 'an ')) else 'are'} {text}"
    return rng.choice(OPENINGS) + text


def _pair(scene: Scene, rng: random.Random, is_sentence: bool) -> str:
    """Two things and the relation, said from either side."""
    relation = scene.relation
    assert relation is not None
    with_article = is_sentence or rng.random() < 0.8
    first, second = (_noun([thing], with_article) for thing in scene.things)
    opposite = OPPOSITE[relation]
    text = rng.choice(PAIR_SENTENCES if is_sentence else PAIRS).format(
        first=first,
        second=second,
        relation=relation,
        long=LONG[relation],
        opposite=opposite,
        long_opposite=LONG[opposite],
        beside=BESIDE[relation],
    )
    return text if is_sentence else rng.choice(OPENINGS) + text


def _noun(things: list[Thing], with_article: bool, with_colour: bool = True) -> str:
    """Such as "a large red circle", "red circle", "two small stars"."""
    shape, colour, size = things[0].shape, things[0].colour, things[0].size
    adjectives = ("" if size == "medium" else size, colour if with_colour else "")
    plural = PLURALS.get(shape, shape + "s")
    words = " ".join(filter(None, (*adjectives, plural if len(things) > 1 else shape)))
    if len(things) > 1:
        return f"{NUMBERS[len(things)]} {words}"
    article = ("an " if words.startswith("orange") else "a ") if with_article else ""
    return f"{article}{words}"


def _behind(background: Background, rng: random.Random) -> str:
    tone, *others = background.tones
    if background.kind == "plain":
        return rng.choice(("on a {} background", "on {}", "against a {} background")).format(tone)
    if background.kind == "striped":
        ways = ("on a {} and {} striped background", "on {} and {} stripes", "on a striped background")
    else:
        ways = ("on a background fading from {} to {}", "on a {} to {} gradient", "on a gradient background")
    return rng.choice(ways).format(tone, *others)
