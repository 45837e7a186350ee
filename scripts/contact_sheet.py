"""Draws a contact sheet of an output folder: ``python scripts/contact_sheet.py OUT sheet.png``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import click
import datasets
from PIL import Image, ImageDraw

TILE, COLUMNS = 192, 5
LINE_PIXELS, LINE_CHARACTERS, MAX_LINES = 12, 31, 5
LABEL = MAX_LINES * LINE_PIXELS + 8


@click.command()
@click.argument("out", type=click.Path(exists=True, file_okay=False))
@click.argument("sheet", type=click.Path(dir_okay=False, path_type=Path))
def main(out: str, sheet: Path) -> None:
    """Draw a contact sheet of the output folder OUT into the image file SHEET."""
    if sheet.suffix.lower() not in Image.registered_extensions():
        raise click.BadParameter(f"{sheet} has no ending of an image file, such as .png")
    datasets.disable_progress_bars()
    try:
        rows, metrics = (datasets.load_dataset(out, name, split="train") for name in ("images", "metrics"))
    except (FileNotFoundError, ValueError) as error:
        raise click.BadParameter(f"{out} has no images: {error}") from None
    guided = {(own["row"], own["image_index"]) for own in metrics if own["cfg_active"]}
    num_lines = -(-len(rows) // COLUMNS)
    page = Image.new("RGB", (COLUMNS * TILE, num_lines * (TILE + LABEL)), "white")
    draw = ImageDraw.Draw(page)
    for index, row in enumerate(rows):
        left, top = index % COLUMNS * TILE, index // COLUMNS * (TILE + LABEL)
        image = row["image"].convert("RGB")
        image.thumbnail((TILE - 8, TILE - 8))
        page.paste(image, (left + (TILE - image.width) // 2, top + (TILE - image.height) // 2))
        is_guided = (row["row"], row["image_index"]) in guided
        for line, (text, colour) in enumerate(_label(row, is_guided=is_guided)):
            draw.text((left + 6, top + TILE + line * LINE_PIXELS), text, fill=colour)
    page.save(sheet, optimize=True)


def _label(row: dict[str, Any], *, is_guided: bool) -> list[tuple[str, str]]:
    """Lines of text and their colours: size, steps and guidance, the prompt, the negative prompt."""
    guidance = f"cfg {row['true_cfg_scale']:g}" if is_guided else "no guidance"
    lines = [(f"{row['width']}x{row['height']} {row['num_inference_steps']} steps {guidance}", "black")]
    lines += [(text, "gray") for text in textwrap.wrap(row["prompt"], LINE_CHARACTERS)]
    if is_guided and (row["negative_prompt"] or "").strip():
        negative = textwrap.wrap(f"not: {row['negative_prompt']}", LINE_CHARACTERS)
        lines += [(text, "brown") for text in negative]
    return lines[:MAX_LINES]


if __name__ == "__main__":
    main()
