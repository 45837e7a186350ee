"""Thrift's compact protocol, as far as Parquet's metadata needs it: structs as dicts by field number.

pyarrow knows the same numbers, but ends the process where some of them are damaged.
"""

from __future__ import annotations

import struct
from typing import Any

MAX_LEVELS = 32
_BOOLEANS = {1: True, 2: False}


class ThriftError(ValueError):
    """The bytes are no such struct, or are cut off."""


def read_struct(data: bytes) -> dict[int, Any]:
    """The struct at the start of ``data``: its fields by number; maps are left out.

    Raises:
        ThriftError: There is none.
    """
    try:
        return _Reader(data).struct(0)
    except IndexError:
        raise ThriftError("metadata is cut off") from None


class _Reader:
    """Reads forward; each value has its type told before it, as a number from 1 to 12."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, level: int) -> dict[int, Any]:
        if level > MAX_LEVELS:
            raise ThriftError("metadata is nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            # The upper half is the distance from the last field's number; 0 where the number follows.
            number = number + (kind >> 4) if kind >> 4 else self._integer()
            kind &= 0x0F
            fields[number] = _BOOLEANS[kind] if kind in _BOOLEANS else self._value(kind, level + 1)
        return fields

    def _value(self, kind: int, level: int) -> Any:
        if kind in (1, 2, 3):
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 7:
            return struct.unpack("<d", self._bytes(8))[0]
        if kind == 8:
            return self._bytes(self._varint())
        if kind in (9, 10):
            return self._list(level)
        if kind == 12:
            return self.struct(level)
        raise ThriftError(f"metadata has a value of the unknown type {kind}")

    def _list(self, level: int) -> list[Any]:
        head = self._byte()
        count = self._varint() if head >> 4 == 15 else head >> 4
        if count > len(self._data) - self._at or level > MAX_LEVELS:
            raise ThriftError("metadata is cut off")
        return [self._value(head & 0x0F, level + 1) for _ in range(count)]

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._data):
            raise ThriftError("metadata is cut off")
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        number = shift = 0
        while (byte := self._byte()) & 0x80:
            number |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise ThriftError("metadata has a number of more than 64 bits")
        return number | byte << shift

    def _integer(self) -> int:
        number = self._varint()
        return number >> 1 ^ -(number & 1)
