import io
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from world.drawing import as_bytes, draw
from world.scenes import COLOURS, SHAPES, Background, Scene, Thing, sample_scene
from world.scorer import read, score

GRIDS = [(64, 64), (128, 128), (256, 256), (64, 128), (256, 128), (192, 96)]


def sampled(count: int, height: int, width: int, seed: int, related: float = 0.4) -> list[Scene]:
    rng = random.Random(seed)
    return [sample_scene(rng, height, width, related=related) for _ in range(count)]


def is_right(picture: np.ndarray, scene: Scene) -> bool:
    result = score(picture, scene)
    assert (result.relation is None) == (scene.relation is None)
    return result.things and result.count and result.relation is not False


def share_right(scenes: list[Scene], height: int, width: int, spoil: Callable = lambda p: p) -> float:
    pictures = as_bytes(draw(scenes, height, width))
    return float(np.mean([is_right(spoil(p), s) for p, s in zip(pictures, scenes, strict=True)]))


def test_reads_what_is_where():
    things = (Thing("ring", "pink", "large", 0.3, 0.3), Thing("heart", "black", "small", 0.8, 0.7))
    scene = Scene(things, Background("striped", ("beige", "pale blue"), "diagonal", 0.3), None, 1.0, 1.0)
    found = read(as_bytes(draw([scene], 128, 128))[0])
    assert [(f.colour, f.shape) for f in found] == [("pink", "ring"), ("black", "heart")]
    for thing, seen in zip(things, found, strict=True):
        assert (seen.x, seen.y) == pytest.approx((thing.x * 128, thing.y * 128), abs=0.5)
        assert seen.size == pytest.approx(2 * thing.radius * 128, rel=0.05)
        assert seen.fit > 0.9


@pytest.mark.parametrize(("height", "width"), GRIDS)
def test_drawn_scenes_are_right(height, width):
    assert share_right(sampled(15, height, width, seed=1), height, width) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("height", "width"), GRIDS)
def test_nearly_all_drawn_scenes_are_right(height, width):
    assert share_right(sampled(200, height, width, seed=2), height, width) >= 0.99


def blurred(picture: np.ndarray) -> np.ndarray:
    return ndimage.gaussian_filter(picture.astype(float), (0.7, 0.7, 0)).round().astype(np.uint8)


def noisy(picture: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(int(picture.sum())).normal(0, 6, picture.shape)
    return (picture + noise).clip(0, 255).round().astype(np.uint8)


def ringing(picture: np.ndarray) -> np.ndarray:
    smooth = ndimage.gaussian_filter(picture.astype(float), (0.8, 0.8, 0))
    return (2.0 * picture - smooth).clip(0, 255).round().astype(np.uint8)


def compressed(picture: np.ndarray) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=85)
    return np.array(Image.open(file))


def shifted(picture: np.ndarray) -> np.ndarray:
    shift = np.random.default_rng(int(picture.sum())).choice((-12, 12), 3)
    return (picture + shift).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("spoil", [blurred, noisy, ringing, compressed, shifted])
def test_small_faults_of_a_picture_do_not_matter(spoil):
    assert share_right(sampled(60, 64, 64, seed=3), 64, 64, spoil) >= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [blurred, noisy, ringing, compressed, shifted])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 128)])
def test_small_faults_of_many_pictures_do_not_matter(spoil, height, width):
    assert share_right(sampled(200, height, width, seed=4), height, width, spoil) >= 0.99


def with_first(scene: Scene, **changes: str) -> Scene:
    return replace(scene, things=(replace(scene.things[0], **changes), *scene.things[1:]))


def another_place(scene: Scene, rng: random.Random) -> tuple[float, float] | None:
    """Room for one more small thing."""
    for _ in range(200):
        x, y = rng.uniform(0.15, scene.width - 0.15), rng.uniform(0.15, scene.height - 0.15)
        if all(max(abs(x - t.x), abs(y - t.y)) > 0.13 + t.radius + 0.06 for t in scene.things):
            return x, y
    return None


def falsified(scene: Scene, rng: random.Random) -> Iterator[tuple[str, Scene]]:
    """Scenes that are not ``scene``, each in one respect."""
    first = scene.things[0]
    yield "shape", with_first(scene, shape=rng.choice([s for s in SHAPES if s != first.shape]))
    yield "colour", with_first(scene, colour=rng.choice([c for c in COLOURS if c != first.colour]))
    yield "removed", replace(scene, things=scene.things[1:], relation=None)
    place = another_place(scene, rng)
    if place:
        extra = Thing(rng.choice(SHAPES), rng.choice(tuple(COLOURS)), "small", *place)
        yield "added", replace(scene, things=(*scene.things, extra))
    if scene.relation in ("left of", "right of"):
        yield "mirrored", replace(scene, things=tuple(replace(t, x=scene.width - t.x) for t in scene.things))
    elif scene.relation:
        yield "mirrored", replace(scene, things=tuple(replace(t, y=scene.height - t.y) for t in scene.things))


def false_praise(count: int, height: int, width: int, seed: int) -> dict[str, float]:
    """By fault: the share of pictures with it that the scorer takes for right."""
    rng = random.Random(seed)
    praise: dict[str, list[bool]] = {}
    for scene in sampled(count, height, width, seed):
        for fault, wrong in falsified(scene, rng):
            result = score(as_bytes(draw([wrong], height, width))[0], scene)
            if fault == "mirrored":
                assert result.things
                praise.setdefault(fault, []).append(result.relation is True)
            else:
                praise.setdefault(fault, []).append(result.things)
            if fault in ("removed", "added"):
                praise.setdefault(f"{fault}: count", []).append(result.count)
    assert len(praise) == 7
    return {fault: float(np.mean(verdicts)) for fault, verdicts in praise.items()}


def test_wrong_pictures_are_wrong():
    assert max(false_praise(25, 64, 64, seed=5).values()) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("height", "width"), GRIDS)
def test_nearly_all_wrong_pictures_are_wrong(height, width):
    praise = false_praise(50, height, width, seed=6)
    assert max(praise.values()) <= 0.01, praise


def test_a_relation_needs_both_of_its_things():
    scene = sampled(1, 64, 64, seed=7, related=1)[0]
    first = scene.things[0]
    for wrong in (
        replace(scene, things=scene.things[1:], relation=None),
        with_first(scene, colour="red" if first.colour != "red" else "blue"),
    ):
        assert score(as_bytes(draw([wrong], 64, 64))[0], scene).relation is False


def test_things_that_touch_are_two():
    picture = np.full((64, 64, 3), 205, np.uint8)
    picture[20:40, 10:30] = COLOURS["red"]
    picture[20:40, 30:50] = COLOURS["blue"]
    assert {(f.colour, f.shape) for f in read(picture)} == {("red", "square"), ("blue", "square")}


def test_odd_pictures_are_read_without_a_fuss():
    rng = np.random.default_rng(0)
    for value in (0, 128, 205, 255):
        assert read(np.full((64, 64, 3), value, np.uint8)) == []
    for sigma in (0.0, 1.0, 4.0):
        noise = ndimage.gaussian_filter(rng.normal(0, 1, (64, 96, 3)), (sigma, sigma, 0))
        picture = (128 + 60 * noise / noise.std()).clip(0, 255).astype(np.uint8)
        assert all(f.colour in COLOURS for f in read(picture))


def test_a_blot_is_no_shape():
    picture = np.full((64, 64, 3), 205, np.uint8)
    picture[10:14, 5:60] = COLOURS["green"]  # a bar
    (found,) = read(picture)
    assert (found.shape, found.colour) == (None, "green")
