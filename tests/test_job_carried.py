"""The manifest's other columns come out as they went in, whatever they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_fakes import SMALL, Runner, read_schema, read_table, write_jsonl

from offline_diffusion.data.verify import verify


def run(source: Any, out: Path, **options: Any) -> list[dict[str, Any]]:
    summary = Runner().run(source, out, shard_size=2, **SMALL | options)
    assert (summary.num_quarantined_rows, summary.num_failed) == (0, 0)
    assert verify(out).problems == []
    assert datasets.load_dataset(str(out), "images", split="train").num_rows == summary.num_ok
    return read_table(out, "images")


MIXED: dict[str, list[Any]] = {
    "whole": [1, 2**63 - 1, None, -(2**63), 0],
    "wide": [1, 2**64 - 1, None, 0, 2],
    "half": [1, 1.5, None, 2, 3],
    "late": [None, None, None, None, "seen"],
    "flag": [True, False, None, True, True],
    "lists": [[1], [], None, [2, 3], [None]],
    "objects": [{"a": 1}, {"b": "x"}, None, {"a": 2, "b": "y"}, {}],
    "deep": [{"a": {"b": [{"c": 1}]}}, None, {"a": {"b": []}}, {"a": None}, {"a": {"b": [{"c": 2}]}}],
}
TEXT: dict[str, list[Any]] = {
    "unlike": [1, "two", None, [3], {"four": 4.5}],
    "huge": [2**70, 1, None, 2, 3],
    "text or object": ["a", {"b": 1}, "c", None, "d"],
    "list or object": [[1], {"b": 1}, [2], None, []],
}
"""No type of Arrow holds these: they are carried as text, what is no text as JSON."""


def test_json_values(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"a cup {n}"} | {name: values[n] for name, values in (MIXED | TEXT).items()}
        for n in range(5)
    ]
    del rows[1]["late"]
    images = run(write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out")
    for name, values in MIXED.items():
        ours = [row[name] for row in images]
        if name in ("objects", "deep"):
            ours = [without_nulls(value) for value in ours]
            values = [without_nulls(value) for value in values]
        assert ours == values, name
    for name, values in TEXT.items():
        for found, value in zip((row[name] for row in images), values, strict=True):
            assert found == value if isinstance(value, str | None) else json.loads(found) == value, name


def without_nulls(value: Any) -> Any:
    """A key that an object lacks is null in a column of one type."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def test_files_of_unlike_columns_and_types(tmp_path: Path) -> None:
    """A column null in one file, 64-bit text in the next, and another missing altogether."""
    tables = [
        pa.table(
            {"prompt": ["a"], "note": pa.array([None], pa.null()), "size_class": pa.array([1], pa.int8())}
        ),
        pa.table({"prompt": pa.array(["b"], pa.large_string()), "note": pa.array(["x"], pa.large_string())}),
        pa.table({"prompt": ["c"], "note": ["y"], "size_class": pa.array([300], pa.int64())}),
    ]
    sources = [str(tmp_path / f"{number}.parquet") for number in range(3)]
    for source, table in zip(sources, tables, strict=True):
        pq.write_table(table, source)
    images = run(sources, tmp_path / "out")
    assert [row["prompt"] for row in images] == ["a", "b", "c"]
    assert [row["note"] for row in images] == [None, "x", "y"]
    assert [row["size_class"] for row in images] == [1, None, 300]
    assert read_schema(tmp_path / "out", "images").field("note").type == pa.string()


def test_a_saved_dataset_with_pictures(tmp_path: Path) -> None:
    """An Image feature of the manifest is one in the output, too."""
    pictures = [PIL.Image.fromarray(np.full((4, 6, 3), shade, np.uint8)) for shade in (0, 100, 200)]
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "source": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
        }
    )
    values = {"prompt": ["a", "b", "c"], "source": pictures, "label": [0, 1, 0]}
    datasets.Dataset.from_dict(values, features=features).save_to_disk(tmp_path / "saved")
    run(tmp_path / "saved", tmp_path / "out")
    images = datasets.load_dataset(str(tmp_path / "out"), "images", split="train")
    assert images.features["source"] == datasets.Image()
    assert [np.array(picture)[0, 0, 0] for picture in images["source"][:]] == [0, 100, 200]
    assert images.features["label"] == features["label"]
    assert images["label"][:] == [0, 1, 0]


@pytest.mark.parametrize("name", ["sha256", "row", "image_index", "image"])
def test_names_of_our_own_columns(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "a", name: "theirs", f"{name}_carried": "other"}]
    images = run(write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out")
    theirs = [value for column, value in images[0].items() if column != name]
    assert theirs.count("theirs") == 1
    assert theirs.count("other") == 1
    assert images[0][name] != "theirs"


def test_names_that_differ_in_case_or_are_odd(tmp_path: Path) -> None:
    row = {"prompt": "a", "Tag": "1", "tag": "2", "a b": "3", "ü": "4", "a.b": "5", "": "6", "__class__": "7"}
    (image,) = run(write_jsonl(tmp_path / "m.jsonl", [row]), tmp_path / "out")
    assert {name: image[name] for name in row} == row
