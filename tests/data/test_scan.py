"""One pass over a manifest: counts, repeated ids, the index on disk, memory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifest_fakes import opened, scan_peak_mib, write_jsonl

from offline_diffusion.data.rows import ManifestRow, RowDefaults, RowFault
from offline_diffusion.data.scan import (
    COSTS_FILE,
    DUPLICATES_FILE,
    INDEX_FILE,
    PLACES_FILE,
    ManifestIndex,
    scan,
)
from offline_diffusion.data.work import ShardCosts, WorkMeter
from offline_diffusion.errors import ManifestError
from offline_diffusion.models.capabilities import Capabilities


def index_of(tmp_path: Path, rows: list[Any]) -> ManifestIndex:
    return scan(opened(write_jsonl(tmp_path / "rows.jsonl", rows)))


def test_counts(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "n": 3}, {"prompt": ""}, {"prompt": "b"}, {"prompt": "c", "seed": -1, "n": 9}]
    index = index_of(tmp_path, rows)
    assert (index.num_rows, index.num_faults, index.num_images) == (4, 2, 4)
    assert list(index.duplicates) == []


def test_on_row_sees_every_item_in_order(tmp_path: Path) -> None:
    manifest = opened(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": ""}, {"prompt": "c"}]))
    seen: list[ManifestRow | RowFault] = []
    scan(manifest, on_row=seen.append)
    assert seen == list(manifest.read())


def test_second_and_later_rows_of_an_id_are_faults(tmp_path: Path) -> None:
    ids: list[Any] = ["a", "b", "a", 7, "7", 7.0, "b", "c", "a"]
    rows = [{"prompt": "p", "id": row_id, "n": 2} for row_id in ids]
    index = index_of(tmp_path, rows)
    assert list(index.duplicates) == [2, 4, 5, 6, 8]
    assert (index.num_faults, index.num_images) == (5, 8)
    found = list(opened(tmp_path / "rows.jsonl").read(duplicates=index.duplicates))
    assert [isinstance(item, RowFault) for item in found] == [row in index.duplicates for row in range(9)]


def test_a_default_id_can_be_repeated_too(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "id": "00000001"},
        {"prompt": "b"},
        {"prompt": "c"},
        {"prompt": "d", "id": "00000002"},
    ]
    assert list(index_of(tmp_path, rows).duplicates) == [1, 3]


def test_a_faulty_row_does_not_claim_its_id(tmp_path: Path) -> None:
    rows = [{"prompt": "", "id": "a"}, {"prompt": "b", "id": "a"}, {"prompt": "c", "id": "a"}]
    index = index_of(tmp_path, rows)
    assert list(index.duplicates) == [2]
    assert (index.num_faults, index.num_images) == (2, 1)


def test_ids_are_compared_over_files(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", [{"prompt": "a", "id": "x"}]) for n in range(3)]
    assert list(scan(opened(*paths)).duplicates) == [1, 2]


@given(st.lists(st.none() | st.sampled_from(["a", "b", "00000002", "00000004", 3]), min_size=1, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_duplicates_against_a_plain_set(tmp_path: Path, ids: list[Any]) -> None:
    index = index_of(tmp_path, [{"prompt": "p", "id": row_id} for row_id in ids])
    names = [f"{row:08d}" if row_id is None else str(row_id) for row, row_id in enumerate(ids)]
    assert list(index.duplicates) == [row for row, name in enumerate(names) if name in names[:row]]


def test_limit(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "x": 1}, {"prompt": "q", "x": "text"}])
    index = scan(opened(path, limit=1))
    assert (index.num_rows, index.carried_schema) == (1, pa.schema([("x", pa.int64())]))
    assert scan(opened(path, limit=0)).num_rows == 0


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    manifest = opened(write_jsonl(path, [{"prompt": "a"}, {"prompt": "b"}]))
    with pytest.raises(ManifestError, match=r"a\.jsonl: changed while it was read"):
        scan(manifest, on_row=lambda row: path.write_text('{"prompt": "longer"}\n'))


# --- the index on disk ------------------------------------------------------------------------


def test_an_index_survives_the_disk(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "id": 1, "x": [{"k": 1}]}, {"prompt": "b", "id": 1}, {"prompt": " "}]
    index = index_of(tmp_path, rows)
    index.save(tmp_path / "state" / "manifest")
    assert ManifestIndex.load(tmp_path / "state" / "manifest") == index
    bits = np.load(tmp_path / "state" / "manifest" / DUPLICATES_FILE, allow_pickle=False)
    assert bits.tolist() == [0b10]
    assert json.loads((tmp_path / "state" / "manifest" / INDEX_FILE).read_text())["num_rows"] == 3
    assert {path.name for path in (tmp_path / "state" / "manifest").iterdir()} == {
        COSTS_FILE,
        DUPLICATES_FILE,
        INDEX_FILE,
        PLACES_FILE,
    }


def test_costs_of_shards_are_kept_with_the_index(tmp_path: Path) -> None:
    """By hand: 4 or 1 image tokens and one text token, steps times images, 2 layers of width 8."""
    model = Capabilities(
        family="test", pipeline="Test", max_size=64, num_layers=2, hidden_size=8, default_true_cfg_scale=1.0
    )
    rows = [
        {"prompt": "a", "height": 32, "width": 32, "num_inference_steps": 3, "n": 2},
        {"prompt": ""},
        {"prompt": "b", "height": 16, "width": 16, "num_inference_steps": 5},
        {"prompt": "c", "height": 999, "width": 16},
        {"prompt": "d", "height": 16, "width": 16, "num_inference_steps": 7},
    ]
    costs = ShardCosts(WorkMeter(model, RowDefaults()), shard_size=2)
    index = scan(opened(write_jsonl(tmp_path / "rows.jsonl", rows)), costs=costs)

    def forward(tokens: int) -> float:
        return 24 * 64 * tokens * 2 + 4 * tokens**2 * 8 * 2

    assert list(index.shard_costs) == [forward(5) * 3 * 2, forward(2) * 5, forward(2) * 7]
    index.save(tmp_path / "state")
    assert ManifestIndex.load(tmp_path / "state") == index
    assert index.shard_size == 2
    kept = np.load(tmp_path / "state" / COSTS_FILE, allow_pickle=False)
    assert kept.tolist() == list(index.shard_costs)


def test_an_index_that_cannot_be_used_is_none(tmp_path: Path) -> None:
    assert ManifestIndex.load(tmp_path / "none") is None
    index = index_of(tmp_path, [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}])
    folder = tmp_path / "state"
    for name, damage in (
        (INDEX_FILE, b""),
        (INDEX_FILE, b"[]"),
        (INDEX_FILE, b'{"version": 0}'),
        (DUPLICATES_FILE, b""),
        (COSTS_FILE, b""),
        (PLACES_FILE, b""),
        (DUPLICATES_FILE, b"\x93NUMPY garbage"),
    ):
        index.save(folder)
        assert ManifestIndex.load(folder) == index
        (folder / name).write_bytes(damage)
        assert ManifestIndex.load(folder) is None
    (folder / DUPLICATES_FILE).unlink()
    assert ManifestIndex.load(folder) is None


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json", "txt", "parquet"])
def test_memory_does_not_grow_with_the_manifest(tmp_path: Path, suffix: str) -> None:
    peaks = []
    for num_rows in (1_000, 40_000):
        path = tmp_path / f"{num_rows}.{suffix}"
        texts = [f"{n} " + "x" * 1000 for n in range(num_rows)]  # 40 MB
        if suffix == "jsonl":
            write_jsonl(path, [{"prompt": text, "note": text} for text in texts])
        elif suffix == "json":
            path.write_text(json.dumps(texts))
        elif suffix == "parquet":
            pq.write_table(pa.table({"prompt": texts}), path, row_group_size=1000)
        else:
            path.write_text("\n".join(["prompt"] * (suffix == "csv") + texts))
        peaks.append(scan_peak_mib(path, num_rows))
    assert peaks[1] <= peaks[0] + 15


@pytest.mark.slow
def test_a_million_rows_in_a_minute_and_a_gigabyte(tmp_path: Path) -> None:
    num_rows = 1_000_000
    with (tmp_path / "rows.jsonl").open("w") as stream:
        for n in range(num_rows):
            row = {
                "id": f"row-{n}",
                "prompt": f"prompt {n} " + "word " * 20,
                "seed": n,
                "width": 512,
                "tag": "x",
            }
            stream.write(json.dumps(row) + "\n")
    start = time.monotonic()
    assert scan_peak_mib(tmp_path / "rows.jsonl", num_rows) < 1024
    assert time.monotonic() - start < 60
