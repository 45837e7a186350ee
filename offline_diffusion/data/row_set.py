"""Numbers of rows, a bit for each row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

CHUNK_BYTES = 2**16


class RowSet(Collection[int]):
    """A growing set of row numbers: an eighth of a byte for each row up to the last, a fast ``in``."""

    def __init__(self, rows: Iterable[int] = ()) -> None:
        self._bits = bytearray()
        self.add(np.fromiter(rows, np.int64))

    @classmethod
    def from_bits(cls, bits: np.ndarray) -> RowSet:
        """The set that ``to_bits`` was called on: uint8 ``[n]``."""
        made = cls()
        made._bits = bytearray(bits.tobytes())
        return made

    def to_bits(self) -> np.ndarray:
        """A bit for each row, the lowest of a byte first: uint8 ``[n]``."""
        return np.frombuffer(bytes(self._bits), np.uint8)

    def add(self, rows: np.ndarray) -> None:
        """Adds numbers from 0: int64 ``[n]``, in any order."""
        if not len(rows):
            return
        num_bytes = int(rows.max()) // 8 + 1
        self._bits.extend(bytes(max(0, num_bytes - len(self._bits))))
        bits = np.frombuffer(self._bits, np.uint8)
        np.bitwise_or.at(bits, rows >> 3, np.left_shift(1, rows & 7).astype(np.uint8))

    def __contains__(self, row: object) -> bool:
        if not isinstance(row, int) or not 0 <= row < 8 * len(self._bits):
            return False
        return bool(self._bits[row >> 3] >> (row & 7) & 1)

    def __len__(self) -> int:
        return int(np.bitwise_count(np.frombuffer(self._bits, np.uint8)).sum())

    def __iter__(self) -> Iterator[int]:
        for part in self.ranges():
            yield from part

    def ranges(self) -> Iterator[range]:
        """The rows in order, consecutive ones together."""
        begun = -1
        for start in range(0, len(self._bits), CHUNK_BYTES):
            chunk = np.frombuffer(self._bits[start : start + CHUNK_BYTES], np.uint8)
            is_in = np.unpackbits(chunk, bitorder="little")
            edges = np.flatnonzero(np.diff(is_in, prepend=np.uint8(begun >= 0))) + 8 * start
            for edge in edges.tolist():
                if begun < 0:
                    begun = edge
                else:
                    yield range(begun, edge)
                    begun = -1
        if begun >= 0:
            yield range(begun, 8 * len(self._bits))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowSet) and self._bits.rstrip(b"\0") == other._bits.rstrip(b"\0")

    __hash__ = None  # type: ignore[assignment]  # as every set that can grow

    def __repr__(self) -> str:
        first = [row for row, _ in zip(self, range(20), strict=False)]
        return f"RowSet({first}{'…' if len(self) > 20 else ''})"
