"""Numbers and tables for people."""

from __future__ import annotations

import pytest

from offline_diffusion.cli.text import duration, quantity, table
from offline_diffusion.progress import plural


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567, "1.23 MB"), (3.2e12, "3.2 TB"), (1e18, "1 EB")],
)
def test_quantity(value: float, text: str) -> None:
    assert quantity(value, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (float("inf"), "unknown"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.7, "1 h 00 min"),
        (90_000, "1 d 01 h"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_plural() -> None:
    assert [plural(count, "row") for count in (0, 1, 1000)] == ["0 rows", "1 row", "1,000 rows"]


def test_table_sets_numbers_to_the_right() -> None:
    assert table(["name", "images"], [["a", "7"], ["bcdef", "1,000"]]) == (
        "name   images\na           7\nbcdef   1,000"
    )
