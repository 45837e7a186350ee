"""Parquet and Arrow files made to do harm, or damaged: a fault of a row or a file, in bounded memory.

pyarrow ends the process on some damaged metadata, so what must not happen is tried in a process of its own.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manifest_fakes import ROOT, good_rows, items, only_fault, opened, scan_peak_mib

from offline_diffusion.data.readers import arrow, parquet_bounds
from offline_diffusion.data.readers.parquet_bounds import ParquetBounds
from offline_diffusion.data.readers.thrift import ThriftError, read_struct
from offline_diffusion.data.rows import RowFault
from offline_diffusion.data.scan import scan
from offline_diffusion.errors import ManifestError

MIB = 2**20


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def repeated_value(num_rows: int, num_bytes: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), ["x" * num_bytes])


# --- files that expand ------------------------------------------------------------------------


def test_one_value_for_all_rows_is_not_multiplied(tmp_path: Path) -> None:
    """A kilobyte that stands for 800 MB; would catch batches sized by the mean of what is stored."""
    num_rows = 100
    columns = {"prompt": ["a"] * num_rows, "note": repeated_value(num_rows, 8 * MIB)}
    path = write(tmp_path / "bomb.parquet", columns, compression="zstd", dictionary_pagesize_limit=2**30)
    control = write(tmp_path / "one.parquet", {"prompt": ["a"], "note": ["x" * (8 * MIB)]})
    assert path.stat().st_size < 10_000
    assert scan_peak_mib(path, num_rows) <= scan_peak_mib(control, 1) + 3 * 64 + 50


def test_values_that_begin_as_the_one_before_are_not_multiplied(tmp_path: Path) -> None:
    num_rows = 100
    columns = {"prompt": ["a"] * num_rows, "note": ["x" * MIB] * num_rows}
    options = {
        "use_dictionary": False,
        "column_encoding": {"note": "DELTA_BYTE_ARRAY"},
        "compression": "zstd",
    }
    path = write(tmp_path / "rows.parquet", columns, **options)
    with path.open("rb") as stream:
        allowed = ParquetBounds(stream).batch_rows(0, stream)
    assert allowed * MIB <= 64 * MIB
    assert len(good_rows(path)) == num_rows


def test_a_dictionary_beyond_measure_is_refused(tmp_path: Path) -> None:
    columns = {"prompt": ["a"] * 3, "note": repeated_value(3, 65 * MIB)}
    path = write(tmp_path / "rows.parquet", columns, compression="zstd", dictionary_pagesize_limit=2**30)
    with pytest.raises(
        ManifestError, match=r"column note has a dictionary of \d+ bytes; at most 67108864 are"
    ):
        opened(path)


def test_rows_over_the_limit_are_faults_and_long_ones_below_are_kept(tmp_path: Path) -> None:
    notes = [b"a", b"x" * (arrow.MAX_ROW_BYTES + 1), b"y" * (20 * MIB), b"z" * (50 * MIB)]
    path = write(tmp_path / "rows.parquet", {"prompt": ["a"] * 4, "note": notes}, use_dictionary=False)
    found = items(path)
    assert [isinstance(item, RowFault) for item in found] == [False, True, False, False]
    assert found[1].reason == "is over 67108864 bytes long"  # type: ignore[union-attr]
    assert found[3].carried["note"] == notes[3]  # type: ignore[union-attr]


def test_a_prompt_of_a_hundred_megabytes_is_a_fault(tmp_path: Path) -> None:
    prompts = ["a", "x" * 50_000_000, "x" * 100_000_000]
    path = write(tmp_path / "rows.parquet", {"prompt": prompts}, use_dictionary=False)
    reasons = [item.reason for item in items(path)[1:]]  # type: ignore[union-attr]
    assert reasons == ["is 50000000 bytes long; at most 1048576 are allowed", "is over 67108864 bytes long"]


def test_long_lists_make_small_batches(tmp_path: Path) -> None:
    columns = {"prompt": ["a"] * 200, "list": [[0] * 200_000] * 200}
    path = write(tmp_path / "rows.parquet", columns, compression="zstd")
    with path.open("rb") as stream:
        allowed = ParquetBounds(stream).batch_rows(0, stream)
    assert allowed * 200_000 <= parquet_bounds.MAX_LIST_VALUES


def test_lists_of_no_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"prompt": ["a"] * 2, "o": [{"list": [0] * 2_000_000}, {"list": []}], "flat": [0, 0]}
    path = write(tmp_path / "rows.parquet", columns, compression="zstd")
    assert len(good_rows(path)) == 2
    monkeypatch.setattr(parquet_bounds, "MAX_PACKED_VALUES", 1_000_000)
    with pytest.raises(
        ManifestError, match=r"column o\.list\.list\.element has 20000\d+ values in \d+ bytes"
    ):
        opened(path)


def test_ordinary_files_are_read_in_whole_batches(tmp_path: Path) -> None:
    """Would catch limits that make every file slow."""
    columns = {
        "prompt": [f"a red cup, view {n}" for n in range(20_000)],
        "tag": [f"t{n % 7}" for n in range(20_000)],
        "s": [{"x": n, "y": "abc"} for n in range(20_000)],
    }
    path = write(tmp_path / "rows.parquet", columns, row_group_size=10_000)
    with path.open("rb") as stream:
        bounds = ParquetBounds(stream)
        assert min(bounds.batch_rows(group, stream) for group in range(2)) >= 50


def test_a_picture_with_an_absurd_header_is_carried_and_not_decoded(tmp_path: Path) -> None:
    """A PNG that claims 2,000,000,000 pixels a side: nobody opens it here."""
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 2_000_000_000, 2_000_000_000)
    features = datasets.Features({"prompt": datasets.Value("string"), "picture": datasets.Image()})
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "picture": [{"bytes": header, "path": None}, {"bytes": None, "path": "/dev/zero"}],
        },
        schema=features.arrow_schema,
    )
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    assert [row.carried["picture"] for row in good_rows(path)] == table["picture"].to_pylist()
    assert scan(opened(path)).num_faults == 0


# --- files that are damaged -------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns of many kinds in several row groups, with a sum over each page."""
    columns = {
        "id": [f"r{n}" for n in range(400)],
        "prompt": [f"a red cup, view {n}" for n in range(400)],
        "tags": [["a", "b"]] * 400,
        "o": [{"x": 1, "y": "z"}] * 400,
    }
    path = tmp_path_factory.mktemp("sound") / "rows.parquet"
    return write(path, columns, row_group_size=100, write_page_checksum=True, store_schema=False)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[: len(raw) // 2], "cannot be read as Parquet"),
        (lambda raw: raw[:-1], "cannot be read as Parquet"),
        (lambda raw: raw[:4], "cannot be read as Parquet"),
        (lambda raw: raw[:-8] + b"\xff\xff\xff\x7fPAR1", "cannot be read as Parquet"),
        (lambda raw: raw[:-8] + b"\x01\x00\x00\x00PAR1", "cannot be read as Parquet"),
        (lambda raw: raw[:-4] + b"PARE", "cannot be read as Parquet"),
        (lambda raw: b"NOPE" + raw[4:], "neither text nor Parquet"),
        (lambda raw: raw[:-8].replace(b"prompt", b"pro\xffpt") + raw[-8:], "cannot be read as Parquet"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(
    sound: Path, tmp_path: Path, damage: Any, message: str
) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(damage(sound.read_bytes()))
    with pytest.raises(ManifestError, match=rf"rows\.parquet: .*{message}"):
        items(path)


def test_a_flipped_bit_in_mid_file_is_no_other_prompt(tmp_path: Path) -> None:
    """The page's sum tells; without it the bit would be one of a prompt."""
    columns = {"prompt": [f"a red cup, view {n}" for n in range(400)]}
    options = {"row_group_size": 100, "compression": "none", "use_dictionary": False}
    path = write(tmp_path / "rows.parquet", columns, write_page_checksum=True, **options)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"view 250") + 5] ^= 1
    path.write_bytes(raw)
    found = []
    with pytest.raises(ManifestError, match=r"cannot be read beyond about row 2\d\d of it: .*CRC"):
        found.extend(opened(path).read())


