"""The sheet that ``make quickstart`` ends with."""

from __future__ import annotations

from pathlib import Path

import contact_sheet
import numpy as np
from click.testing import CliRunner
from job_fakes import Runner, decode, read_table, write_jsonl
from PIL import Image


def tile(page: np.ndarray, index: int) -> np.ndarray:
    """Room of one picture, and of the text below it."""
    line, column = divmod(index, contact_sheet.COLUMNS)
    height = contact_sheet.TILE + contact_sheet.LABEL
    return page[line * height :, column * contact_sheet.TILE :][:height, : contact_sheet.TILE]


def test_every_picture_is_there_over_what_was_asked_for(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"cup {n}", "height": 32 + 16 * n, "width": 64, "num_inference_steps": 1} for n in range(6)
    ]
    rows[4] |= {"prompt": "cup 5", "height": 32 + 16 * 5}  # as the last one, which has a negative prompt
    rows[5] |= {"negative_prompt": "a plate"}
    out, sheet = tmp_path / "out", tmp_path / "sheet.png"
    Runner().run(write_jsonl(tmp_path / "m.jsonl", rows), out, device="cpu")
    result = CliRunner().invoke(contact_sheet.main, [str(out), str(sheet)])
    assert result.exit_code == 0, result.output
    with Image.open(sheet) as opened:
        page = np.asarray(opened.convert("RGB"))
    for index, row in enumerate(read_table(out, "images")):
        expected, own = decode(row["image"]), tile(page, index)
        height, width = expected.shape[:2]
        top, left = ((contact_sheet.TILE - side) // 2 for side in (height, width))
        assert np.array_equal(own[top : top + height, left : left + width], expected), row["id"]
    texts = [tile(page, index)[contact_sheet.TILE :] for index in range(6)]
    assert all((text < 128).any() for text in texts)
    assert not np.array_equal(texts[4], texts[5])


def test_a_folder_without_pictures_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(contact_sheet.main, [str(tmp_path), str(tmp_path / "sheet.png")])
    assert result.exit_code == 2
    assert "has no images" in result.output
