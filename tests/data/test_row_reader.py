"""Rows by range in any order: the same rows as one pass gives, without passing over all of them."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifest_fakes import opened

from offline_diffusion.data.manifest import Manifest
from offline_diffusion.data.readers import files, lines
from offline_diffusion.data.readers.places import ROWS_A_PLACE
from offline_diffusion.data.row_reader import RowReader
from offline_diffusion.data.rows import RowFault
from offline_diffusion.data.scan import scan

NUM_ROWS = 3 * ROWS_A_PLACE + 77
KINDS = ("jsonl", "jsonl.gz", "csv", "txt", "json", "one.parquet", "many.parquet")


def prompt(number: int) -> str:
    return f"ä cup, no. {number}" + "!" * (number % 50)


def write(folder: Path, kind: str) -> Path:
    """Rows of unlike length; blank lines, a BOM and cells of two lines where the format has them."""
    path, numbers = folder / f"m.{kind}", range(NUM_ROWS)
    if kind.startswith("jsonl"):
        lines = [json.dumps({"prompt": prompt(n)}) + ("\n\n" if n % 7 == 0 else "\r\n") for n in numbers]
        text = "".join(lines).encode()
        path.write_bytes(gzip.compress(text) if kind.endswith("gz") else b"\xef\xbb\xbf" + text)
    elif kind == "csv":
        rows = [f'"{prompt(n)}","two{" " if n % 3 else chr(10)}lines"\n' for n in numbers]
        path.write_text("prompt,note\n" + "".join(rows), encoding="utf-8")
    elif kind == "txt":
        path.write_text("".join(prompt(n) + "\n" for n in numbers), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps([prompt(n) for n in numbers]))
    else:
        table = pa.table({"prompt": [prompt(n) for n in numbers]})
        pq.write_table(table, path, row_group_size=NUM_ROWS if kind == "one.parquet" else 100)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifests")
    for kind in KINDS:
        write(folder, kind)
    return folder


def shards(size: int) -> list[range]:
    return [range(start, min(start + size, NUM_ROWS)) for start in range(0, NUM_ROWS, size)]


def check(manifest: Manifest, order: list[range]) -> None:
    reader, numbers = RowReader(manifest), [item.line for item in manifest.read()]
    for wanted in order:
        rows = reader.read(wanted)
        assert [row.row for row in rows] == list(wanted)
        assert [getattr(row, "prompt", None) for row in rows] == [prompt(n) for n in wanted]
        assert [row.line for row in rows] == [numbers[n] for n in wanted]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["ascending", "every third", "random", "descending"])
def test_every_row_is_the_one_of_its_number(folder: Path, kind: str, order: str) -> None:
    ranges = shards(150)
    if order == "random":
        random.Random(5).shuffle(ranges)
    elif order == "every third":
        ranges = ranges[1::3] + ranges[::3]
    elif order == "descending":
        ranges.reverse()
    check(opened(folder / f"m.{kind}"), ranges)


@given(st.lists(st.integers(0, NUM_ROWS - 1), max_size=8), st.integers(1, 60))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_over_files_of_several_kinds(folder: Path, starts: list[int], size: int) -> None:
    kinds = ("csv", "many.parquet", "jsonl", "txt")
    manifest = opened(*(folder / f"m.{kind}" for kind in kinds))
    reader = RowReader(manifest)
    for number, start in enumerate(starts):
        wanted = range((number * 3 % 4) * NUM_ROWS + start, (number * 3 % 4) * NUM_ROWS + start + size)
        rows = reader.read(wanted)
        assert [row.row for row in rows] == [n for n in wanted if n < 4 * NUM_ROWS]
        assert [getattr(row, "prompt", None) for row in rows] == [prompt(row.row % NUM_ROWS) for row in rows]


def count_items(monkeypatch: pytest.MonkeyPatch, manifest: Manifest) -> list[int]:
    """The rows that are read of a manifest of one text file from now on, those passed over included."""
    counts: list[int] = []
    (file,) = manifest.files
    items = type(file).items  # type: ignore[attr-defined]

    def counted(self: Any, stream: Any, place: Any) -> Any:
        for item in items(self, stream, place):
            counts.append(1)
            yield item

    monkeypatch.setattr(type(file), "items", counted)
    return counts


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt"])
def test_a_jump_to_where_one_has_been_passes_over_few_rows(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = opened(folder / f"m.{kind}")
    index = scan(manifest)
    assert manifest.can_jump
    fresh = opened(folder / f"m.{kind}")
    fresh.recall(index.places, index.row_counts)
    for known in (manifest, fresh):
        reader = RowReader(known)
        with monkeypatch.context() as patch:
            counts = count_items(patch, known)
            for start in (NUM_ROWS - 20, 600, NUM_ROWS - 300):
                assert len(reader.read(range(start, start + 20))) == 20
        assert len(counts) <= 3 * (ROWS_A_PLACE + 22) < NUM_ROWS


@pytest.mark.parametrize("kind", ["jsonl.gz", "json"])
def test_what_cannot_be_jumped_in_says_so(folder: Path, kind: str) -> None:
    assert not opened(folder / f"m.{kind}").can_jump
    assert not opened(folder / "m.jsonl", folder / f"m.{kind}").can_jump


def test_duplicates_are_faults_and_a_manifest_may_end_early(folder: Path) -> None:
    reader = RowReader(opened(folder / "m.jsonl"), duplicates={3})
    assert [isinstance(row, RowFault) for row in reader.read(range(2, 5))] == [False, True, False]
    assert len(reader.read(range(NUM_ROWS - 2, NUM_ROWS + 5))) == 2
    assert [row.row for row in reader.read(range(0, 2))] == [0, 1]


def test_a_file_that_was_not_read_to_its_end_has_no_known_length(folder: Path) -> None:
    manifest = opened(folder / "m.jsonl", folder / "m.txt")
    assert len(list(manifest.read([range(3)]))) == 3
    assert manifest.known_row_counts() == {}
    (row,) = RowReader(manifest).read(range(NUM_ROWS + 4, NUM_ROWS + 5))
    assert (row.row, row.line, getattr(row, "prompt", None)) == (NUM_ROWS + 4, 5, prompt(4))
    list(manifest.read())
    assert manifest.known_row_counts() == {0: NUM_ROWS, 1: NUM_ROWS}


def test_rows_behind_one_that_is_too_long_are_jumped_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (files, lines):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    path = tmp_path / "m.jsonl"
    texts = (f"cup {n}{'!' * 450 * (n == 5)}" for n in range(NUM_ROWS))
    path.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    manifest = opened(path)
    assert [isinstance(row, RowFault) for row in manifest.read()][4:7] == [False, True, False]
    (row,) = RowReader(manifest).read(range(NUM_ROWS - 9, NUM_ROWS - 8))
    assert (row.line, getattr(row, "prompt", None)) == (NUM_ROWS - 8, f"cup {NUM_ROWS - 9}")
