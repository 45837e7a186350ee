"""The scenes' truth for the readers, against pictures and captions."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from world.drawing import draw
from world.hints import (
    PAIR_CLASSES,
    TOKEN_CLASSES,
    UNTOLD,
    Hints,
    Readers,
    pair_classes,
    token_classes,
)
from world.layout import Slot, lay_out
from world.modules import make_modules
from world.scenes import COLOURS, SHAPES, SIZES, Background, Scene, Thing, sample_scene

PLAIN = Background("plain", ("beige",))
CIRCLE = Thing("circle", "red", "large", 0.25, 0.25)
STAR = Thing("star", "blue", "small", 0.75, 0.3)
HEART = Thing("heart", "green", "medium", 0.3, 0.8)


def names(classes: list[int]) -> list[str]:
    axis, *kinds = classes
    words = [tuple(names)[own] for names, own in zip((SHAPES, COLOURS, SIZES) * 2, kinds, strict=True)]
    return [("across", "down")[axis], *words]


@pytest.mark.parametrize(
    ("things", "relation", "expected"),
    [
        ((CIRCLE, STAR), "left of", ["across", "circle", "red", "large", "star", "blue", "small"]),
        ((STAR, CIRCLE), "right of", ["across", "circle", "red", "large", "star", "blue", "small"]),
        ((CIRCLE, HEART), "above", ["down", "circle", "red", "large", "heart", "green", "medium"]),
        ((HEART, CIRCLE), "below", ["down", "circle", "red", "large", "heart", "green", "medium"]),
    ],
)
def test_a_pair_is_told_in_the_order_of_the_picture(things, relation, expected):
    assert names(pair_classes(Scene(things, PLAIN, relation, 1, 1))) == expected


def test_what_no_caption_states_is_not_told():
    assert pair_classes(Scene((CIRCLE, STAR), PLAIN, None, 1, 1)) == [UNTOLD] * len(PAIR_CLASSES)


def test_tokens_of_a_known_scene():
    scenes = [Scene((CIRCLE, STAR), PLAIN, None, 1, 1), Scene((HEART,), PLAIN, None, 1, 1)]
    shapes, colours = token_classes(scenes, 64, 64).view(2, 4, 4, 2).unbind(3)
    circle, star, heart = (1 + SHAPES.index(name) for name in ("circle", "star", "heart"))
    assert shapes.tolist() == [
        # the circle's box: 0.03 to 0.47; the star's: 0.62 to 0.88 across and 0.17 to 0.43 down,
        # of which the tokens of the first row have less than a fifth
        [[circle, circle, 0, 0], [circle, circle, star, star], [0] * 4, [0] * 4],
        [[0] * 4, [0] * 4, [heart, heart, 0, 0], [heart, heart, 0, 0]],
    ]
    red, blue = (1 + tuple(COLOURS).index(name) for name in ("red", "blue"))
    assert colours[0, :2].flatten().tolist() == [red, red, 0, 0, red, red, blue, blue]


@pytest.mark.parametrize(("height", "width"), [(64, 64), (128, 256), (144, 96)])
def test_tokens_say_what_the_picture_shows(height, width):
    """Wherever most of a token is of a thing's colour, that is what it is said to be."""
    rng = random.Random(4)
    scenes = [sample_scene(rng, height, width) for _ in range(120)]
    pictures = draw(scenes, height, width) * 255
    palette = torch.tensor(list(COLOURS.values()), dtype=torch.float32).view(-1, 3, 1, 1)
    told = token_classes(scenes, height, width)[..., 1]
    num_checked = 0
    for picture, own in zip(pictures, told, strict=True):
        near = ((picture - palette).square().sum(1).sqrt() < 8).float()
        shares = F.avg_pool2d(near, 16).flatten(1)
        most = shares.max(dim=0)
        sure = most.values > 0.5
        assert (own[sure] == 1 + most.indices[sure]).all()
        num_checked += int(sure.sum())
    assert num_checked > 80


def test_readers_count_what_is_told_and_no_filling():
    _, _, transformer = make_modules(0)
    slots = [Slot((64, 64), 9, 0, 1), Slot((64, 128), 14, 1, 1), Slot((64, 64), 5, 2, 1)]
    layout = lay_out(slots, transformer, 80, 40, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    readers = Readers(8, 12)
    text, image = torch.randn(3, 8, generator=generator), torch.randn(80, 12, generator=generator)
    pair = torch.tensor([[1, 2, 3, 0, 4, 5, 2], [UNTOLD] * 7, [0, 7, 11, 2, 0, 0, 1]])
    token = torch.stack([torch.randint(0, n, (80,), generator=generator) for n in TOKEN_CLASSES], dim=1)

    found = readers(text, image, Hints(pair, token), layout)

    def error(logits: torch.Tensor, own: torch.Tensor, sizes: tuple[int, ...]) -> float:
        parts = zip(logits.split(sizes), own, strict=True)
        return sum(float((part.logsumexp(0) - part[answer]).detach()) for part, answer in parts)

    answers = readers.text(text)
    expected = (error(answers[0], pair[0], PAIR_CLASSES) + error(answers[2], pair[2], PAIR_CLASSES)) / 2
    assert found[0].item() == pytest.approx(expected, rel=1e-5)
    centred = image - image.mean(1, keepdim=True)
    seen = readers.image(centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt())
    weights = [16**-0.5] * 16 + [32**-0.5] * 32 + [16**-0.5] * 16
    errors = [error(own, answer, TOKEN_CLASSES) for own, answer in zip(seen, token, strict=True)]
    expected = sum(w * e for w, e in zip(weights, errors, strict=False)) / sum(weights)
    assert found[1].item() == pytest.approx(expected, rel=1e-5)
