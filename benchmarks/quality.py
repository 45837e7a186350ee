"""Whether pictures show what their captions say, with intervals, and how near they are to a reference."""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from records import ROOT
from scipy import ndimage

sys.path.insert(0, str(ROOT / "scripts"))

from world.drawing import as_bytes, draw
from world.scenes import Scene
from world.scorer import score
from world.supply import Example, Size, sample_example

Pixels = NDArray[np.uint8]
"""A picture [H, W, 3]."""

Figures = dict[str, Any]

SETS = {"mixed": 0.25, "related": 1.0}
"""Set of captions → how many of them state how two things lie to each other."""

MEASURES = ("things", "count", "relation")

TARGETS = {"things": 0.95, "relation": 0.85}
"""Shares that the shipped model is to reach in the reference setting."""

NORMAL_QUANTILE = statistics.NormalDist().inv_cdf(0.975)
DRAWN_TOGETHER = 64

# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One picture to be drawn, the same in every setting."""

    group: str  # of `SETS`
    size: Size
    example: Example
    seed: int


def make_rows(sizes: Sequence[Size], count: int, pool: Executor) -> list[Row]:
    """``count`` rows of each set and size, in turn, so that all of them meet in every pack."""
    groups = [(group, size) for group in SETS for size in sizes]
    columns = pool.map(partial(distinct_examples, count=count), *zip(*groups, strict=True))
    turns = zip(*columns, strict=True)
    flat = [(*groups[at], example) for turn in turns for at, example in enumerate(turn)]
    return [Row(group, size, example, seed) for seed, (group, size, example) in enumerate(flat)]


def distinct_examples(group: str, size: Size, count: int) -> list[Example]:
    """Examples that follow from the arguments alone; no training saw their captions, and no two are equal."""
    rng = random.Random(f"quality/{group}/{size}")
    found: dict[str, Example] = {}
    while len(found) < count:
        example = sample_example(rng, size, related=SETS[group], held_out=True)
        found.setdefault(example.caption, example)
    return list(found.values())


