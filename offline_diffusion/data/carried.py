"""Carried columns: one Arrow type each, whatever the files and rows hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

from offline_diffusion.data.values import MAX_EXACT_FLOAT, json_text

MAX_NESTING = 32
MAX_STRUCT_FIELDS = 256
"""A column of objects with more names than this is rather a mapping; it is kept as JSON text."""
MAX_FIELDS = 16_384
"""Of all objects of all columns without a schema. Where a name more comes up, its column becomes text."""

_SCALARS = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_JSON_KINDS = frozenset({*_SCALARS, dict, list, type(None)})


class NotUnifiable(Exception):
    """Two types have no common one that keeps all values."""


def unify_types(types: Iterable[pa.DataType]) -> pa.DataType:
    """The type that holds the values of all ``types``; text where there is no other.

    A column of type string holds text as it is and everything else as JSON text.
    """
    unified = pa.null()
    for found in types:
        try:
            unified = _unify(unified, normalise(found))
        except NotUnifiable:
            return pa.string()
    return writable(unified)


def normalise(found: pa.DataType) -> pa.DataType:
    """The plain form of a type: no dictionaries, no 64-bit offsets, no views, no extensions."""
    if isinstance(found, pa.BaseExtensionType):
        return normalise(found.storage_type)
    if pa.types.is_dictionary(found) or pa.types.is_run_end_encoded(found):
        return normalise(found.value_type)
    if _is_list(found):
        return _list_like(found, normalise(found.value_type))
    if pa.types.is_struct(found):
        return pa.struct([(field.name, normalise(field.type)) for field in found])
    plain = {pa.large_string(): pa.string(), pa.string_view(): pa.string()}
    plain |= {pa.large_binary(): pa.binary(), pa.binary_view(): pa.binary()}
    return plain.get(found, found)


def _list_like(found: pa.DataType, item: pa.DataType) -> pa.DataType:
    """A list of ``item``, of a fixed size where ``found`` is."""
    return pa.list_(item, found.list_size) if pa.types.is_fixed_size_list(found) else pa.list_(item)


def _is_list(found: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_list(found)
        or types.is_large_list(found)
        or types.is_fixed_size_list(found)
        or types.is_list_view(found)
        or types.is_large_list_view(found)
    )


def _unify(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        return _unify_structs(a, b)
    if _is_list(a) and _is_list(b):
        return pa.list_(_unify(a.value_type, b.value_type))
    if not (_same_kind(a, b)):
        raise NotUnifiable
    try:
        schemas = [pa.schema([("x", a)]), pa.schema([("x", b)])]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        raise NotUnifiable from None


def _unify_structs(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    fields = {field.name: field.type for field in a}
    for field in b:
        fields[field.name] = _unify(fields.get(field.name, pa.null()), field.type)
    return pa.struct(list(fields.items()))


def _same_kind(a: pa.DataType, b: pa.DataType) -> bool:
    """Whether Arrow's own promotion from ``a`` and ``b`` keeps all values."""
    types = pa.types
    if types.is_integer(a) and types.is_integer(b):
        # Arrow would put uint64 into int64.
        unsigned = types.is_uint64(a) or types.is_uint64(b)
        return not unsigned or bool(types.is_unsigned_integer(a) and types.is_unsigned_integer(b))
    tests = (
        lambda t: types.is_integer(t) or types.is_floating(t),
        lambda t: types.is_integer(t) or types.is_decimal(t),
        types.is_timestamp,
        types.is_date,
        types.is_time,
        types.is_duration,
        lambda t: types.is_binary(t) or types.is_fixed_size_binary(t),
    )
    return any(test(a) and test(b) for test in tests)


def writable(found: pa.DataType) -> pa.DataType:
    """``found`` as Parquet can hold it: null becomes string; text where there is no such type."""
    fixed = _without_nulls(found)
    return pa.string() if fixed is None else fixed


def _without_nulls(found: pa.DataType) -> pa.DataType | None:
    """None when a struct in ``found`` has no fields or far too many."""
    if pa.types.is_null(found):
        return pa.string()
    if pa.types.is_struct(found):
        inner = [(field.name, _without_nulls(field.type)) for field in found]
        if not 0 < len(inner) <= MAX_STRUCT_FIELDS or any(kind is None for _, kind in inner):
            return None
        return pa.struct(inner)
    if _is_list(found):
        item = _without_nulls(found.value_type)
        return None if item is None else _list_like(found, item)
    return found


class FieldBudget:
    """How many more names of objects are told apart."""

    def __init__(self, num_fields: int = MAX_FIELDS) -> None:
        self._num_left = num_fields

    def take(self) -> bool:
        """Whether there is room for one more."""
        self._num_left -= 1
        return self._num_left >= 0


