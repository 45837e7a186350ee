"""What every reader of manifest files offers, and the words they share."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from offline_diffusion.data.values import show


class DamagedError(Exception):
    """A file cannot be read any further."""


@dataclass(frozen=True, slots=True)
class BrokenRecord:
    """A record that could not be read at all, or not without loss.

    ``column`` is empty when the record as a whole is broken.
    """

    reason: str
    value: str = ""
    column: str = ""
    content_hash: str = ""


def broken(reason: str, raw: bytes, column: str = "") -> BrokenRecord:
    """A broken record whose value and content hash come from its raw bytes."""
    text = raw.strip().decode("utf-8", "backslashreplace")
    return BrokenRecord(reason, show(text), column, hashlib.blake2b(raw, digest_size=8).hexdigest())


class Record(NamedTuple):
    """One row as its file has it.

    ``row`` counts over the whole manifest, ``line`` within the file from 1. ``file`` is the file's name
    where one reader reads several.
    """

    row: int
    line: int
    values: dict[str, Any] | BrokenRecord
    file: str | None = None


class Stamp(NamedTuple):
    """What tells cheaply that a file was not touched; None where the file system does not say."""

    size: int | None
    mtime_ns: int | None


class RowCursor:
    """Sorted, disjoint ranges of row numbers, walked beside a reader that only goes forward.

    More ranges may be added while the reader waits at the last row of those before.
    """

    def __init__(self, ranges: Iterable[range]) -> None:
        self._ranges: list[range] = []
        self._next = 0
        for wanted in ranges:
            self.add(wanted)

    def add(self, wanted: range) -> None:
        """Asks for one more range, behind the others.

        Raises:
            ValueError: It is not behind them.
        """
        if not wanted:
            return
        if self._ranges and wanted.start < (before := self._ranges[-1]).stop:
            raise ValueError(f"ranges must be sorted and disjoint, got {before} before {wanted}")
        self._ranges.append(wanted)

    @property
    def next_start(self) -> int:
        """Where the current range, or the next one, begins; only while not ``done``."""
        return self._ranges[self._next].start

    @property
    def done(self) -> bool:
        """Whether every range was passed."""
        return self._next >= len(self._ranges)

    def wants(self, row: int) -> bool:
        """Whether ``row`` is in a range; rows must be asked for in ascending order."""
        while self._next < len(self._ranges):
            current = self._ranges[self._next]
            if row < current.stop:
                return row >= current.start
            self._next += 1
        return False

    def first_within(self, start: int, stop: int) -> range | None:
        """The first of the parts that ``within`` gives, None when there is none."""
        while self._next < len(self._ranges):
            current = self._ranges[self._next]
            if start < current.stop:
                first = range(max(start, current.start), min(stop, current.stop))
                return first or None
            self._next += 1
        return None

    def within(self, start: int, stop: int) -> list[range]:
        """The wanted parts of the rows ``start`` … ``stop - 1``; these must ascend, too."""
        self.wants(start)
        parts = []
        for wanted in self._ranges[self._next :]:
            if wanted.start >= stop:
                break
            parts.append(range(max(start, wanted.start), min(stop, wanted.stop)))
        return parts


Records = Generator[Record, None, int]
"""Wanted records in order; the generator returns the number of rows in the file.

It may end early, with any number, once its cursor is done.
"""


class Reader(Protocol):
    """One file of a manifest, or what counts as one (a folder of prompt files, a dataset)."""

    @property
    def name(self) -> str:
        """Path or URL, as the user gave or globbed it."""

    @property
    def schema(self) -> pa.Schema | None:
        """Columns and types where the file declares them; None where each row has its own."""

    @property
    def can_jump(self) -> bool:
        """Whether reading may begin anywhere at little cost; else all rows before are passed over."""

    def records(self, first_row: int, cursor: RowCursor) -> Records:
        """Reads forward, once; the first row of the file has the number ``first_row``."""

    def stamp(self) -> Stamp:
        """Size and time of change, without reading the content."""

    def digest(self) -> str:
        """Hex digest over the content."""
