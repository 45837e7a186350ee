"""Reads the things in a picture back by plain vision, and scores a picture against its scene.

The reader knows the palette and the shapes, not the caption. It takes the background for a segment in
colour space (two tones and all their mixes: stripes, a gradient or a single tone), what is nearer to a
colour than to that segment for a thing, and the shape whose ideal mask, laid over the thing's, fits best.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

from .drawing import coverage
from .scenes import COLOURS, RADII, RELATIONS, SHAPES, TONES, Scene

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

PALETTE = np.array(list(COLOURS.values()), np.float32)
SOFT = np.array(
    [*TONES.values(), *((np.array(a) + b) / 2 for a, b in combinations(TONES.values(), 2))], np.float32
)
SMALLEST = 0.35 * RADII["small"] ** 2  # in shorter sides squared: a quarter of the smallest thing's area
ODD = 50.0  # RGB distance from all blends of a thing with the background: another colour
FIT = 0.75  # of the mask shared with the best shape: with less it is no shape that we know
BLUR = 2  # pixels beyond a thing's outline that may hold some of its colour
SCALES = np.array([0.94, 1, 1.06])  # of the radius that a thing's area suggests
ROOM = BLUR + 2  # pixels around a thing's box that are looked at
SOFTNESS = 0.5  # standard deviation in pixels: outlines are taken to be a little blurred


@dataclass(frozen=True, slots=True)
class Found:
    """A thing seen in a picture; lengths in pixels, the first pixel's middle is at 0.5."""

    shape: str | None  # None: like none of the shapes
    colour: str
    size: float  # side of the box
    x: float  # middle of the box
    y: float
    fit: float  # intersection over union with the ideal shape


@dataclass(frozen=True, slots=True)
class Score:
    """Whether a picture has the scene's things, their number and, if there is one, their relation."""

    things: bool
    count: bool
    relation: bool | None


def score(picture: NDArray[np.uint8], scene: Scene) -> Score:
    """Compare ``picture`` [H, W, 3] with ``scene``: the same colours and shapes, each as often.

    The relation holds when each of its two things is there exactly once, and their centres differ along
    the stated axis, in the stated sense, by more than across it.
    """
    found = read(picture)
    seen = Counter((thing.colour, thing.shape) for thing in found)
    wanted = Counter((thing.colour, thing.shape) for thing in scene.things)
    return Score(seen == wanted, len(found) == len(scene.things), _has_relation(found, scene))


def _has_relation(found: list[Found], scene: Scene) -> bool | None:
    if scene.relation is None:
        return None
    pair = [
        [f for f in found if (f.colour, f.shape) == (thing.colour, thing.shape)] for thing in scene.things
    ]
    if [len(matches) for matches in pair] != [1, 1]:
        return False
    (first,), (second,) = pair
    step_x, step_y = RELATIONS[scene.relation]
    x, y = first.x - second.x, first.y - second.y
    return step_x * x + step_y * y > abs(step_y * x) + abs(step_x * y)


def read(picture: NDArray[np.uint8]) -> list[Found]:
    """The things in ``picture`` uint8 [H, W, 3], from the top to the bottom."""
    pixels = picture.astype(np.float32)
    to_palette = _distances(pixels, PALETTE)
    ends = _background_ends(pixels, to_palette.min(-1))
    to_background = _to_segment(pixels, *ends)
    foreground = to_palette.min(-1) < to_background
    smallest = SMALLEST * min(foreground.shape) ** 2
    found = []
    for box, component in _components(foreground, smallest):
        near = pixels[box]
        for piece in _pieces(near, to_palette[box].argmin(-1), component, ends, smallest):
            colour = np.median(near[_core(piece)], axis=0)
            mask = _soft_mask(near, piece, foreground[box] & ~piece, colour, to_background[box])
            found.append(_match(mask, colour, (box[1].start, box[0].start)))
    return found


def _distances(pixels: Floats, colours: Floats) -> Floats:
    """RGB distances [..., n] of ``pixels`` [..., 3] to ``colours`` [n, 3]."""
    squares = (pixels**2).sum(-1)[..., None] - 2 * pixels @ colours.T + (colours**2).sum(-1)
    distance: Floats = np.sqrt(np.maximum(squares, 0))
    return distance


def _to_segment(pixels: Floats, start: Floats, end: Floats) -> Floats:
    """RGB distances [...] of ``pixels`` [..., 3] to the segment between two colours."""
    step = end - start
    share = (pixels - start) @ step / max(float(step @ step), 1e-6)
    distance: Floats = np.linalg.norm(pixels - start - share.clip(0, 1)[..., None] * step, axis=-1)
    return distance


