"""Conversions of cells: lossless or a fault."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.data.values import (
    MAX_ID_CHARS,
    MAX_PROMPT_BYTES,
    ValueFault,
    json_text,
    show,
    to_filled_text,
    to_float,
    to_id,
    to_integer,
    to_size,
    to_text,
)

BIG = 2**64 - 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (2147483648, 2147483648),
        (9007199254740993, 9007199254740993),
        (BIG, BIG),
        (1.0, 1),
        (2.0**52, 2**52),
        ("512", 512),
        (" 512 ", 512),
        ("+7", 7),
        ("512.0", 512),
        ("1e3", 1000),
        ("18446744073709551615", BIG),
        ("9007199254740993.0", 9007199254740993),
        (Decimal("12345678901234567890"), 12345678901234567890),
        (Decimal("3.000"), 3),
    ],
)
def test_integers_are_kept_exactly(value: Any, expected: int) -> None:
    assert to_integer(value, low=0, high=BIG) == expected


@pytest.mark.parametrize(
    "value",
    [
        *(-1, BIG + 1, 1.5, "abc", "", "1.5", "0x10", "1_000", "１２", "nan", "-1", "9" * 5000),
        *(True, False, float("nan"), float("inf"), float(2**53), 1e300, Decimal("1.5"), Decimal("NaN")),
        *([1], {"a": 1}, b"1", dt.date(2024, 1, 1)),
    ],
)
def test_what_is_no_integer_is_a_fault(value: Any) -> None:
    with pytest.raises(ValueFault):
        to_integer(value, low=0, high=BIG)


@given(st.integers(0, BIG))
def test_every_64_bit_seed_survives_in_every_exact_form(seed: int) -> None:
    for form in (seed, str(seed), Decimal(seed), f"{seed}.0"):
        assert to_integer(form, low=0, high=BIG) == seed


@given(st.floats())
def test_a_float_is_its_integer_or_a_fault(value: float) -> None:
    try:
        number = to_integer(value, low=-(2**70), high=2**70)
    except ValueFault:
        assert not value.is_integer() or abs(value) >= 2**53
    else:
        assert number == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [(7, 7.0), (7.5, 7.5), ("7.5", 7.5), (".5", 0.5), ("1e-1", 0.1), (Decimal("4.5"), 4.5), (0, 0.0)],
)
def test_numbers(value: Any, expected: float) -> None:
    assert to_float(value, low=0.0) == expected


@pytest.mark.parametrize(
    "value",
    [
        -0.5,
        "-1",
        float("nan"),
        float("inf"),
        "nan",
        "inf",
        "7,5",
        "1_0",
        "",
        True,
        Decimal("1e400"),
        [1.0],
        "9" * 5000,
    ],
)
def test_what_is_no_number_is_a_fault(value: Any) -> None:
    with pytest.raises(ValueFault):
        to_float(value, low=0.0)


def test_text_limits() -> None:
    assert to_text("") == ""
    assert to_text(" ") == " "
    assert to_text("ä" * (MAX_PROMPT_BYTES // 2)) == "ä" * (MAX_PROMPT_BYTES // 2)
    for bad in ("ä" * (MAX_PROMPT_BYTES // 2 + 1), "\ud800", 5, None, b"bytes", ["a"]):
        with pytest.raises(ValueFault):
            to_text(bad)
    for blank in ("", " ", "\n\t", "\u3000\u00a0"):
        with pytest.raises(ValueFault):
            to_filled_text(blank)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(7, "7"), (-7, "-7"), (7.0, "7"), (2**64, str(2**64)), ("007", "007"), ("a b", "a b"), ("ü/..", "ü/..")],
)
def test_ids(value: Any, expected: str) -> None:
    assert to_id(value) == expected


@pytest.mark.parametrize(
    "value",
    [True, 1.5, "", "  ", "a\0b", "a\nb", "\x1b[31m", "\x85", "x" * (MAX_ID_CHARS + 1), 10**1100, [1], b"x"],
)
def test_what_is_no_id_is_a_fault(value: Any) -> None:
    with pytest.raises(ValueFault):
        to_id(value)


def test_size_is_width_then_height() -> None:
    assert to_size("1024x768") == (1024, 768)
    assert to_size(" 512 X 256 ") == (512, 256)
    assert to_size("auto") is None
    for bad in ("1024", "x768", "0x512", "-1x5", 1024, "1024x768x3", "99999999999x1", "9999999999x1", None):
        with pytest.raises(ValueFault):
            to_size(bad)


def test_a_shown_value_is_one_short_printable_line() -> None:
    assert show("abc") == "abc"
    assert show(True) == "true"
    assert show(1.5) == "1.5"
    assert show("a\n\x1b[31m\u202e") == "a\\n\\x1b[31m\\u202e"
    assert show("\ud800").isprintable()
    assert len(show("x" * 5000)) <= 200
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert show(deep) == "<list>"


def test_what_json_lacks_becomes_text() -> None:
    value = {
        "bytes": b"\xff\x00",
        "time": dt.datetime(2024, 1, 2, 3, 4, 5),
        "scalar": pa.scalar(1, pa.time64("ns")),
        "decimal": Decimal("1.50"),
    }
    read = json.loads(json_text(value))
    assert read["bytes"] == "/wA="
    assert read["time"] == "2024-01-02T03:04:05"
    assert read["decimal"] == "1.50"
    assert isinstance(read["scalar"], str)
