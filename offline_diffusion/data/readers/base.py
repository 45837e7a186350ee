"""What every reader of manifest files offers, and the words they share."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from offline_diffusion.data.values import MAX_SHOWN_CHARS, show


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
    text = raw.strip()[: 4 * MAX_SHOWN_CHARS].decode("utf-8", "backslashreplace")
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
    """What tells cheaply that a file was not touched; None where the file system does not say.

    ``size`` is in bytes. ``version`` is another one after every change: the time of it in ns, what a storage
    calls an ETag, or, of many files, a digest over their names and stamps.
    """

    size: int | None
    version: int | str | None


class RowCursor:
    """Sorted, disjoint ranges of row numbers, walked beside a reader that only goes forward.

    The ranges are drawn when their turn comes, so millions of them need not be in memory. More may be added
    while the reader waits at the last row of those before.

    Raises:
        ValueError: The ranges are not sorted or not disjoint; told when the faulty one is drawn.
    """

    def __init__(self, ranges: Iterable[range] = ()) -> None:
        self._ranges = (wanted for wanted in ranges if wanted)
        self._ahead: deque[range] = deque()
        self._last = range(0)
        self._draw()

    def _draw(self) -> bool:
        """Whether there was one more range."""
        wanted = next(self._ranges, None)
        if wanted is not None:
            self.add(wanted)
        return wanted is not None

    def add(self, wanted: range) -> None:
        """Asks for one more range, behind the others; those given at first must have been drawn.

        Raises:
            ValueError: It is not behind them.
        """
        if not wanted:
            return
        if wanted.start < self._last.stop:
            raise ValueError(f"ranges must be sorted and disjoint, got {self._last} before {wanted}")
        self._last = wanted
        self._ahead.append(wanted)

    @property
    def next_start(self) -> int:
        """Where the current range, or the next one, begins; only while not ``done``."""
        return self._ahead[0].start

    @property
    def done(self) -> bool:
        """Whether every range was passed."""
        return not self._ahead

    def wants(self, row: int) -> bool:
        """Whether ``row`` is in a range; rows must be asked for in ascending order."""
        while self._ahead:
            current = self._ahead[0]
            if row < current.stop:
                return row >= current.start
            self._ahead.popleft()
            if not self._ahead:
                self._draw()
        return False

    def wants_any(self, start: int, stop: int) -> bool:
        """Whether one of the rows ``start`` … ``stop - 1`` is in a range; these must ascend, too."""
        self.wants(start)
        return not self.done and self._ahead[0].start < stop

    def first_within(self, start: int, stop: int) -> range | None:
        """The first of the parts that ``within`` gives, None when there is none."""
        self.wants(start)
        if self.done:
            return None
        current = self._ahead[0]
        return range(max(start, current.start), min(stop, current.stop)) or None

    def within(self, start: int, stop: int) -> list[range]:
        """The wanted parts of the rows ``start`` … ``stop - 1``; these must ascend, too."""
        if not self.wants_any(start, stop):
            return []
        while self._last.start < stop and self._draw():
            pass
        found = (range(max(start, wanted.start), min(stop, wanted.stop)) for wanted in self._ahead)
        return [part for part in found if part]


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
        """Size and version, without reading the content. From then on the file must stay as it is."""

    def changed(self, rows: range, /) -> str | None:
        """What some rows are read from, by name, if it looks otherwise than at the last ``stamp``.

        Args:
            rows: Counted within the file.

        Raises:
            ManifestError: It is gone.
        """

    def digest(self) -> str:
        """Hex digest over the content."""