_READ = """
import sys
from pathlib import Path
from offline_diffusion.data.manifest import open_manifest
from offline_diffusion.errors import OffdiffError
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        print(len(list(open_manifest([str(path)]).read())))
    except OffdiffError as error:
        print("error")
"""


def test_damaged_metadata_does_not_end_the_process(sound: Path, tmp_path: Path) -> None:
    """pyarrow aborts when it is asked for some numbers of a damaged footer; here it is not asked."""
    raw, rng = sound.read_bytes(), random.Random(0)
    footer = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    for index in range(600):
        damaged = bytearray(raw)
        damaged[rng.randrange(footer, len(raw) - 8)] = rng.randrange(256)
        (tmp_path / f"{index:04}.parquet").write_bytes(damaged)
    command = [sys.executable, "-c", _READ, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = done.stdout.split()
    assert len(told) == 600
    assert {"error", "400"} <= set(told)


def test_row_groups_must_have_the_rows_they_say(sound: Path, tmp_path: Path) -> None:
    """Else rows would be missing and nobody would know: Arrow reads as many as it is told."""
    raw = sound.read_bytes()
    footer = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    group = pq.ParquetFile(sound).metadata.row_group(0)
    # In a row group the total size comes before the number of rows: fields 2 and 3, both 64-bit.
    old = b"\x16" + _zigzag(group.total_byte_size) + b"\x16" + _zigzag(100)
    assert raw.count(old, footer) >= 1
    changed = raw[:footer] + raw[footer:].replace(old, old[: -len(_zigzag(100))] + _zigzag(99), 1)
    path = tmp_path / "rows.parquet"
    path.write_bytes(changed)
    with pytest.raises(ManifestError, match="cannot be read"):
        items(path)


def _zigzag(number: int) -> bytes:
    number *= 2
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def test_the_footer_says_what_pyarrow_reads(sound: Path) -> None:
    raw = sound.read_bytes()
    footer = read_struct(raw[len(raw) - 8 - int.from_bytes(raw[-8:-4], "little") : -8])
    metadata = pq.ParquetFile(sound).metadata
    assert footer[3] == metadata.num_rows
    for group, parts in enumerate(footer[4]):
        assert (parts[2], parts[3]) == (metadata.row_group(group).total_byte_size, 100)
        for index, column in enumerate(parts[1]):
            expected = metadata.row_group(group).column(index)
            assert column[3][5] == expected.num_values
            assert column[3][6] == expected.total_uncompressed_size
            assert column[3][9] == expected.data_page_offset
            assert b".".join(column[3][3]).decode() == expected.path_in_schema
    leaves = [metadata.schema.column(index).max_repetition_level > 0 for index in range(len(metadata.schema))]
    assert parquet_bounds._columns_in_lists(footer[2]) == leaves == [False, False, True, False, False]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x15",
        b"\x15" + b"\xff" * 12,
        b"\x1c" * 100 + b"\0",
        b"\x19\xf5\xff\xff\x7f",
        b"\x1e\0",
        b"\x18\x7fab",
    ],
)
def test_what_is_no_struct(data: bytes) -> None:
    with pytest.raises(ThriftError):
        read_struct(data)


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"\xff\xff\xff\xff\x10\0\0\0", b"garbage" * 100])
def test_a_saved_dataset_whose_data_is_damaged(tmp_path: Path, content: bytes) -> None:
    datasets.Dataset.from_dict({"prompt": ["a", "b"]}).save_to_disk(tmp_path / "set")
    [data] = (tmp_path / "set").glob("*.arrow")
    data.write_bytes(content)
    with pytest.raises(ManifestError, match="set"):
        items(tmp_path / "set")


def test_a_saved_dataset_that_is_cut_off(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": [f"a {n}" for n in range(5000)]}).save_to_disk(tmp_path / "set")
    [data] = (tmp_path / "set").glob("*.arrow")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(ManifestError, match="set"):
        items(tmp_path / "set")


def test_a_dataset_that_brings_a_script_is_refused(tmp_path: Path) -> None:
    """What ``hub_dataset`` calls must not run code of a dataset; datasets 3 did, when it was allowed to."""
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "set.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(Exception, match="scripts are no longer supported"):
        datasets.load_dataset(str(folder), streaming=True)
    assert not (tmp_path / "ran").exists()


def test_faults_name_their_column(tmp_path: Path) -> None:
    binary = pa.array([b"a", b"\xff\xfe"]).cast(pa.binary()).view(pa.binary())
    table = pa.table({"prompt": pa.Array.from_buffers(pa.string(), 2, binary.buffers())})
    pq.write_table(table, tmp_path / "rows.parquet")
    fault = only_fault(tmp_path / "rows.parquet")
    assert (fault.column, fault.reason) == ("prompt", "is not UTF-8")
