import math
import random

import numpy as np
import pytest
import torch
from world.drawing import as_bytes, coverage, draw
from world.scenes import COLOURS, SHAPES, TONES, Background, Scene, Thing, sample_scene

# Areas of shapes of radius 1, by school geometry from the numbers in the drawing's head.
AREAS = {
    "circle": math.pi,
    "square": 1.72**2,
    "triangle": 1.75 * 2 / 2,
    "star": 10 * 0.42 * math.sin(math.pi / 5) / 2,
    "ring": math.pi * (1 - 0.5**2),
    "cross": 2 * (2 * 0.68) - 0.68**2,
    "heart": 2 * 0.81**2 + math.pi * (0.81 / math.sqrt(2)) ** 2,
    "diamond": 2.0,
}


def corners(shape: str) -> list[tuple[float, float]]:
    """The polygon of a shape of radius 1, y downward."""
    w = 0.34
    half_cross = [(-w, -1), (w, -1), (w, -w), (1, -w), (1, w), (w, w)]
    turns = [(math.tau * i / 10, 1 if i % 2 == 0 else 0.42) for i in range(10)]
    return {
        "square": [(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)],
        "triangle": [(0, -0.95), (1, 0.8), (-1, 0.8)],
        "star": [(r * math.sin(a), -r * math.cos(a)) for a, r in turns],
        "cross": [(s * x, s * y) for s in (1, -1) for x, y in half_cross],
        "diamond": [(0, -1), (1, 0), (0, 1), (-1, 0)],
        "heart": [(0, 0.92), (-0.81, 0.11), (0, -0.70), (0.81, 0.11)],
    }[shape]


def is_inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Even-odd rule over a polygon's edges, and plain inequalities for what is round."""
    if shape in ("circle", "ring"):
        squared = x**2 + y**2
        return (squared <= 1) & ((squared >= 0.25) | (shape == "circle"))
    inside = np.zeros(np.broadcast(x, y).shape, bool)
    points = corners(shape)
    for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1], strict=True):
        if y0 != y1:
            inside ^= ((y0 > y) != (y1 > y)) & (x < x0 + (y - y0) * (x1 - x0) / (y1 - y0))
    if shape == "heart":  # its sides' midpoints are the middles of the lobes
        for side in (-1, 1):
            inside |= (x - side * 0.405) ** 2 + (y + 0.295) ** 2 <= 0.81**2 / 2
    return inside


def test_every_shape_has_a_reference():
    assert set(AREAS) == set(SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("radius", "within"), [(8.3, 0.02), (21.7, 0.005)])
def test_coverage_is_the_area(shape, radius, within):
    """Only where a pixel holds more than one edge, at tips, is the distance of its middle not enough."""
    mask = coverage(shape, torch.tensor([[31.3, 29.8]]), torch.tensor([radius]), 60, 64)
    assert mask.sum().item() == pytest.approx(AREAS[shape] * radius**2, rel=within)


@pytest.mark.parametrize("shape", SHAPES)
def test_coverage_is_that_of_many_samples(shape):
    """Each pixel against 16 x 16 float64 samples of it, inside or outside."""
    height, width, radius, (cx, cy) = 40, 48, 16.4, (23.3, 19.1)
    x = ((np.arange(width * 16) + 0.5) / 16 - cx) / radius
    y = ((np.arange(height * 16) + 0.5) / 16 - cy) / radius
    expected = is_inside(shape, x, y[:, None]).reshape(height, 16, width, 16).mean((1, 3))
    mask = coverage(shape, torch.tensor([[cx, cy]]), torch.tensor([radius]), height, width)[0].numpy()
    is_rim = (expected > 0) & (expected < 1)
    assert np.abs(mask - expected)[is_rim].mean() < 0.04
    assert np.abs(mask - expected).max() < 0.3  # at a tip
    assert np.abs(mask - expected)[~is_rim].max() < 0.25


def test_an_edge_falls_off_steadily():
    mask = coverage("circle", torch.tensor([[32.0, 32.5]]), torch.tensor([20.3]), 64, 64)[0]
    row = mask[32, 32:]
    assert (row.diff() <= 0).all()
    assert row[0] == 1
    assert row[-1] == 0
    assert row[20] == pytest.approx(0.3, abs=1e-4)  # from 20 to 21: covered up to 20.3


def lone(shape: str, background: Background, **thing: object) -> Scene:
    fields = {"colour": "blue", "size": "large", "x": 0.5, "y": 0.5} | thing
    return Scene((Thing(shape, **fields),), background, None, 1.0, 1.0)


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_are_exact(colour):
    scene = lone("circle", Background("plain", ("beige",)), colour=colour)
    hollow = lone("ring", Background("plain", ("pale blue",)), colour=colour)
    pictures = as_bytes(draw([scene, hollow], 64, 64))
    assert pictures.shape == (2, 64, 64, 3)
    assert pictures.dtype == np.uint8
    assert tuple(pictures[0, 32, 32]) == COLOURS[colour]
    assert tuple(pictures[0, 0, 0]) == TONES["beige"]
    assert tuple(pictures[1, 32, 32]) == TONES["pale blue"]
    assert tuple(pictures[1, 32, 32 - round(0.75 * 0.22 * 64)]) == COLOURS[colour]


def test_places_are_pixels_of_the_shorter_side():
    thing = Thing("square", "black", "small", 1.5, 0.25)
    scene = Scene((thing,), Background("plain", ("light gray",)), None, 2.0, 1.0)
    picture = as_bytes(draw([scene], 100, 200))[0]
    rows, columns = np.nonzero((picture < 100).all(-1))
    assert rows.mean() + 0.5 == pytest.approx(25, abs=0.1)
    assert columns.mean() + 0.5 == pytest.approx(150, abs=0.1)


def test_stripes_and_gradients():
    tones = ("pale blue", "beige")
    scenes = [
        lone("star", Background("striped", tones, "horizontal", 0.25, 0.0), y=0.7),
        lone("star", Background("gradient", tones, "vertical"), y=0.7),
    ]
    striped, fading = as_bytes(draw(scenes, 64, 64)).astype(int)
    first, second = (np.array(TONES[tone]) for tone in tones)
    assert (striped[0] == striped[5]).all()  # upright stripes
    assert (striped[0, :16] == striped[0, 16:32]).all()
    for tone in (first, second):
        assert (striped[0] == tone).all(-1).mean() >= 0.4
    share = (fading[:, 0] - first) @ (second - first) / ((second - first) @ (second - first))
    assert share == pytest.approx((np.arange(64) + 0.5) / 64, abs=0.02)


def test_large_pictures_shrink_to_small_ones():
    rng = random.Random(0)
    scenes = [sample_scene(rng, 64, 96) for _ in range(30)]
    large = torch.nn.functional.avg_pool2d(draw(scenes, 256, 384), 4)
    assert (large - draw(scenes, 64, 96)).abs().mean() < 0.002


def test_drawn_alone_or_together():
    rng = random.Random(0)
    scenes = [sample_scene(rng, 128, 64) for _ in range(20)]
    together = draw(scenes, 128, 64)
    assert together.shape == (20, 3, 128, 64)
    assert together.min() >= 0
    assert together.max() <= 1
    for scene, picture in zip(scenes, together, strict=True):
        assert torch.equal(draw([scene], 128, 64)[0], picture)
