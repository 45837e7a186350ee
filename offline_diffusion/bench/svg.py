"""Charts as HTML figures with SVG in them, without a library and without script. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#4269d0", "#e8833a", "#3ca951", "#c84ea0", "#6f5bbf", "#2a9d8f", "#b08900", "#d1495b")
"""Of series, in their order; after the last from the start again."""

LEFT, RIGHT, TOP, BOTTOM = 58, 14, 8, 40
"""Margins in pixels: for labels."""
ROW_HEIGHT = 11

Point = tuple[float, float]


def colour(index: int) -> str:
    """Of series ``index``."""
    return COLOURS[index % len(COLOURS)]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def short(value: float) -> str:
    """A number for an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


@dataclass
class Chart:
    """A frame with axes, drawn into by its methods; ``str()`` is a figure with title and legend.

    Args:
        title: Above it.
        x_label, y_label: Of the axes.
        x_max, y_max: Where the axes end; both begin at 0.
        width, height: In pixels.
        percent: The second axis is shares, 0 to 1.
        ticks: Whether the second axis has numbers.
    """

    title: str
    x_label: str
    y_label: str
    x_max: float
    y_max: float
    width: int = 560
    height: int = 260
    percent: bool = False
    ticks: bool = True
    _parts: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x_max = self.x_max if self.x_max > 0 else 1.0
        self.y_max = self.y_max if self.y_max > 0 else 1.0

    def x(self, value: float) -> float:
        """Pixel of a place on the first axis."""
        return LEFT + min(1.0, max(0.0, value / self.x_max)) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixel of a place on the second axis."""
        return self.height - BOTTOM - min(1.0, value / self.y_max) * (self.height - TOP - BOTTOM)

    def name(self, text: str, colour: str) -> None:
        """Adds to the legend."""
        self._legend.append((text, colour))

    def line(self, points: Iterable[Point], colour: str) -> None:
        """Through all points."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')

    def steps(self, bins: Sequence[tuple[float, float, float]], colour: str) -> None:
        """A filled outline of ``(start, end, value)``, in order; bins that touch are one shape."""
        base, path, last = self.height - BOTTOM, "", math.nan
        for start, end, value in bins:
            left, right, top = self.x(start), self.x(end), self.y(value)
            path += f"V{top:.1f}" if start == last else f"V{base}M{left:.1f},{base}V{top:.1f}"
            path += f"H{right:.1f}"
            last = end
        path = f"{path}V{base}".removeprefix(f"V{base}")
        if path:
            self._parts.append(f'<path d="{path}" fill="{colour}" opacity="0.85"/>')

    def dots(self, points: Iterable[tuple[float, float, str]], colour: str) -> None:
        """A dot for each ``(x, y, text)``; the text shows when one points at it."""
        self._parts += [
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="2.4" fill="{colour}" opacity="0.55">'
            f"<title>{escape(text)}</title></circle>"
            for x, y, text in points
        ]

    def bar(self, row: int, start: float, end: float, colour: str, text: str, *, pale: bool = False) -> None:
        """A horizontal bar in a row counted from the top."""
        left = self.x(start)
        self._parts.append(
            f'<rect x="{left:.1f}" y="{TOP + row * ROW_HEIGHT + 1:.1f}" rx="1.5" '
            f'width="{max(0.8, self.x(end) - left):.1f}" height="{ROW_HEIGHT - 3}" fill="{colour}" '
            f'opacity="{0.25 if pale else 0.9}"><title>{escape(text)}</title></rect>'
        )

    def __str__(self) -> str:
        keys = "".join(
            f'<span class="key"><i style="background:{fill}"></i>{escape(text)}</span>'
            for text, fill in self._legend
        )
        return (
            f"<figure><figcaption><b>{escape(self.title)}</b> {keys}</figcaption>"
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label="{escape(self.title)}">'
            f"{self._axes()}{''.join(self._parts)}</svg></figure>"
        )

    def _axes(self) -> str:
        bottom, right = self.height - BOTTOM, self.width - RIGHT
        parts = []
        for tick in nice_ticks(0, self.y_max) if self.ticks else ():
            label = f"{tick:.0%}" if self.percent else short(tick)
            y = self.y(tick)
            parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" class="tick end">{label}</text>')
        for tick in nice_ticks(0, self.x_max, 6):
            x = self.x(tick)
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" class="axis"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" class="tick mid">{short(tick)}</text>')
        middle = (TOP + bottom) / 2
        parts += [
            f'<line x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" class="axis"/>',
            f'<text x="{(LEFT + right) / 2:.0f}" y="{self.height - 8}" class="tick mid">'
            f"{escape(self.x_label)}</text>",
            f'<text transform="translate(13,{middle:.0f}) rotate(-90)" class="tick mid">'
            f"{escape(self.y_label)}</text>",
        ]
        return "".join(parts)
