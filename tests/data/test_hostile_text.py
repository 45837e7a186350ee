"""Text manifests made to do harm: memory and time stay bounded, and the limit is named."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import zstandard
from manifest_fakes import good_rows, items, only_fault, opened, scan_peak_mib, write_jsonl

from offline_diffusion.data.carried import CarriedTypes
from offline_diffusion.data.readers import delimited, document, files
from offline_diffusion.data.readers.base import RowCursor
from offline_diffusion.data.readers.json_text import MAX_LEVELS, is_too_deep
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.scan import scan
from offline_diffusion.data.validate import validate
from offline_diffusion.errors import ManifestError

ROW = b'{"prompt": "a"}\n'
SMALL_MIB = 40
"""What a bomb may cost beyond an ordinary manifest: one row of the longest, read, cut and told."""

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.fixture(scope="module")
def ordinary_mib(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Peak memory of scanning a small manifest with one row of the longest that is taken."""
    row = json.dumps({"prompt": "a", "note": "x" * (files.MAX_LINE_BYTES - 100)}).encode() + b"\n"
    path = tmp_path_factory.mktemp("ordinary") / "rows.jsonl"
    path.write_bytes(row + ROW)
    return scan_peak_mib(path, 2)


@pytest.mark.parametrize("codec", COMPRESS)
def test_a_bomb_of_one_line_costs_its_row(tmp_path: Path, codec: str, ordinary_mib: int) -> None:
    """80 MiB in one line; would catch a reader that collects a line before it looks at its length."""
    path = tmp_path / f"rows.jsonl.{codec}"
    path.write_bytes(COMPRESS[codec](ROW + b'{"prompt": "' + b"x" * (80 * 2**20) + b'"}\n' + ROW))
    assert path.stat().st_size * 900 < 80 * 2**20
    assert "is over 16777216 bytes long" in only_fault(path).reason
    assert scan_peak_mib(path, 3) <= ordinary_mib + SMALL_MIB


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt", "rows.json"])
def test_a_row_without_end_stops_the_job(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a reader that passes over bytes for as long as they come."""
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 2**20)
    for module in (files, document):
        monkeypatch.setattr(module, "MAX_PASSED_BYTES", 4 * 2**20)
    starts = {"rows.jsonl": ROW, "rows.csv": b"prompt,x\na,b\n", "rows.txt": b"a\n", "rows.json": b'["a", "'}
    path = tmp_path / name
    path.write_bytes(gzip.compress(starts[name] + b"x" * 2**23))
    with pytest.raises(ManifestError, match=r"rows\.\w+: .*does not end within 4194304 bytes"):
        items(path)


def test_a_file_that_holds_itself_is_refused(tmp_path: Path) -> None:
    """Peeling off layers of compression would never end for a gzip quine; here there are many."""
    content = ROW
    for layer in range(files.MAX_LAYERS + 1):
        content = gzip.compress(content)
        (tmp_path / f"{layer + 1}.jsonl.gz").write_bytes(content)
    assert len(good_rows(tmp_path / f"{files.MAX_LAYERS}.jsonl.gz")) == 1
    with pytest.raises(ManifestError, match="it is compressed more than 3 times over"):
        opened(tmp_path / f"{files.MAX_LAYERS + 1}.jsonl.gz")


def test_an_xz_file_may_not_ask_for_gigabytes(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1536 * 2**20}]
    ordinary = lzma.compress(ROW, preset=0)
    # The dictionary's size is one byte of the block's header, which has a sum of its own: so both are made.
    asking = _xz_with_dictionary_of(ordinary, filters[0]["dict_size"])
    (tmp_path / "rows.jsonl.xz").write_bytes(asking)
    with pytest.raises(ManifestError, match=r"rows\.jsonl\.xz: cannot be read: Memory usage limit exceeded"):
        opened(tmp_path / "rows.jsonl.xz")


def _xz_with_dictionary_of(raw: bytes, num_bytes: int) -> bytes:
    """The file with another dictionary size: the byte after the filter's id 0x21 and its length 1."""
    import zlib

    codes = {(2 | (bits & 1)) << (bits // 2 + 11): bits for bits in range(40)}
    start, size = 12, (raw[12] + 1) * 4
    header = bytearray(raw[start : start + size - 4])
    header[header.index(b"\x21\x01") + 2] = codes[num_bytes]
    return raw[:start] + bytes(header) + zlib.crc32(header).to_bytes(4, "little") + raw[start + size :]


def test_xz_is_read_as_the_standard_library_reads_it(tmp_path: Path) -> None:
    rows = b"".join(b'{"prompt": "view %d"}\n' % n for n in range(20_000))
    first, second = lzma.compress(rows[:200_000]), lzma.compress(rows[200_000:])
    with lzma.open(io.BytesIO(first + second)) as stream:
        assert stream.read() == rows
    path = tmp_path / "rows.jsonl.xz"
    for padding in (
        b"",
        b"\0" * 8,
    ):  # the format allows padding; the standard library ends there and says nothing
        path.write_bytes(first + padding + second + padding)
        assert [row.prompt for row in good_rows(path)] == [f"view {n}" for n in range(20_000)]
    path.write_bytes(first + b"something else")
    with pytest.raises(ManifestError, match="cannot be read"):
        items(path)


def test_many_long_rows_are_not_collected(tmp_path: Path, ordinary_mib: int) -> None:
    """The first 200 rows are looked at before any work; 20 of 8 MiB must not be in memory together."""
    row = json.dumps({"prompt": "a", "note": "x" * (8 * 2**20)}).encode() + b"\n"
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(zstandard.compress(row * 20))
    assert scan_peak_mib(path, 20) <= ordinary_mib + SMALL_MIB


# --- JSON -------------------------------------------------------------------------------------


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("levels", [MAX_LEVELS, 100_000])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_values_nested_too_deep_cost_their_row(tmp_path: Path, levels: int, name: str) -> None:
    faulty = f'{{"prompt": "a", "x": {nested(levels)}}}'
    rows = ['{"prompt": "b"}', faulty, '{"prompt": "c"}']
    text = "\n".join(rows) if name == "rows.jsonl" else f"[{','.join(rows)}]"
    (tmp_path / name).write_text(text)
    assert "is nested in more than 200 levels" in only_fault(tmp_path / name).reason
    assert scan(opened(tmp_path / name)).num_rows == 3


def test_the_deepest_value_that_is_taken_can_be_written(tmp_path: Path) -> None:
    """Python's own limit would depend on how deep the caller is: what validates must also run."""
    from offline_diffusion.data.carried import carried_array

    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "a", "x": {nested(MAX_LEVELS - 1)}}}\n')
    [row] = good_rows(path)
    array = carried_array([row.carried["x"]], scan(opened(path)).carried_schema.field("x").type)
    assert json.loads(array[0].as_py()) == row.carried["x"]


def test_brackets_in_text_are_no_levels() -> None:
    for text in ('["' + "[" * 300 + '"]', r'["\"' + "[" * 300 + r'\\"]', '["' + "[{" * 300 + '", {}]'):
        json.loads(text)
        assert not is_too_deep(text.encode())
    assert is_too_deep(("[" + '"]",' + nested(MAX_LEVELS) + "]").encode())
    assert not is_too_deep(("[" + "[]," * 999 + "[]]").encode())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("NaN", "NaN is not a number in JSON"),
        ("-Infinity", "-Infinity is not a number in JSON"),
        ("1e999", "1e999 is too large for a number"),
        ("[-1" + "0" * 400 + ".5]", "is too large for a number"),
        ("9" * 5000, "holds an integer of too many digits"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (r'"\ud800"', "holds half of a surrogate pair"),
        (r'{"k": ["\udfff"]}', "holds half of a surrogate pair"),
        (r'{"\ud800": 1}', "holds half of a surrogate pair"),
    ],
)
def test_what_json_cannot_say_costs_its_row(tmp_path: Path, value: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", "x": {value}}}\n')
    fault = only_fault(path)
    assert reason in fault.reason
    assert len(str(fault)) < 1000
    assert scan(opened(path)).num_faults == 1


def test_a_column_whose_name_no_file_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "\\ud800": 1}\n')
    assert only_fault(path).reason == "holds half of a surrogate pair, which is no character"
    assert scan(opened(path)).carried_schema.names == []


