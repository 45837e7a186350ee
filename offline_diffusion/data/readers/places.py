"""Where rows begin in a text file, learned while it is read: a later reader jumps there."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

ROWS_A_PLACE = 512


class Place(NamedTuple):
    """The beginning of a row: its number in the file from 0, its line from 1, its byte from 0."""

    row: int
    line: int
    offset: int


START = Place(0, 1, 0)


class Places:
    """Every so many rows one place, 24 bytes each."""

    def __init__(self) -> None:
        self._rows, self._lines, self._offsets = array("q"), array("q"), array("q")
        self.end = -1
        """The last row whose place is known."""

    def learn(self, row: int, line: int, offset: int) -> None:
        """Notes where a row begins, if it is further on than what is known."""
        if row > self.end:
            self._rows.append(row)
            self._lines.append(line)
            self._offsets.append(offset)
            self.end = row

    def before(self, row: int) -> Place:
        """The last known place at or before a row."""
        index = bisect_right(self._rows, row) - 1
        if index < 0:
            return START
        return Place(self._rows[index], self._lines[index], self._offsets[index])

    def __iter__(self) -> Iterator[Place]:
        return map(Place, self._rows, self._lines, self._offsets)
