"""Draws a contact sheet of an output folder: ``python scripts/contact_sheet.py OUT sheet.png``."""

from __future__ import annotations

import sys

import datasets
from PIL import Image, ImageDraw

TILE, LABEL, COLUMNS = 192, 28, 6


def main() -> None:
    rows = datasets.load_dataset(sys.argv[1], "images", split="train")
    num_lines = -(-len(rows) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * TILE, num_lines * (TILE + LABEL)), "white")
    draw = ImageDraw.Draw(sheet)
    for index, row in enumerate(rows):
        left, top = index % COLUMNS * TILE, index // COLUMNS * (TILE + LABEL)
        image = row["image"].convert("RGB")
        image.thumbnail((TILE - 8, TILE - 8))
        sheet.paste(image, (left + (TILE - image.width) // 2, top + (TILE - image.height) // 2))
        text = (
            f"{row['width']}x{row['height']} {row['num_inference_steps']} steps cfg {row['true_cfg_scale']:g}"
        )
        draw.text((left + 6, top + TILE), text, fill="black")
        draw.text((left + 6, top + TILE + 12), row["prompt"][:30], fill="gray")
    sheet.save(sys.argv[2], optimize=True)


if __name__ == "__main__":
    main()
