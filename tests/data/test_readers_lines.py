"""JSONL, plain prompts and folders of prompts."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifest_fakes import good_rows, items, opened, prompts, write_jsonl

from offline_diffusion.data.readers.files import MAX_LINE_BYTES
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.errors import ManifestError

ROWS = [{"prompt": f"prompt {n} é", "seed": 2**64 - 1 - n} for n in range(300)]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def pzstd(data: bytes) -> bytes:
    """As pzstd writes: a skippable frame before each of several frames."""
    half = len(data) // 2
    skip = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    return b"".join(skip + zstandard.compress(part) for part in (data[:half], data[half:]))


def two_members(data: bytes) -> bytes:
    return gzip.compress(data[:1000]) + gzip.compress(data[1000:])


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "gzip of two members": two_members,
    "zstd": zstandard.compress,
    "pzstd": pzstd,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd in gzip": lambda data: gzip.compress(zstandard.compress(data)),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".txt", ".parquet", ""])
def test_jsonl_is_known_by_content_whatever_its_suffix(tmp_path: Path, codec: str, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(CODECS[codec](TEXT))
    found = good_rows(path)
    assert [(row.prompt, row.params.seed, row.line) for row in found] == [
        (row["prompt"], row["seed"], index + 1) for index, row in enumerate(ROWS)
    ]


@pytest.mark.parametrize("codec", ["gzip", "zstd", "bz2", "xz"])
@pytest.mark.parametrize("share", [0.5, 0.999])
def test_a_cut_off_stream_is_an_error_that_names_the_file(tmp_path: Path, codec: str, share: float) -> None:
    # Over one block of bzip2, 900 kB, so that some rows can be read.
    rows = "".join(json.dumps({"prompt": f"{n * n:x}" * 3}) + "\n" for n in range(45_000))
    data = CODECS[codec](rows.encode())
    path = tmp_path / "cut.jsonl"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ManifestError, match=r"cut\.jsonl.*\nhint: ") as caught:
        items(path)
    assert share < 0.9 or re.search(r"beyond about row \d{5}", str(caught.value))


def test_missing_codec_is_named_with_its_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(zstandard.compress(TEXT))
    (tmp_path / "rows.xz").write_bytes(lzma.compress(TEXT))
    monkeypatch.setattr("offline_diffusion.data.readers.files.codec_works", lambda codec: False)
    with pytest.raises(ManifestError, match=r"rows\.jsonl: is compressed with zstd.*\nhint: pip install"):
        opened(tmp_path / "rows.jsonl")
    with pytest.raises(ManifestError, match="compressed with xz"):
        opened(tmp_path / "rows.xz")


def test_bom_crlf_blank_lines_and_a_last_line_without_ending(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\r\n{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}\n\n{"prompt": "c"}')
    assert [(row.row, row.line, row.prompt) for row in good_rows(path)] == [
        (0, 2, "a"),
        (1, 5, "b"),
        (2, 7, "c"),
    ]


BROKEN_LINES: dict[str, bytes] = {
    "not JSON": b"{prompt: a}",
    "cut off": b'{"prompt": "a',
    "two objects": b'{"prompt": "a"} {"prompt": "b"}',
    "NaN": b'{"prompt": "a", "cfg": NaN}',
    "Infinity": b'{"prompt": "a", "note": -Infinity}',
    "a key twice": b'{"prompt": "a", "seed": 1, "seed": 2}',
    "an inner key twice": b'{"prompt": "a", "note": {"k": 1, "k": 2}}',
    "not UTF-8": b'{"prompt": "caf\xe9"}',
    "a deep list": b'{"prompt": "a", "note": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "an open deep list": b"[" * 100_000,
    "a long integer": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "a list": b'["a"]',
    "a string": b'"a"',
    "a number": b"1",
    "null": b"null",
    "half a surrogate pair": rb'{"prompt": "\ud800"}',
    "half a surrogate pair, carried": rb'{"prompt": "a", "note": ["\udc00"]}',
    "half a surrogate pair, as a name": rb'{"prompt": "a", "\udc00": 1}',
    "NUL": b"\x00\x00",
}


@pytest.mark.parametrize("name", BROKEN_LINES)
def test_a_broken_line_costs_only_its_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "before"}\n' + BROKEN_LINES[name] + b'\n{"prompt": "after"}\n')
    if name == "NUL":  # at the start of a file NUL means that it is no text
        path.write_bytes(b'{"prompt": "before"}\n' * 20_000 + BROKEN_LINES[name] + b'\n{"prompt": "after"}\n')
    *before, fault, after = items(path)
    assert isinstance(fault, RowFault), fault
    assert isinstance(after, ManifestRow)
    assert all(isinstance(row, ManifestRow) for row in before)
    assert (fault.row, fault.line, after.row) == (len(before), len(before) + 1, len(before) + 1)
    assert fault.id == f"{fault.row:08d}"
    assert fault.reason
    assert fault.content_hash
    assert str(fault).isprintable()
    assert len(str(fault)) < 1000
    str(fault).encode()


def test_a_line_without_end_is_a_fault_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as stream:
        stream.write(b'{"prompt": "a"}\n{"prompt": "')
        for _ in range(3):
            stream.write(b"x" * MAX_LINE_BYTES)
        stream.write(b'"}\n{"prompt": "b"}\n')
    first, fault, last = items(path)
    assert isinstance(first, ManifestRow)
    assert isinstance(fault, RowFault)
    assert "bytes long" in fault.reason
    assert isinstance(last, ManifestRow)
    assert (last.row, last.line) == (2, 3)


def test_many_broken_lines_first(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"oops\n" * 5 + b'{"prompt": "a"}\n')
    assert [isinstance(item, RowFault) for item in items(path)] == [True] * 5 + [False]


def test_not_one_readable_row_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"a cup of coffee\na toy dinosaur\n")
    with pytest.raises(ManifestError, match="line 1 is not valid JSON"):
        opened(path)


texts = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(json_values, min_size=1, max_size=8))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_carried_json_values_come_through_unchanged(tmp_path: Path, values: list[Any]) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "note": value} for value in values])
    assert [row.carried["note"] for row in good_rows(path)] == values


@given(st.lists(st.binary(max_size=40), max_size=10))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_one_item_per_line_and_no_exception(tmp_path: Path, lines: list[bytes]) -> None:
    # NUL in its first part means that a file is no text.
    lines = [line.translate(None, b"\n\r\0") for line in lines]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + b"\n".join(lines) + b"\n")
    found = items(path)
    assert len(found) == 1 + sum(bool(line.strip()) for line in lines)
    assert [item.row for item in found] == list(range(len(found)))


def test_prompts_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(
        "\ufeffa cat, sitting\r\n\r\n  two  spaces \r\n \t\r\nein Schloß\n{red|blue} car".encode()
    )
    found = good_rows(path)
    assert [row.prompt for row in found] == [
        "a cat, sitting",
        "  two  spaces ",
        "ein Schloß",
        "{red|blue} car",
    ]
    assert [row.line for row in found] == [1, 3, 5, 6]
    assert all(row.carried == {} for row in found)


def test_a_prompt_line_that_is_not_utf8_or_too_long_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"good\ncaf\xe9\n" + b"x" * (2**20 + 1) + b"\nlast\n")
    found = items(path)
    assert [isinstance(item, RowFault) for item in found] == [False, True, True, False]
    assert isinstance(found[1], RowFault)
    assert found[1].column == "prompt"


def test_a_folder_of_prompts(tmp_path: Path) -> None:
    for name, text in {"b": "second\n", "a": "\ufefffirst\r\nline", "10": "ten", "sub/c": "below"}.items():
        path = tmp_path / "dpg" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (tmp_path / "dpg" / ".hidden.txt").write_text("no")
    found = good_rows(tmp_path / "dpg")
    assert [(row.id, row.prompt) for row in found] == [
        ("10", "ten"),
        ("a", "first\r\nline"),
        ("b", "second"),
        ("sub/c", "below"),
    ]
    assert [Path(row.file) for row in found] == [tmp_path / "dpg" / f"{row.id}.txt" for row in found]
    manifest = opened(tmp_path / "dpg")
    assert any("4 .txt files" in note for note in manifest.notes)
    assert [row.id for row in manifest.read([range(1, 3)])] == ["a", "b"]


def test_faulty_prompt_files_cost_only_their_rows(tmp_path: Path) -> None:
    folder = tmp_path / "dpg"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\n")
    (folder / "b.txt").write_bytes(b"caf\xe9")
    (folder / "c.txt").write_bytes(b"")
    (folder / "d.txt").write_bytes(b"x" * (2**20 + 5))
    (folder / "e.txt").write_bytes(b"good")
    found = items(folder)
    assert [isinstance(item, RowFault) for item in found] == [True, True, True, True, False]
    assert [Path(item.file).name for item in found] == [f"{name}.txt" for name in "abcde"]


def test_prompts_of_the_glob_of_a_folder_are_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("three\n")
    assert prompts(tmp_path / "*.txt") == ["one", "two", "three"]
