"""A manifest as one stream of rows; what must be refused before any work; fingerprints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifest_fakes import ROOT, good_rows, items, only_fault, opened, prompt_set, prompts, write_jsonl

from offline_diffusion.data.manifest import same_manifest
from offline_diffusion.data.readers.base import RowCursor
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.scan import scan
from offline_diffusion.errors import ManifestError

# --- ranges -----------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path) -> list[str]:
    """Ten rows in five files of five kinds, with a fault in row 3."""
    sources = [write_jsonl(tmp_path / "a.jsonl", [{"prompt": "0"}, {"prompt": "1"}, {"prompt": "2"}])]
    (tmp_path / "b.csv").write_text("prompt,note\n ,x\n4,y\n")
    (tmp_path / "c.txt").write_text("5\n\n6\n")
    (tmp_path / "d.json").write_text('["7", "8"]')
    pq.write_table(pa.table({"prompt": ["9"]}), tmp_path / "e.parquet")
    return sources + [str(tmp_path / name) for name in ("b.csv", "c.txt", "d.json", "e.parquet")]


def test_rows_are_numbered_over_all_files_with_faulty_ones(mixed: list[str]) -> None:
    found = items(*mixed)
    assert [item.row for item in found] == list(range(10))
    assert [item.row for item in found if isinstance(item, RowFault)] == [3]
    assert all(row.prompt == str(row.row) for row in found if isinstance(row, ManifestRow))


edges = st.lists(st.integers(0, 13), max_size=8, unique=True).map(sorted)


@given(edges)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_ranges_give_the_same_rows_as_a_whole_read(mixed: list[str], edges: list[int]) -> None:
    ranges = [range(*pair) for pair in zip(edges[::2], edges[1::2], strict=False)]
    whole = items(*mixed)
    wanted = [row for part in ranges for row in part if row < 10]
    assert list(opened(*mixed).read(ranges)) == [whole[row] for row in wanted]


def test_ranges_must_be_sorted_and_disjoint(mixed: list[str]) -> None:
    manifest = opened(*mixed)
    for ranges in ([range(3, 5), range(1, 2)], [range(0, 4), range(3, 6)]):
        with pytest.raises(ValueError, match="sorted and disjoint"):
            list(manifest.read(ranges))
    assert list(manifest.read([])) == []
    assert list(manifest.read([range(5, 5)])) == []


def test_limit_ends_the_manifest(mixed: list[str]) -> None:
    assert [item.row for item in items(*mixed, limit=6)] == [0, 1, 2, 3, 4, 5]
    assert items(*mixed, limit=0) == []
    assert [item.row for item in opened(*mixed, limit=6).read([range(4, 9)])] == [4, 5]


def test_reading_ends_after_the_last_range(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": str(n)} for n in range(10)])
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "b"}])
    manifest = opened(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").unlink()  # it would be missed
    assert len(list(manifest.read([range(10)]))) == 10


def test_rows_of_repeated_ids_become_faults(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}])
    first, second = opened(path).read(duplicates={1})
    assert isinstance(first, ManifestRow)
    assert isinstance(second, RowFault)
    assert (second.column, second.value, second.id) == ("id", "1", "1")
    assert second.content_hash


def test_cursor_parts() -> None:
    cursor = RowCursor([range(2, 5), range(7, 20), range(30, 31)])
    assert cursor.within(0, 2) == []
    assert cursor.within(2, 8) == [range(2, 5), range(7, 8)]
    assert cursor.within(8, 40) == [range(8, 20), range(30, 31)]
    assert not cursor.done
    assert not cursor.wants(31)
    assert cursor.done


# --- faults of a file -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (["promt", "seed"], r"did you mean --map promt=prompt\?"),
        (["image_prompt", "seed"], r"did you mean --map image_prompt=prompt\?"),
        (["seed", "width"], r"name it with --map seed=prompt"),
    ],
)
def test_no_prompt_column_stops_before_any_work(tmp_path: Path, columns: list[str], hint: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [dict.fromkeys(columns, "1")])
    pq.write_table(pa.table({column: ["1"] for column in columns}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text(",".join(columns) + "\n1,2\n")
    good = write_jsonl(tmp_path / "good.jsonl", [{"prompt": "a"}])
    for name in ("a.jsonl", "a.parquet", "a.csv"):
        with pytest.raises(ManifestError, match=rf"{name}: has no prompt column.*\nhint: {hint}"):
            opened(good, tmp_path / name)


def test_a_file_without_rows_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(ManifestError, match=r"a\.parquet: holds no rows"):
        opened(tmp_path / "a.parquet")


def test_a_row_without_prompt_in_a_file_with_prompts_is_a_fault(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"seed": 1}, {"prompt": "a"}, {"text": "b"}])
    assert (only_fault(path).row, only_fault(path).column) == (0, "prompt")


# --- map --------------------------------------------------------------------------------------


def test_map_names_columns(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"beschreibung": "a", "saat": 7, "prompt_de": "x"}])
    [row] = good_rows(path, column_map={"beschreibung": "prompt", "saat": "seed"})
    assert (row.prompt, row.params.seed, row.carried) == ("a", 7, {"prompt_de": "x"})


def test_map_finds_the_header_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("beschreibung;saat\na,b;7\n")
    assert prompts(tmp_path / "a.csv", column_map={"beschreibung": "prompt"}) == ["a,b"]


def test_a_mapped_column_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,saat\na,7\n")
    with pytest.raises(ManifestError, match=r"no file has a column 'satt'\nhint: did you mean saat"):
        opened(tmp_path / "a.csv", column_map={"satt": "seed"})
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b", "saat": 1}])
    assert good_rows(path, column_map={"saat": "seed"})[1].params.seed == 1


def test_notes_are_told_once(tmp_path: Path) -> None:
    rows = [{"Prompt": "a", "heigth": 5}, {"Prompt": "b", "heigth": 5, "image": 1}, {"Prompt": "c"}]
    manifest = opened(write_jsonl(tmp_path / "a.jsonl", rows), write_jsonl(tmp_path / "b.jsonl", rows))
    assert len(list(manifest.read())) == 6
    assert manifest.notes == [
        "column 'Prompt' is read as prompt",
        "column 'heigth' is carried; did you mean height?",
        "column 'image' is carried as 'image_carried': the output has a column 'image' of its own",
    ]


# --- fingerprint ------------------------------------------------------------------------------


def manifests(tmp_path: Path, **options: Any) -> Any:
    return opened(tmp_path / "a.jsonl", tmp_path / "b.parquet", **options)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    pq.write_table(pa.table({"prompt": ["b"]}), tmp_path / "b.parquet")
    return tmp_path


def test_the_same_manifest(pair: Path) -> None:
    old = json.loads(json.dumps(manifests(pair).fingerprint()))
    assert same_manifest(old, manifests(pair)) == []
    os.utime(pair / "a.jsonl", ns=(1, 1))
    assert same_manifest(old, manifests(pair)) == []
    (pair / "moved").mkdir()
    for name in ("a.jsonl", "b.parquet"):
        (pair / name).rename(pair / "moved" / name)
    assert same_manifest(old, manifests(pair / "moved")) == []


def test_an_untouched_file_is_not_read_again(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = manifests(pair).fingerprint()
    new = manifests(pair)
    monkeypatch.setattr("offline_diffusion.data.readers.files.DataFile.digest", lambda file: 1 / 0)
    assert same_manifest(old, new) == []


def test_every_difference_is_named(pair: Path) -> None:
    old = manifests(pair, limit=5).fingerprint()
    write_jsonl(pair / "a.jsonl", [{"prompt": "A"}])  # as long as before
    os.utime(pair / "a.jsonl", ns=(1, 1))
    assert same_manifest(old, manifests(pair, limit=5)) == [f"{pair / 'a.jsonl'}: its content has changed"]
    differences = same_manifest(old, opened(pair / "a.jsonl", column_map={"prompt": "prompt"}))
    assert differences == [
        "it had 2 files, now 1",
        f"{pair / 'a.jsonl'}: its content has changed",
        "column_map was {}, now {'prompt': 'prompt'}",
        "limit was 5, now None",
    ]
    swapped = opened(pair / "b.parquet", pair / "a.jsonl", limit=5)
    assert len(same_manifest(old, swapped)) == 2


def test_a_renamed_prompt_file_is_another_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "dpg"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    old = opened(folder).fingerprint()
    assert same_manifest(old, opened(folder)) == []
    (folder / "a.txt").rename(folder / "b.txt")
    assert same_manifest(old, opened(folder)) == [f"{folder}: its content has changed"]


# --- real prompt sets -------------------------------------------------------------------------


def test_geneval_as_it_is() -> None:
    path = prompt_set("geneval_evaluation_metadata.jsonl")
    expected = [json.loads(line) for line in path.read_text().splitlines()]
    assert [{"prompt": row.prompt, **row.carried} for row in good_rows(path)] == expected
    assert opened(path).notes == []


def test_t2i_compbench_as_it_is() -> None:
    path = prompt_set("t2i_compbench_color_val.txt")
    assert prompts(path) == path.read_bytes().decode().split("\r\n")


def test_dpg_as_it_is() -> None:
    folder = prompt_set("dpg")
    expected = {path.stem: path.read_text() for path in sorted(folder.glob("*.txt"))}
    assert {row.id: row.prompt for row in good_rows(folder)} == expected


def test_one_of_every_fault(tmp_path: Path) -> None:
    """Every bad row is quarantined with its place, column, value and reason; every good one is there."""
    bad = [
        ('{"prompt": ""}', "prompt", ""),
        ('{"prompt": " "}', "prompt", " "),
        ('{"seed": 1}', "prompt", ""),
        ('{"prompt": 5}', "prompt", "5"),
        ('{"prompt": "x", "seed": -1}', "seed", "-1"),
        ('{"prompt": "x", "seed": 18446744073709551616}', "seed", "18446744073709551616"),
        ('{"prompt": "x", "seed": 1.5}', "seed", "1.5"),
        ('{"prompt": "x", "seed": "abc"}', "seed", "abc"),
        ('{"prompt": "x", "seed": true}', "seed", "true"),
        ('{"prompt": "x", "seed": [1]}', "seed", "[1]"),
        ('{"prompt": "x", "height": 0}', "height", "0"),
        ('{"prompt": "x", "size": "wide"}', "size", "wide"),
        ('{"prompt": "x", "steps": 0}', "steps", "0"),
        ('{"prompt": "x", "cfg": -2}', "cfg", "-2"),
        ('{"prompt": "x", "n": 0}', "n", "0"),
        ('{"prompt": "x", "id": ""}', "id", ""),
        ('{"prompt": "x", "negative_prompt": 3}', "negative_prompt", "3"),
        ('{"prompt": "x"', "", '{"prompt": "x"'),
        ("[]", "", "[]"),
    ]
    good = '{"prompt": "good", "seed": 9007199254740993}'
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{line}\n{good}\n" for line, _, _ in bad))
    found = items(path)
    faults, rest = found[::2], found[1::2]
    assert [row.params.seed for row in rest if isinstance(row, ManifestRow)] == [9007199254740993] * len(bad)
    for index, (fault, (_, column, value)) in enumerate(zip(faults, bad, strict=True)):
        assert isinstance(fault, RowFault)
        assert (fault.row, fault.line, fault.file) == (2 * index, 2 * index + 1, str(path))
        assert (fault.column, fault.value) == (column, value)
        assert fault.reason


# --- the samples ------------------------------------------------------------------------------

SAMPLES = sorted(path for path in (ROOT / "manifests").iterdir() if path.name != "README.md")


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_every_sample_runs_and_is_on_the_page(path: Path) -> None:
    index = scan(opened(path))
    assert index.num_rows > 1
    assert bool(index.num_faults) == (path.name == "faulty.jsonl")
    name = path.name + "/" * path.is_dir()
    assert f"`{name}`" in (ROOT / "manifests" / "README.md").read_text(encoding="utf-8")