class SeenValues:
    """What is known of the values of a column that no schema describes, or of a part of them.

    Arrow's own inference is not exact inside objects and lists: it takes true for 1.0.
    """

    __slots__ = (
        "_budget",
        "_depth",
        "_fields",
        "_high",
        "_is_mapping",
        "_items",
        "_kinds",
        "_low",
        "_others",
    )

    def __init__(self, budget: FieldBudget, depth: int = 0) -> None:
        self._budget = budget
        self._depth = depth
        self._is_mapping = False
        self._kinds: set[type] = set()
        self._low = self._high = 0
        self._fields: dict[str, SeenValues] = {}
        self._items: SeenValues | None = None
        self._others = pa.null()

    def add(self, value: Any) -> None:
        kind = type(value)
        self._kinds.add(kind)
        if kind is int:
            self._low, self._high = min(self._low, value), max(self._high, value)
        elif kind is dict and self._depth < MAX_NESTING:
            self._add_fields(value)
        elif kind is list and self._depth < MAX_NESTING:
            if self._items is None:
                self._items = SeenValues(self._budget, self._depth + 1)
            for item in value:
                self._items.add(item)
        elif kind not in _JSON_KINDS:
            self._others = unify_types([self._others, pa.infer_type([value])])

    def _add_fields(self, value: dict[str, Any]) -> None:
        if self._is_mapping:
            return
        for name, item in value.items():
            field = self._fields.get(name)
            if field is None:
                if len(self._fields) == MAX_STRUCT_FIELDS or not self._budget.take():
                    self._is_mapping = True
                    self._fields.clear()
                    return
                field = self._fields[name] = SeenValues(self._budget, self._depth + 1)
            field.add(item)

    def unified(self) -> pa.DataType | None:
        """The type that holds all values exactly, None when there is none."""
        kinds = self._kinds - {type(None)}
        if not kinds:
            return pa.null()
        if kinds == {dict}:
            return self._struct()
        if kinds == {list}:
            item = None if self._items is None else self._items.unified()
            return None if item is None else pa.list_(item)
        if kinds & {dict, list}:
            return None
        return self._scalar(kinds) if kinds <= set(_SCALARS) else self._others_or_none(kinds)

    def _struct(self) -> pa.DataType | None:
        fields = [(name, seen.unified()) for name, seen in self._fields.items()]
        if not fields or any(found is None for _, found in fields):
            return None
        return pa.struct(fields)

    def _scalar(self, kinds: set[type]) -> pa.DataType | None:
        if kinds == {int, float}:
            return pa.float64() if max(-self._low, self._high) <= MAX_EXACT_FLOAT else None
        if kinds == {int} and self._high >= 2**63:
            return pa.uint64() if self._low >= 0 and self._high < 2**64 else None
        if kinds == {int} and self._low < -(2**63):
            return None
        return _SCALARS[next(iter(kinds))] if len(kinds) == 1 else None

    def _others_or_none(self, kinds: set[type]) -> pa.DataType | None:
        return None if kinds & set(_SCALARS) else self._others


class CarriedTypes:
    """Collects the types of carried columns over all files and rows."""

    def __init__(self) -> None:
        self._declared: dict[str, list[pa.DataType]] = {}
        self._seen: dict[str, SeenValues] = {}
        self._budget = FieldBudget()
        self._features: dict[str, Any] = {}

    def declare(self, name: str, found: pa.DataType, feature: Any = None) -> None:
        """Takes a type that a file declares, and its ``datasets`` feature where it has one."""
        self._declared.setdefault(name, []).append(found)
        if feature is not None:
            self._features.setdefault(name, feature)

    def observe(self, carried: Mapping[str, Any]) -> None:
        """Takes the values of a row whose file declares no types."""
        for name, value in carried.items():
            column = self._seen.get(name)
            if column is None:
                column = self._seen[name] = SeenValues(self._budget)
            column.add(value)

    def schema(self) -> pa.Schema:
        """A field for each column, in the order of first appearance.

        ``datasets`` features such as Image are kept in the metadata, as ``datasets`` itself does.
        """
        fields = []
        for name in dict.fromkeys([*self._declared, *self._seen]):
            types = list(self._declared.get(name, []))
            if name in self._seen:
                found = self._seen[name].unified()
                types.append(pa.string() if found is None else found)
            fields.append(pa.field(name, unify_types(types)))
        info = {"info": {"features": self._features}}
        return pa.schema(fields, {b"huggingface": json.dumps(info).encode()} if self._features else None)


def carried_array(values: list[Any], type: pa.DataType) -> pa.Array:
    """The values of a carried column as an array of its type.

    Never fails for values that took part in the type: what a string column is given that is no
    text becomes JSON text, numbers are converted. Any other value becomes null.

    Args:
        values: Python values, None for null.
        type: From ``ManifestIndex.carried_schema``.
    """
    if not pa.types.is_string(type):
        try:
            return _plain_array(values, type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            pass
    return _plain_array([_coerce(value, type) for value in values], type)


def _plain_array(values: list[Any], type: pa.DataType) -> pa.Array:
    made = pa.array(values, type=type)
    return pa.concat_arrays(made.chunks) if isinstance(made, pa.ChunkedArray) else made


def _coerce(value: Any, type: pa.DataType) -> Any:
    if value is None or (pa.types.is_string(type) and isinstance(value, str)):
        return value
    if pa.types.is_string(type):
        return json_text(value)
    if pa.types.is_struct(type) and isinstance(value, dict):
        return {field.name: _coerce(value.get(field.name), field.type) for field in type}
    if _is_list(type) and isinstance(value, list):
        return [_coerce(item, type.value_type) for item in value]
    return _scalar_or_none(value, type)


def _scalar_or_none(value: Any, type: pa.DataType) -> pa.Scalar | None:
    """``value`` as a scalar of ``type``; None when it does not fit."""
    if pa.types.is_floating(type) and isinstance(value, int | Decimal):
        value = float(value)
    try:
        return pa.scalar(value, type=type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass
    try:
        return pa.scalar(value).cast(type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