def test_a_repeated_key_among_many_is_found_at_once(tmp_path: Path) -> None:
    """Would catch a search that looks at all keys for every key: that takes hours here."""
    keys = ", ".join(f'"k{n}": 1' for n in range(300_000))
    path = tmp_path / "rows.jsonl"
    path.write_text(
        f'{{"prompt": "a"}}\n{{"prompt": "b", "x": {{{keys}, "{"z" * 10_000}": 1, "{"z" * 10_000}": 2}}}}\n'
    )
    started = time.monotonic()
    fault = only_fault(path)
    assert "occurs twice" in fault.reason
    assert len(fault.reason) < 300
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_two_hundred_thousand_columns(tmp_path: Path, name: str) -> None:
    """A nameless column gets a name; would catch comparing every column with every other."""
    delimiter = "," if name.endswith("csv") else "\t"
    (tmp_path / name).write_text("prompt" + delimiter * 200_000 + "\na" + delimiter * 200_000 + "\n")
    started = time.monotonic()
    with pytest.raises(ManifestError, match="over 4096 different columns to carry"):
        opened(tmp_path / name)
    assert time.monotonic() - started < 6


def test_rows_that_never_have_the_same_columns(tmp_path: Path) -> None:
    """Would catch keeping what every set of columns is read as: 800 rows of 1,000 columns took 95 MB."""
    path = tmp_path / "rows.jsonl"
    rows = (
        {"prompt": "a"} | {f"c{(start + n) % 4000}": 0 for n in range(1000)} for start in range(0, 4000, 2)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in islice(rows, 800)))
    process = psutil.Process()
    manifest = opened(path)
    before = process.memory_info().rss
    assert sum(1 for _ in manifest.read()) == 800
    assert process.memory_info().rss - before < 50 * 2**20


