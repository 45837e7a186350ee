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
NESTED_BATCH = 64

_SCALARS = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


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


class JsonColumn:
    """What is known of a column's values so far, for a column that no schema describes."""

    __slots__ = ("_batch", "_high", "_is_text", "_kinds", "_low", "_nested")

    def __init__(self) -> None:
        self._kinds: set[type] = set()
        self._low = self._high = 0
        self._batch: list[Any] = []
        self._nested = pa.null()
        self._is_text = False

    def add(self, value: Any) -> None:
        kind = type(value)
        self._kinds.add(kind)
        if kind is int:
            self._low, self._high = min(self._low, value), max(self._high, value)
        elif kind not in _SCALARS and value is not None and not self._is_text:
            self._batch.append(value)
            if len(self._batch) >= NESTED_BATCH:
                self._flush()

    def _flush(self) -> None:
        found = None if any(map(_too_deep, self._batch)) else _infer(self._batch)
        self._batch.clear()
        try:
            if found is not None:
                self._nested = _unify(self._nested, found)
        except NotUnifiable:
            found = None
        self._is_text = found is None or _without_nulls(self._nested) is None

    def unified(self) -> pa.DataType:
        """The type for all values so far; see ``unify_types``."""
        if self._batch:
            self._flush()
        if self._is_text:
            return pa.string()
        kinds = self._kinds - {type(None)}
        scalars = kinds & set(_SCALARS)
        if scalars == kinds:
            return self._scalar_type(scalars)
        return pa.string() if scalars else self._nested

    def _scalar_type(self, kinds: set[type]) -> pa.DataType:
        if kinds == {int, float} and max(-self._low, self._high) <= MAX_EXACT_FLOAT:
            return pa.float64()
        if kinds == {int}:
            if self._low >= -(2**63) and self._high < 2**63:
                return pa.int64()
            return pa.uint64() if self._low >= 0 and self._high < 2**64 else pa.string()
        return _SCALARS[next(iter(kinds))] if len(kinds) == 1 else pa.string() if kinds else pa.null()


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING):
        inner = [part.values() if isinstance(part, dict) else part for part in level]
        level = [item for part in inner for item in part if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _infer(values: list[Any]) -> pa.DataType | None:
    """The Arrow type that holds ``values`` exactly, None when there is none."""
    try:
        # infer_type alone overlooks some conflicts inside lists; making the array does not.
        return normalise(pa.array(values, type=pa.infer_type(values)).type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


class CarriedTypes:
    """Collects the types of carried columns over all files and rows."""

    def __init__(self) -> None:
        self._declared: dict[str, list[pa.DataType]] = {}
        self._seen: dict[str, JsonColumn] = {}
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
                column = self._seen[name] = JsonColumn()
            column.add(value)

    def schema(self) -> pa.Schema:
        """A field for each column, in the order of first appearance.

        ``datasets`` features such as Image are kept in the metadata, as ``datasets`` itself does.
        """
        fields = []
        for name in dict.fromkeys([*self._declared, *self._seen]):
            types = list(self._declared.get(name, []))
            if name in self._seen:
                types.append(self._seen[name].unified())
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
