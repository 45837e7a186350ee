"""Numbers and tables for people. Free of colour: what stands here is also read in log files."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantity(value: float, unit: str = "") -> str:
    """``value`` with three digits and a decimal prefix: ``1.23 T``, with ``unit`` after it."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def duration(seconds: float | None) -> str:
    """``12 s``, ``3 min 20 s``, ``5 h 02 min``, ``3 d 04 h``; ``unknown`` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, secs = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {secs:02d} s" if minutes else f"{secs} s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by spaces; those whose cells start with a digit, or are blank, go to the right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    right = [
        all(not row[index] or row[index][0].isdigit() for row in cells[1:]) for index in range(len(header))
    ]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