def test_names_of_objects_in_objects_are_not_collected_without_limit() -> None:
    """Would catch a tree of names that grows with the manifest: 256 names in 256 names in …"""
    types = CarriedTypes()
    process = psutil.Process()
    before = process.memory_info().rss
    for outer in range(200):
        types.observe({"tree": {f"a{outer}": {f"b{n}": {"c": {"d": n}} for n in range(250)}}, "tag": "x"})
    assert process.memory_info().rss - before < 50 * 2**20
    assert [(field.name, str(field.type)) for field in types.schema()] == [
        ("tree", "string"),
        ("tag", "string"),
    ]


# --- CSV --------------------------------------------------------------------------------------


def test_a_quote_that_stays_open_is_looked_for_in_one_go(tmp_path: Path) -> None:
    """Would catch parsing all lines so far again with each more: 1,000 lines of 8 kB, for every row."""
    line = b'"' + b'""' * 4000 + b"\n"
    path = tmp_path / "rows.csv"
    path.write_bytes(b'prompt,x\na,"' + line[1:] + line[1:] * 999 + b"b,c\n")
    started = time.monotonic()
    found = list(islice(opened(path).read(), 3))
    assert [isinstance(item, RowFault) for item in found] == [True] * 3
    assert time.monotonic() - started < 20


def test_records_of_many_lines_have_a_limit(tmp_path: Path) -> None:
    lines = delimited.MAX_LINES_A_RECORD
    for extra, is_good in ((0, True), (2, False)):
        path = tmp_path / f"{extra}.csv"
        path.write_text('prompt,x\na,"' + "y\n" * (lines - 1 + extra) + 'z"\nb,c\n')
        first = next(opened(path).read())
        assert isinstance(first, ManifestRow) == is_good
        if isinstance(first, ManifestRow):
            assert first.carried["x"] == "y\n" * (lines - 1) + "z"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_refused_by_name(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("prompt,x\na red cup,1\n".encode(encoding))
    with pytest.raises(ManifestError, match=r"is UTF-16\nhint: convert|is neither text nor Parquet"):
        opened(path)


def test_encodings_mixed_in_one_file_cost_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(
        b"\xef\xbb\xbfprompt,x\ncaf\xc3\xa9,1\ncaf\xe9,2\nz\x00y,3\n\xff\xfea\x00,4\n".ljust(600, b"\n")
    )
    with pytest.raises(ManifestError, match="is neither text nor Parquet"):
        opened(path)
    path.write_bytes(b"\xef\xbb\xbfprompt,x\ncaf\xc3\xa9,1\ncaf\xe9,2\nb,3\n")
    first, fault, last = items(path)
    assert isinstance(first, ManifestRow)
    assert isinstance(last, ManifestRow)
    assert (first.prompt, last.prompt) == ("café", "b")
    assert isinstance(fault, RowFault)
    assert "is not UTF-8" in fault.reason


# --- what a row may not be --------------------------------------------------------------------


def test_huge_fields_cost_their_row(tmp_path: Path) -> None:
    """A prompt and a carried value of 100 MB each, and a line of 50 MB."""
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as stream:
        stream.write(ROW)
        for key in (b"prompt", b"note"):
            stream.write(b'{"prompt": "a", "' + key + b'": "' + b"x" * 100_000_000 + b'"}\n')
        stream.write(b"[" + b"0," * 25_000_000 + b"0]\n" + ROW)
    found = items(path)
    assert [isinstance(item, RowFault) for item in found] == [False, True, True, True, False]
    assert {fault.reason for fault in found[1:4]} == {"is over 16777216 bytes long"}  # type: ignore[union-attr]


def test_a_fault_is_one_short_line_whatever_the_row_holds(tmp_path: Path) -> None:
    """Terminal codes, line breaks and megabytes must not reach the user's terminal."""
    values = ["\x1b[2J\x1b]0;owned\x07", "a\nb", "\u202egnp.exe", "x" * 3_000_000]
    rows: list[Any] = [{"prompt": "a", "seed": value} for value in values]
    rows += [{"prompt": "a", "id": f"{value}\x00"} for value in values]
    path = write_jsonl(tmp_path / "a\x1b[31m\nb.jsonl", rows)
    faults = list(validate(opened(tmp_path), capabilities=None, defaults=None))  # type: ignore[arg-type]
    assert len(faults) == len(rows)
    for fault in faults:
        assert str(fault).isprintable()
        assert len(str(fault)) < 600
    assert path


def test_ranges_are_drawn_when_their_turn_comes() -> None:
    """A million single rows must be no list of a million ranges."""
    drawn = []

    def single_rows() -> Any:
        for row in range(0, 2_000_000, 2):
            drawn.append(row)
            yield range(row, row + 1)

    cursor = RowCursor(single_rows())
    assert cursor.wants(0)
    assert cursor.within(0, 10) == [range(row, row + 1) for row in range(0, 10, 2)]
    assert cursor.wants_any(10, 12)
    assert not cursor.wants_any(11, 12)
    assert len(drawn) < 20
