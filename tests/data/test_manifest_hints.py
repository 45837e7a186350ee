"""``size`` beside height and width, and hints that fit what the user did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from output_fakes import make_rows, open_ledger, run_job

from offline_diffusion.data.manifest import Manifest, open_manifest
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.errors import ManifestError


def opened(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> Manifest:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x"} | row) + "\n" for row in rows))
    return open_manifest([str(path)], **options)


@pytest.mark.parametrize(
    ("row", "width", "height"),
    [
        ({"size": "64x48"}, 64, 48),
        ({"size": "64x48", "width": 64}, 64, 48),
        ({"size": "64x48", "height": 48}, 64, 48),
        ({"size": "64x48", "width": None}, 64, 48),
        ({"size": None, "width": 80}, 80, None),
        ({"size": "auto", "width": 80}, 80, None),
        ({"size": "1 MB", "width": 80, "height": 96}, 80, 96),
    ],
)
def test_size_gives_what_height_and_width_do_not(
    tmp_path: Path, row: dict[str, Any], width: int, height: int | None
) -> None:
    (found,) = opened(tmp_path, row).read()
    assert isinstance(found, ManifestRow)
    assert (found.params.width, found.params.height) == (width, height)


def test_a_size_that_says_something_else_than_the_width_is_a_fault(tmp_path: Path) -> None:
    (found,) = opened(tmp_path, {"size": "64x64", "width": 128}).read()
    assert isinstance(found, RowFault)
    assert (found.column, found.value, found.reason) == ("size", "64x64", "disagrees with width=128")


def test_the_notes_on_size_do_not_contradict_each_other(tmp_path: Path) -> None:
    rows = ({"size": "64x64"}, {"size": "64x64", "width": 64}, {"size": "L", "width": 64, "height": 64})
    assert opened(tmp_path, *rows).notes == [
        "column 'size' is read as height and width",
        "column 'size' is carried in rows with columns for height and width",
    ]


def hint_of(tmp_path: Path, row: dict[str, Any], column_map: dict[str, str]) -> str:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ManifestError, match="no prompt column") as caught:
        open_manifest([str(path)], column_map=column_map)
    return str(caught.value.hint)


def test_a_mapped_column_is_not_proposed_as_the_prompt(tmp_path: Path) -> None:
    hint = hint_of(tmp_path, {"prompt": "x"}, {"prompt": "id"})
    assert hint == "leave out --map prompt=id: it takes the prompts away"
    hint = hint_of(tmp_path, {"my_prompt": "x", "words": "y"}, {"my_prompt": "negative_prompt"})
    assert hint == "name it with --map words=prompt"
    assert hint_of(tmp_path, {"promt": "x", "words": "y"}, {}) == "did you mean --map promt=prompt?"


def test_an_output_folder_is_no_manifest_but_its_images_are(tmp_path: Path) -> None:
    run_job(open_ledger(tmp_path / "out", 3, 2), make_rows(3))
    with pytest.raises(ManifestError, match="is an output folder of offdiff") as caught:
        open_manifest([f"{tmp_path}/out/"])
    images = str(tmp_path / "out" / "images")
    assert images in str(caught.value.hint)
    rows = list(open_manifest([images]).read())
    assert [row.prompt for row in rows if isinstance(row, ManifestRow)] == [
        "picture 00000000",
        "picture 00000001",
        "picture 00000002",
    ]
