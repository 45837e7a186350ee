"""Draws scenes with signed distances: exact, anti-aliased, many at once, the same everywhere.

A shape is a function of (x, y) in units of its radius, y downward: the distance to its outline,
negative inside. It fills the square from -1 to 1 as far as its form allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from .scenes import COLOURS, TONES, Background, Scene

SQUARE_HALF_SIDE = 0.86
RING_HOLE = 0.5
CROSS_HALF_WIDTH = 0.34
STAR_INNER = 0.42  # radius of a star's inner corners
TRIANGLE_TOP, TRIANGLE_BASE, TRIANGLE_HALF_WIDTH = -0.95, 0.8, 1.0
HEART_HALF_DIAGONAL = 0.81  # of the square that stands on its tip
HEART_TIP = 0.92


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y) - 1


def _square(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - SQUARE_HALF_SIDE


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    height = TRIANGLE_BASE - TRIANGLE_TOP
    side = (x.abs() * height - (y - TRIANGLE_TOP) * TRIANGLE_HALF_WIDTH) / math.hypot(
        height, TRIANGLE_HALF_WIDTH
    )
    return torch.maximum(side, y - TRIANGLE_BASE)


def _star(x: Tensor, y: Tensor) -> Tensor:
    """Five tips, one of them up: folded onto the half of one tip, which is bounded by one line.

    The line goes on beyond the tip, near which a pixel would count as half covered: hence the maximum.
    """
    tip = math.tau / 5
    angle = torch.atan2(x, -y)
    angle = (angle - tip * torch.round(angle / tip)).abs()
    radius = torch.hypot(x, y)
    along, across = radius * torch.cos(angle), radius * torch.sin(angle)
    inner_along, inner_across = STAR_INNER * math.cos(tip / 2), STAR_INNER * math.sin(tip / 2)
    edge = math.hypot(1 - inner_along, inner_across)
    side = ((along - 1) * inner_across + across * (1 - inner_along)) / edge
    return torch.maximum(side, along - 1)


def _ring(x: Tensor, y: Tensor) -> Tensor:
    middle, half_width = (1 + RING_HOLE) / 2, (1 - RING_HOLE) / 2
    return (torch.hypot(x, y) - middle).abs() - half_width


def _cross(x: Tensor, y: Tensor) -> Tensor:
    long, short = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    return torch.maximum(long - 1, short - CROSS_HALF_WIDTH)


def _heart(x: Tensor, y: Tensor) -> Tensor:
    """A square on its tip, with a half circle on each of its two upper sides."""
    side = HEART_HALF_DIAGONAL
    x, y = x.abs(), y - (HEART_TIP - side)
    square = (x + y.abs() - side) / math.sqrt(2)
    lobe = torch.hypot(x - side / 2, y + side / 2) - side / math.sqrt(2)
    return torch.minimum(square, lobe)


def _diamond(x: Tensor, y: Tensor) -> Tensor:
    return (x.abs() + y.abs() - 1) / math.sqrt(2)


OUTLINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
    "heart": _heart,
    "diamond": _diamond,
}


def draw(scenes: Sequence[Scene], height: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """Pictures [B, 3, height, width] of ``scenes``, float32 from 0 to 1 on ``device``.

    A pixel's colour is a blend by how much of it a shape covers, linear in the distance of its middle
    to the outline. Memory: about 40 bytes a pixel and scene.
    """
    scale = min(height, width)
    assert all(abs(s.width * scale - width) + abs(s.height * scale - height) < 1e-6 for s in scenes)
    pictures = _backgrounds([scene.background for scene in scenes], height, width, device)
    slots = max(len(scene.things) for scene in scenes)
    masks = _masks(scenes, slots, height, width, device)
    colours = torch.tensor(
        [([COLOURS[t.colour] for t in s.things] + [(0, 0, 0)] * slots)[:slots] for s in scenes]
    )
    colours = colours.view(len(scenes), slots, 3).to(device) / 255
    for slot in range(slots):
        pictures = torch.lerp(pictures, colours[:, slot, :, None, None], masks[:, slot, None])
    return pictures


def as_bytes(pictures: Tensor) -> np.ndarray:
    """Pictures [B, 3, H, W] from 0 to 1 as uint8 [B, H, W, 3], as image files and the scorer take them."""
    return (pictures.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def coverage(shape: str, centres: Tensor, radii: Tensor, height: int, width: int) -> Tensor:
    """How much of each pixel [n, height, width] a shape covers.

    ``centres`` [n, 2] as (x, y) and ``radii`` [n] are in pixels; the first pixel's middle is (0.5, 0.5).
    """
    x, y = _grid(height, width, centres.device)
    radius = radii[:, None, None]
    distance = OUTLINES[shape](
        (x - centres[:, 0, None, None]) / radius, (y - centres[:, 1, None, None]) / radius
    )
    return (0.5 - distance * radius).clamp(0, 1)


def _grid(height: int, width: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The middles of the pixels: x [width], y [height, 1]."""
    return (
        torch.arange(width, device=device) + 0.5,
        torch.arange(height, device=device)[:, None] + 0.5,
    )


def _masks(
    scenes: Sequence[Scene], slots: int, height: int, width: int, device: torch.device | str
) -> Tensor:
    """Coverage [B, slots, height, width] by each scene's things, one shape after the other."""
    scale = min(height, width)
    masks = torch.zeros(len(scenes) * slots, height, width, device=device)
    for shape in OUTLINES:
        found = [
            (row * slots + slot, thing)
            for row, scene in enumerate(scenes)
            for slot, thing in enumerate(scene.things)
            if thing.shape == shape
        ]
        if found:
            index = torch.tensor([at for at, _ in found], device=device)
            circles = torch.tensor([(t.x, t.y, t.radius) for _, t in found]).to(device) * scale
            masks[index] = coverage(shape, circles[:, :2], circles[:, 2], height, width)
    return masks.view(len(scenes), slots, height, width)


STEPS = {"horizontal": (1.0, 0.0), "vertical": (0.0, 1.0), "diagonal": (math.sqrt(0.5), math.sqrt(0.5))}


def _backgrounds(
    backgrounds: Sequence[Background], height: int, width: int, device: torch.device | str
) -> Tensor:
    """Backgrounds [B, 3, height, width]: everywhere a blend of the first and the last tone."""
    scale = min(height, width)
    x, y = _grid(height, width, device)
    first, last = (
        torch.tensor([TONES[b.tones[end]] for b in backgrounds]).to(device)[:, :, None, None] / 255
        for end in (0, -1)
    )
    columns = torch.tensor(
        [
            (*STEPS[b.direction], b.period * scale, b.phase, b.kind == "striped", b.kind == "gradient")
            for b in backgrounds
        ]
    ).to(device)
    step_x, step_y, period, phase, striped, gradient = columns.T[:, :, None, None]
    along = step_x * x + step_y * y
    share = along / (step_x * width + step_y * height)
    turn = along / period + phase
    to_edge = (0.25 - (turn - turn.floor() - 0.5).abs()) * period  # pixels, above 0 in the second tone
    blend = striped * (0.5 + to_edge).clamp(0, 1) + gradient * share
    return torch.lerp(first, last.expand(-1, -1, height, width), blend[:, None])
