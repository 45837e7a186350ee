import dataclasses
import itertools
import random
from collections import Counter

import numpy as np
import pytest
from world.scenes import COLOURS, RELATIONS, SHAPES, SIZES, TONES, Scene, sample_scene

GRIDS = [(64, 64), (128, 128), (256, 256), (64, 128), (256, 128), (96, 160)]


def scenes(height: int, width: int, count: int = 500, related: float = 0.25, seed: int = 0) -> list[Scene]:
    rng = random.Random(seed)
    return [sample_scene(rng, height, width, related=related) for _ in range(count)]


def test_colours_are_apart_and_backgrounds_away_from_them():
    colours = np.array(list(COLOURS.values()), float)
    assert len(colours) == 12
    assert len(SHAPES) == 8
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colours, 2)) >= 95
    for first, last in itertools.combinations(np.array(list(TONES.values()), float), 2):
        assert np.linalg.norm(first - last) >= 32  # or stripes could not be seen
        blends = first + np.linspace(0, 1, 20)[:, None] * (last - first)
        assert np.linalg.norm(blends[:, None] - colours, axis=-1).min() >= 75


@pytest.mark.parametrize(("height", "width"), GRIDS)
def test_things_are_inside_and_apart(height, width):
    for scene in scenes(height, width):
        assert scene.width / scene.height == pytest.approx(width / height)
        assert min(scene.width, scene.height) == 1
        for thing in scene.things:
            assert thing.radius <= thing.x <= scene.width - thing.radius
            assert thing.radius <= thing.y <= scene.height - thing.radius
        for a, b in itertools.combinations(scene.things, 2):
            between = max(abs(a.x - b.x), abs(a.y - b.y)) - a.radius - b.radius
            assert between * min(height, width) > 3.8  # pixels between their boxes


@pytest.mark.parametrize(("height", "width"), GRIDS)
def test_a_relation_is_plain_to_see(height, width):
    seen = Counter()
    for scene in scenes(height, width, related=1):
        first, second = scene.things
        x, y = first.x - second.x, first.y - second.y
        seen[scene.relation] += 1
        along, across = (x, y) if scene.relation in ("left of", "right of") else (y, x)
        assert (along < 0) == (scene.relation in ("left of", "above"))
        assert abs(across) <= 0.35 * abs(along) + 1e-9
        assert abs(along) >= first.radius + second.radius
    assert set(seen) == set(RELATIONS)
    assert min(seen.values()) > 80


def test_truth_is_unambiguous():
    """Either things differ in colour or shape, or they are of one kind in every word of it."""
    for scene in scenes(64, 64, 2000):
        kinds = Counter((t.colour, t.shape) for t in scene.things)
        assert len({(t.colour, t.shape, t.size) for t in scene.things}) == len(kinds)
        assert scene.relation is None or len(kinds) == 2


def test_everything_turns_up():
    drawn = scenes(64, 64, 3000)
    things = [thing for scene in drawn for thing in scene.things]
    for values, names in (
        ([t.shape for t in things], SHAPES),
        ([t.colour for t in things], tuple(COLOURS)),
        ([t.size for t in things], SIZES),
        ([tone for s in drawn for tone in s.background.tones], tuple(TONES)),
    ):
        counts = Counter(values)
        assert set(counts) == set(names)
        assert min(counts.values()) > 0.5 * len(values) / len(names)
    assert 0.2 < np.mean([scene.relation is not None for scene in drawn]) < 0.3
    kinds = Counter((len(s.things), len({(t.colour, t.shape) for t in s.things})) for s in drawn)
    assert set(kinds) == {(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)}
    assert min(kinds.values()) > 30
    assert {s.background.kind for s in drawn} == {"plain", "striped", "gradient"}


def test_seeds_make_scenes():
    assert scenes(128, 64, 50, seed=3) == scenes(128, 64, 50, seed=3)
    assert scenes(128, 64, 50, seed=3) != scenes(128, 64, 50, seed=4)
    # The sampler knows no pixels: only the aspect ratio counts.
    assert scenes(64, 128, 50) == scenes(128, 256, 50)


def test_scenes_do_not_change():
    scene = scenes(64, 64, 1)[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        scene.relation = "above"