def drawn(rows: Sequence[Row]) -> Iterator[tuple[int, Pixels]]:
    """The rows' own scenes, with their places in ``rows``: pictures that are right."""
    places: dict[Size, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        places[row.size].append(at)
    for size, own in places.items():
        for start in range(0, len(own), DRAWN_TOGETHER):
            chunk = own[start : start + DRAWN_TOGETHER]
            scenes = [rows[at].example.scene for at in chunk]
            yield from zip(chunk, as_bytes(draw(scenes, *size)), strict=True)


# --- one picture ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judged:
    """What is right in a picture, and how near it is to the reference's.

    ``relation`` is None where none is asked for, ``psnr`` and ``ssim`` without a reference; ``psnr`` also
    where the two are equal.
    """

    things: bool
    count: bool
    relation: bool | None
    psnr: float | None = None
    ssim: float | None = None

    @property
    def is_right(self) -> bool:
        """Things and relation, as far as one is asked for."""
        return self.things and self.relation is not False


def judge_all(
    pictures: Iterable[tuple[int, Pixels]],
    rows: Sequence[Row],
    references: Mapping[int, Pixels],
    pool: Executor,
) -> list[Judged]:
    """Judges ``pictures`` in ``pool`` as they come, each with its place in ``rows``."""
    judged = {
        at: pool.submit(judge, picture, rows[at].example.scene, references.get(at))
        for at, picture in pictures
    }
    assert len(judged) == len(rows), (len(judged), len(rows))
    return [judged[at].result() for at in range(len(rows))]


def judge(picture: Pixels, scene: Scene, reference: Pixels | None) -> Judged:
    found = score(picture, scene)
    if reference is None:
        return Judged(found.things, found.count, found.relation)
    nearness = psnr(picture, reference), ssim(picture, reference)
    return Judged(found.things, found.count, found.relation, *nearness)


def psnr(picture: Pixels, reference: Pixels) -> float | None:
    """Peak signal-to-noise ratio in decibels; None where the pictures are equal."""
    mean_square = float(np.square(picture.astype(np.float64) - reference).mean())
    return 10 * math.log10(255**2 / mean_square) if mean_square else None


def ssim(picture: Pixels, reference: Pixels) -> float:
    """Structural similarity, the mean over the colour channels.

    Wang, Bovik, Sheikh, Simoncelli 2004: a Gaussian window of 11 by 11 pixels with deviation 1.5, K1 = 0.01,
    K2 = 0.03; only where the window lies within the picture.
    """
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    blur = partial(ndimage.gaussian_filter, sigma=(1.5, 1.5, 0), radius=(5, 5, 0))
    x, y = picture.astype(np.float64), reference.astype(np.float64)
    mean_x, mean_y = blur(x), blur(y)
    spread = blur(x * x) - mean_x**2 + blur(y * y) - mean_y**2
    shared = blur(x * y) - mean_x * mean_y
    likeness = (2 * mean_x * mean_y + c1) * (2 * shared + c2)
    likeness /= (mean_x**2 + mean_y**2 + c1) * (spread + c2)
    return float(likeness[5:-5, 5:-5].mean())


# --- many pictures -------------------------------------------------------------------------------


def wilson(num_right: int, num: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: the shares that ``num_right`` of ``num`` does not speak against."""
    square = NORMAL_QUANTILE**2
    middle = (num_right + square / 2) / (num + square)
    half = NORMAL_QUANTILE / (num + square) * math.sqrt(num_right * (num - num_right) / num + square / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def share(outcomes: Sequence[bool]) -> Figures:
    low, high = wilson(sum(outcomes), len(outcomes))
    mean = sum(outcomes) / len(outcomes)
    return {"share": mean, "low": low, "high": high, "num_right": sum(outcomes), "num": len(outcomes)}


def figures(rows: Sequence[Row], judged: Sequence[Judged]) -> dict[str, Figures]:
    """Shares and nearness of each size's pictures, and of all."""
    pairs = list(zip(rows, judged, strict=True))
    sizes = dict.fromkeys(row.size for row in rows)
    by_size = {size_name(size): [pair for pair in pairs if pair[0].size == size] for size in sizes}
    return {name: _figures_of(own) for name, own in {**by_size, "all": pairs}.items()}


def _figures_of(pairs: Sequence[tuple[Row, Judged]]) -> Figures:
    mixed, related = ([own for row, own in pairs if row.group == group] for group in SETS)
    return {
        "things": share([own.things for own in mixed]),
        "count": share([own.count for own in mixed]),
        "relation": share([bool(own.relation) for own in related]),
        "related_things": share([own.things for own in related]),
        **_nearness([own for _, own in pairs]),
    }


def _nearness(judged: Sequence[Judged]) -> Figures:
    """Means over pictures and what 5 % of them stay below; PSNR of those that differ."""
    likenesses = [own.ssim for own in judged if own.ssim is not None]
    ratios = [own.psnr for own in judged if own.psnr is not None]
    return {
        **_mean_and_low("psnr_db", ratios),
        **_mean_and_low("ssim", likenesses),
        "num_equal": len(likenesses) - len(ratios) if likenesses else None,
    }


def _mean_and_low(name: str, values: Sequence[float]) -> Figures:
    if not values:
        return {name: None, f"{name}_p5": None}
    return {name: statistics.fmean(values), f"{name}_p5": float(np.percentile(values, 5))}


def size_name(size: Size) -> str:
    """Width before height, as in a manifest."""
    return f"{size[1]}x{size[0]}"


def clearly(own: Figures, reference: Figures) -> str:
    """Whether a share is ``lower`` or ``higher`` than another, or ``unclear``: their intervals meet."""
    if own["high"] < reference["low"]:
        return "lower"
    return "higher" if own["low"] > reference["high"] else "unclear"


def targets(records: Sequence[Figures]) -> list[Figures]:
    """What the reference, the first of ``records``, is to reach, and that without guidance less is right."""
    reference = records[0]
    found = [
        {"what": f"{name}, {size}", "bound": bound, "value": own[name]["share"]}
        for name, bound in TARGETS.items()
        for size, own in reference["figures"].items()
    ]
    judged = [{**target, "met": target["value"] >= target["bound"]} for target in found]
    for record in records[1:]:
        if record["true_cfg_scale"] <= 1 < reference["true_cfg_scale"]:
            verdicts = {name: record["against_reference"][name] for name in TARGETS}
            judged += [
                {"what": f"{name}, unguided", "bound": "lower", "value": verdict, "met": verdict == "lower"}
                for name, verdict in verdicts.items()
            ]
    return judged
