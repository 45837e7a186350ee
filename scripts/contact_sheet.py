"""Draws a contact sheet of an output folder: ``python scripts/contact_sheet.py OUT sheet.png``."""

from __future__ import annotations

from pathlib import Path

import click
import datasets
from PIL import Image, ImageDraw

TILE, LABEL, COLUMNS = 192, 28, 6


@click.command()
@click.argument("out", type=click.Path(exists=True, file_okay=False))
@click.argument("sheet", type=click.Path(dir_okay=False, path_type=Path))
def main(out: str, sheet: Path) -> None:
    """Draw a contact sheet of the output folder OUT into the image file SHEET."""
    if sheet.suffix.lower() not in Image.registered_extensions():
        raise click.BadParameter(f"{sheet} has no ending of an image file, such as .png")
    try:
        rows = datasets.load_dataset(out, "images", split="train")
    except (FileNotFoundError, ValueError) as error:
        raise click.BadParameter(f"{out} has no images: {error}") from None
    num_lines = -(-len(rows) // COLUMNS)
    page = Image.new("RGB", (COLUMNS * TILE, num_lines * (TILE + LABEL)), "white")
    draw = ImageDraw.Draw(page)
    for index, row in enumerate(rows):
        left, top = index % COLUMNS * TILE, index // COLUMNS * (TILE + LABEL)
        image = row["image"].convert("RGB")
        image.thumbnail((TILE - 8, TILE - 8))
        page.paste(image, (left + (TILE - image.width) // 2, top + (TILE - image.height) // 2))
        text = (
            f"{row['width']}x{row['height']} {row['num_inference_steps']} steps cfg {row['true_cfg_scale']:g}"
        )
        draw.text((left + 6, top + TILE), text, fill="black")
        draw.text((left + 6, top + TILE + 12), row["prompt"][:30], fill="gray")
    page.save(sheet, optimize=True)


if __name__ == "__main__":
    main()
