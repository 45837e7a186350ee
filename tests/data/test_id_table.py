"""Rows that repeat an id, and sets of rows: against plain Python sets."""

from __future__ import annotations

import random
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.data import row_set
from offline_diffusion.data.id_table import IdTable
from offline_diffusion.data.row_set import RowSet
from offline_diffusion.errors import ManifestError


def repeated(ids: list[str | None], max_rows: int) -> list[int]:
    table = IdTable(max_rows)
    for row_id in ids:
        table.add(row_id)
    return list(table.repeated())


def expected(ids: list[str | None]) -> list[int]:
    seen: set[str] = set()
    found = []
    for row, row_id in enumerate(ids):
        if row_id in seen:
            found.append(row)
        elif row_id is not None:
            seen.add(row_id)
    return found


@given(st.lists(st.none() | st.sampled_from(["a", "b", "c", "Ä", "0"]), max_size=40), st.integers(1, 50))
def test_repeated_ids_against_a_plain_set(ids: list[str | None], max_rows: int) -> None:
    """In memory and from the temporary file, whatever the size of a run."""
    assert repeated(ids, max_rows) == expected(ids)


@pytest.mark.parametrize("num_distinct", [1, 300, 20_000])
def test_many_runs(num_distinct: int) -> None:
    """One id in all rows puts them into one bucket, which then is taken in blocks."""
    rng = random.Random(num_distinct)
    ids: list[str | None] = [f"id {rng.randrange(num_distinct)}" for _ in range(20_000)]
    assert repeated(ids, 1_000) == repeated(ids, 10**6) == expected(ids)


def test_memory_does_not_grow_with_the_rows() -> None:
    """Two million ids, half of them repeated; would catch keeping digests, rows or ids of all of them."""
    process, table = psutil.Process(), IdTable(2**16)
    before = process.memory_info().rss
    for row in range(2_000_000):
        table.add(f"id {row // 2}")
    found = table.repeated()
    assert process.memory_info().rss - before < 16 * 2**20
    assert len(found) == 1_000_000
    assert all(row in found for row in range(1, 2_000_000, 2_002))


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(ManifestError, match=r"No space left on device\nhint: make room .* TMPDIR"):
        repeated(["a", "b", "c"], 2)


# --- sets of rows -----------------------------------------------------------------------------


@given(st.sets(st.integers(0, 200) | st.integers(10_000, 10_040)), st.integers(1, 40))
def test_a_row_set_against_a_plain_set(rows: set[int], chunk: int) -> None:
    made = RowSet(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_set, "CHUNK_BYTES", chunk)
        assert list(made) == sorted(rows)
        parts = list(made.ranges())
    assert all(before.stop < after.start for before, after in pairwise(parts))
    assert len(made) == len(rows)
    assert [row for row in range(10_100) if row in made] == sorted(rows)
    assert RowSet.from_bits(made.to_bits()) == made == RowSet(sorted(rows))
    assert (made == RowSet([*rows, 300])) is False


def test_a_row_set_grows() -> None:
    made = RowSet([2, 9])
    made.add(np.array([70_001, 5, 5], np.int64))
    assert list(made) == [2, 5, 9, 70_001]
    assert "2" not in made
    assert -1 not in made
    assert 2 not in RowSet()
    assert repr(made) == "RowSet([2, 5, 9, 70001])"
