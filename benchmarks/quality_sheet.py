"""A contact sheet of judged pictures: captions below, what is right framed in green."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw
from quality import Judged, Pixels, Row

TILE, LABEL, FRAME, COLUMNS = 192, 60, 4, 8
LINE_CHARACTERS, LINE_PIXELS, MAX_LINES = 32, 12, 4
COLOURS = {True: (20, 150, 60), False: (210, 40, 40)}


def make_sheet(rows: Sequence[Row], pictures: Mapping[int, Pixels], judged: Sequence[Judged]) -> Image.Image:
    """The first pictures of each set and size, a line for each."""
    lines: dict[tuple[str, tuple[int, int]], list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        lines[row.group, row.size].append(at)
    page = Image.new("RGB", (COLUMNS * TILE, len(lines) * (TILE + LABEL)), "white")
    for line, places in enumerate(lines.values()):
        for column, at in enumerate(places[:COLUMNS]):
            tile = _tile(rows[at], pictures[at], is_right=judged[at].is_right)
            page.paste(tile, (column * TILE, line * (TILE + LABEL)))
    return page


def _tile(row: Row, picture: Pixels, *, is_right: bool) -> Image.Image:
    """The picture as large as fits, its pixels left as they are, in its frame; the caption below."""
    tile = Image.new("RGB", (TILE, TILE + LABEL), "white")
    room = TILE - 4 * FRAME
    image = Image.fromarray(picture)
    scale = room / max(image.size)
    width, height = (round(side * scale) for side in image.size)
    left, top = (TILE - width) // 2, (TILE - height) // 2
    draw = ImageDraw.Draw(tile)
    frame = (left - FRAME, top - FRAME, left + width + FRAME - 1, top + height + FRAME - 1)
    draw.rectangle(frame, fill=COLOURS[is_right])
    tile.paste(image.resize((width, height), Image.Resampling.NEAREST), (left, top))
    caption = textwrap.wrap(row.example.caption, LINE_CHARACTERS)[:MAX_LINES]
    for at, text in enumerate(caption):
        draw.text((2 * FRAME, TILE + at * LINE_PIXELS), text, fill="black")
    return tile
