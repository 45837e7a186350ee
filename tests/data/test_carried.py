"""One type for each carried column, and values that fit it."""

from __future__ import annotations

import datetime as dt
import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifest_fakes import good_rows, opened, prompt_set, write_jsonl

from offline_diffusion.data.carried import CarriedTypes, carried_array, unify_types
from offline_diffusion.data.scan import scan

S, I, F = pa.string(), pa.int64(), pa.float64()  # noqa: E741


def round_trip(array: pa.Array) -> list[Any]:
    """What a reader of Parquet gets."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": array}), sink)
    return list(pq.read_table(sink)["x"].to_pylist())


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ([], S),
        ([pa.null()], S),
        ([pa.null(), S], S),
        ([S, pa.large_string()], S),
        ([pa.large_string()], S),
        ([pa.string_view()], S),
        ([pa.dictionary(pa.int32(), S), S], S),
        ([pa.dictionary(pa.int32(), pa.large_string())], S),
        ([pa.binary(), pa.large_binary()], pa.binary()),
        ([pa.int32(), I], I),
        ([pa.uint32(), pa.int32()], I),
        ([pa.uint8(), pa.uint64()], pa.uint64()),
        ([pa.uint64(), I], S),
        ([I, F], F),
        ([I, pa.float32()], F),
        ([pa.null(), pa.int32(), pa.null()], pa.int32()),
        ([S, I], S),
        ([S, pa.binary()], S),
        ([pa.bool_(), I], S),
        ([pa.date32(), pa.timestamp("us")], S),
        ([pa.timestamp("us"), pa.timestamp("ns")], pa.timestamp("ns")),
        ([pa.timestamp("us", "UTC"), pa.timestamp("us")], S),
        ([pa.decimal128(5, 2), pa.decimal128(7, 3)], pa.decimal128(7, 3)),
        ([pa.list_(pa.null())], pa.list_(S)),
        ([pa.list_(pa.null()), pa.large_list(I)], pa.list_(I)),
        ([pa.list_(I), pa.list_(S)], S),
        ([pa.list_(I), S], S),
        ([pa.list_(pa.float32(), 2)], pa.list_(pa.float32(), 2)),
        ([pa.list_(pa.float32(), 2), pa.list_(pa.float32(), 3)], pa.list_(pa.float32())),
        ([pa.struct([("a", I)]), pa.struct([("b", S)])], pa.struct([("a", I), ("b", S)])),
        ([pa.struct([("a", I)]), pa.struct([("a", S)])], S),
        ([pa.struct([("a", pa.large_string())])], pa.struct([("a", S)])),
        ([pa.struct([])], S),
        ([pa.list_(pa.struct([]))], S),
        ([pa.struct([("a", pa.null())])], pa.struct([("a", S)])),
        ([pa.struct([(f"k{n}", I) for n in range(300)])], S),
    ],
)
def test_types_over_files(types: list[pa.DataType], expected: pa.DataType) -> None:
    assert unify_types(types) == expected
    if not pa.types.is_struct(expected):  # its fields come in the order of appearance
        assert unify_types(reversed(types)) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([None, None], S),
        (["a", None], S),
        ([True, None], pa.bool_()),
        ([1, -(2**63), 2**63 - 1], I),
        ([1, 2**64 - 1], pa.uint64()),
        ([-1, 2**64 - 1], S),
        ([2**70], S),
        ([1, 2.5], F),
        ([2**53 + 1, 2.5], S),
        ([1, "a"], S),
        ([1, True], S),
        ([[1], [2]], pa.list_(I)),
        ([[], [2]], pa.list_(I)),
        ([[], []], pa.list_(S)),
        ([[1], ["a"]], S),
        ([["left of", 0]], S),
        ([[1, True]], S),
        ([{"a": 0.0}, {"a": False}], S),
        ([[[1.5], [True]]], S),
        ([{"a": 2**53 + 1}, {"a": 0.5}], S),
        ([{"a": 1}, {"a": 0.5}], pa.struct([("a", F)])),
        ([[2**70]], S),
        ([{"a": 1}, {"b": "x"}], pa.struct([("a", I), ("b", S)])),
        ([{"a": 1}, {"a": "x"}], S),
        ([{}], S),
        ([{"a": {}}], S),
        ([{"a": None}], pa.struct([("a", S)])),
        ([{"a": 1}, [1]], S),
        ([{"a": 1}, "text"], S),
        ([{f"k{n}": n} for n in range(300)], S),
    ],
)
def test_types_of_json_values(values: list[Any], expected: pa.DataType) -> None:
    types = CarriedTypes()
    for value in values * 50:  # over more than one batch
        types.observe({"x": value})
    schema = types.schema()
    assert schema.field("x").type == expected
    array = carried_array(values, expected)
    assert array.type == expected
    for given_, read in zip(values, round_trip(array), strict=True):
        is_text = expected == S and given_ is not None and not isinstance(given_, str)
        assert matches(given_, json.loads(read) if is_text else read), (given_, read)


def matches(value: Any, read: Any) -> bool:
    """Equal, but for the nulls of fields that a struct has and an object lacks."""
    if isinstance(value, dict):
        return all(matches(value.get(key), read.get(key)) for key in {*value, *read})
    if isinstance(value, list):
        return len(value) == len(read) and all(map(matches, value, read))
    return bool(value == read) and isinstance(value, bool) == isinstance(read, bool)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
scalars = st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | texts
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(json_values, min_size=1, max_size=6))
def test_any_json_values_come_back(values: list[Any]) -> None:
    types = CarriedTypes()
    for value in values:
        types.observe({"x": value})
    [field] = types.schema()
    for given_, read in zip(values, round_trip(carried_array(values, field.type)), strict=True):
        is_text = field.type == S and given_ is not None and not isinstance(given_, str)
        assert matches(given_, json.loads(read) if is_text else read)


def test_a_deeply_nested_value_is_kept_as_text() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    types = CarriedTypes()
    types.observe({"x": deep})
    [field] = types.schema()
    assert field.type == S
    assert json.loads(carried_array([deep], S)[0].as_py()) == deep


def test_values_without_a_json_type_become_text_in_a_text_column() -> None:
    values = [b"\xff", dt.datetime(2024, 1, 2), Decimal("1.50"), pa.scalar(5, pa.time64("ns")), "text", None]
    array = carried_array(values, S)
    assert array.to_pylist()[:3] == ['"/w=="', '"2024-01-02T00:00:00"', '"1.50"']
    assert array.to_pylist()[4:] == ["text", None]


def test_numbers_are_converted_where_files_differ() -> None:
    assert carried_array([1, 2.5, 2**53 + 1, None], F).to_pylist() == [1.0, 2.5, float(2**53 + 1), None]
    decimals = carried_array([1, Decimal("2.50")], pa.decimal128(20, 2)).to_pylist()
    assert decimals == [Decimal("1.00"), Decimal("2.50")]
    instants = carried_array([dt.datetime(2024, 1, 2), None], pa.timestamp("ns"))
    assert instants.cast(pa.timestamp("us")).to_pylist() == [dt.datetime(2024, 1, 2), None]


def test_a_value_that_took_no_part_is_null() -> None:
    assert carried_array(["a", 1], I).to_pylist() == [None, 1]
    assert carried_array([{"a": "x"}, 5], pa.struct([("a", I)])).to_pylist() == [{"a": None}, None]


PARTS: list[dict[str, Any]] = [
    {"note": pa.array([None, None]), "k": pa.array([1, 2], pa.int32()), "t": pa.array(["a", "b"])},
    {
        "note": pa.array(["x", None]),
        "k": pa.array([2**40, None]),
        "t": pa.array(["c", "d"], pa.large_string()),
    },
    {
        "note": pa.array(["y", "z"]).dictionary_encode(),
        "k": pa.array([1.5, None]),
        "t": pa.array([None, None]),
    },
]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_one_schema_over_parquet_files_that_differ(tmp_path: Path, order: tuple[int, ...]) -> None:
    paths = []
    for index in order:
        paths.append(tmp_path / f"{index}.parquet")
        pq.write_table(pa.table({"prompt": ["p", "q"], **PARTS[index]}), paths[-1])
    manifest = opened(*paths)
    schema = scan(manifest).carried_schema
    assert {field.name: field.type for field in schema} == {"note": S, "k": F, "t": S}
    rows = good_rows(*paths)
    for name in ("note", "k", "t"):
        read = round_trip(carried_array([row.carried.get(name) for row in rows], schema.field(name).type))
        assert read == [value for index in order for value in PARTS[index][name].to_pylist()]


def test_one_schema_over_kinds_of_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "x": 1, "only": [1]}, {"prompt": "b", "x": None}])
    (tmp_path / "b.csv").write_text("prompt,x\nc,2\n")
    schema = scan(opened(tmp_path / "a.jsonl", tmp_path / "b.csv")).carried_schema
    assert {field.name: field.type for field in schema} == {"x": S, "only": pa.list_(I)}
    rows = good_rows(tmp_path / "a.jsonl", tmp_path / "b.csv")
    assert carried_array([row.carried.get("x") for row in rows], S).to_pylist() == ["1", None, "2"]


def test_faulty_rows_have_no_say_in_the_schema(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "x": 1}, {"prompt": "", "x": "text"}])
    assert scan(opened(path)).carried_schema.field("x").type == I


some_values = st.sampled_from([1, 2.5, "a", None, True, [1], {"k": 1}])


@given(st.lists(some_values, min_size=1, max_size=6), st.randoms())
def test_the_schema_does_not_depend_on_the_order_of_rows(values: list[Any], random: Any) -> None:
    found = []
    for _ in range(2):
        types = CarriedTypes()
        for value in values:
            types.observe({"x": value})
        found.append(types.schema())
        random.shuffle(values)
    assert found[0] == found[1]


def test_geneval_comes_back_from_parquet() -> None:
    path = prompt_set("geneval_evaluation_metadata.jsonl")
    schema = scan(opened(path)).carried_schema
    rows = good_rows(path)
    for name, type_ in zip(schema.names, schema.types, strict=True):
        given_ = [row.carried.get(name) for row in rows]
        read = round_trip(carried_array(given_, type_))
        if name == "include":  # a position is a list of a text and a number, which Arrow has no type for
            assert type_ == S
            read = [json.loads(text) for text in read]
        assert read == given_, name