def _background_ends(pixels: Floats, to_palette: Floats) -> tuple[Floats, Floats]:
    """The two tones that the background lies between: along the main axis of its colours."""
    is_soft = _distances(pixels, SOFT).min(-1) < to_palette
    inner = ndimage.binary_erosion(is_soft, np.ones((3, 3)), border_value=1)
    colours = pixels[inner if inner.sum() > 16 else np.ones_like(is_soft)]
    middle = colours.mean(0)
    axis = np.linalg.eigh(np.cov(colours - middle, rowvar=False))[1][:, -1].astype(np.float32)
    low, high = np.percentile((colours - middle) @ axis, (3, 97)).astype(np.float32)
    return middle + low * axis, middle + high * axis


def _components(mask: Mask, smallest: float) -> list[tuple[tuple[slice, slice], Mask]]:
    """Connected parts of ``mask`` of at least ``smallest`` pixels: a box with some room and what is in it."""
    labels, _ = ndimage.label(mask)
    parts = []
    for at, box in enumerate(ndimage.find_objects(labels), 1):
        rows, columns = (slice(max(0, side.start - ROOM), side.stop + ROOM) for side in box)
        part = labels[rows, columns] == at
        if part.sum() >= smallest:
            parts.append(((rows, columns), part))
    return parts


def _core(mask: Mask) -> Mask:
    """``mask`` without its rim, whose colours are blends, where that leaves enough to look at."""
    inner = ndimage.binary_erosion(mask, border_value=1)
    return inner if inner.sum() >= 8 else mask


def _pieces(
    pixels: Floats, nearest: NDArray[np.intp], component: Mask, ends: tuple[Floats, Floats], smallest: float
) -> list[Mask]:
    """``component``, or its parts where things of different colours touch or lie upon each other."""
    core = _core(component)
    main = np.bincount(nearest[core]).argmax()
    colour = np.median(pixels[core & (nearest == main)], axis=0)
    blends = np.minimum(*(_to_segment(pixels, colour, end) for end in ends))
    others = _whole(core & (nearest != main) & (blends > ODD), smallest / 2)
    if not others:
        return [component]
    colours = np.stack([colour, *(np.median(pixels[other], axis=0) for other in others)])
    owner = _distances(pixels, colours).argmin(-1)
    return [part for at in range(len(colours)) for part in _whole(component & (owner == at), smallest / 2)]


def _whole(mask: Mask, smallest: float) -> list[Mask]:
    """As ``_components``, but each part [H, W] as ``mask`` itself."""
    labels, _ = ndimage.label(mask)
    sizes = np.bincount(labels.ravel())
    return [labels == at for at in range(1, len(sizes)) if sizes[at] >= smallest]


def _soft_mask(pixels: Floats, piece: Mask, others: Mask, colour: Floats, to_background: Floats) -> Floats:
    """How much of each pixel [H, W] is the thing's, from 0 to 1: nearer to its colour than to the rest."""
    share = to_background / (to_background + np.linalg.norm(pixels - colour, axis=-1) + 1e-6)
    share = ((share - 0.15) / 0.7).clip(0, 1)  # noise is neither thing nor background
    near = ndimage.binary_dilation(piece, iterations=BLUR) & ~others
    return np.where(near, share, 0).astype(np.float32)


def _match(mask: Floats, colour: Floats, corner: tuple[int, int]) -> Found:
    """The shape that, laid upon ``mask`` with its area and centroid, shares the most of it.

    ``corner`` (x, y) is where ``mask`` lies in the picture.
    """
    height, width = mask.shape
    area = mask.sum()
    centroid = (
        np.array([mask.sum(0) @ (np.arange(width) + 0.5), mask.sum(1) @ (np.arange(height) + 0.5)]) / area
    )
    best = Found(None, _name(colour), 0, 0, 0, 0)
    for shape in SHAPES:
        unit_area, unit_centroid = _moments(shape)
        radii = np.sqrt(area / unit_area) * SCALES
        middles = centroid - radii[:, None] * unit_centroid
        ideal = coverage(shape, torch.tensor(middles), torch.tensor(radii), height, width).numpy()
        ideal = ndimage.gaussian_filter(ideal, (0, SOFTNESS, SOFTNESS))
        fits = np.minimum(mask, ideal).sum((1, 2)) / np.maximum(mask, ideal).sum((1, 2))
        at = int(fits.argmax())
        if fits[at] > best.fit:
            x, y = (middles[at] + corner).tolist()
            best = replace(best, shape=shape, size=2 * float(radii[at]), x=x, y=y, fit=float(fits[at]))
    return best if best.fit >= FIT else replace(best, shape=None)


def _name(colour: Floats) -> str:
    return list(COLOURS)[int(_distances(colour, PALETTE).argmin())]


@functools.cache
def _moments(shape: str) -> tuple[float, Floats]:
    """Area and centroid (x, y) of a shape of radius 1 around (0, 0)."""
    mask = coverage(shape, torch.tensor([[128.0, 128.0]]), torch.tensor([120.0]), 256, 256)[0].numpy()
    middles = np.arange(256) + 0.5 - 128
    centroid = np.array([mask.sum(0) @ middles, mask.sum(1) @ middles]) / mask.sum()
    return float(mask.sum()) / 120**2, centroid / 120
