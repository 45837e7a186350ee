"""CSV and TSV: every cell is text, an empty cell is null."""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa

from offline_diffusion.data.readers.base import BrokenRecord, broken
from offline_diffusion.data.readers.files import MAX_LINE_BYTES, ByteStream, iter_whole_lines, without_ending
from offline_diffusion.data.readers.lines import TOO_LONG, TextReader
from offline_diffusion.data.readers.places import START, Place
from offline_diffusion.data.values import show
from offline_diffusion.errors import ManifestError

MAX_LINES_A_RECORD = 1000
"""A quote that is not closed within so many lines is a stray quote, not a long cell."""

DELIMITERS = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "bar"}


@dataclass(frozen=True)
class DelimitedReader(TextReader[list[str] | BrokenRecord]):
    """A header line, then a row a line; a quoted cell may hold line breaks."""

    delimiter: str
    header: tuple[str, ...]

    @property
    def schema(self) -> pa.Schema | None:
        return pa.schema([(column, pa.string()) for column in self.header])

    def items(self, stream: ByteStream, place: Place) -> Iterator[tuple[int, int, list[str] | BrokenRecord]]:
        records = split_records(stream, self.delimiter, place)
        if place is START:
            next(records, None)  # the header
        return records

    def values(self, item: list[str] | BrokenRecord) -> dict[str, Any] | BrokenRecord:
        if isinstance(item, BrokenRecord):
            return item
        if len(item) != len(self.header):
            raw = self.delimiter.join(item).encode("utf-8", "surrogateescape")
            return broken(f"has {len(item)} cells where the header has {len(self.header)}", raw)
        return {column: cell or None for column, cell in zip(self.header, item, strict=True)}


def read_header(name: str, head: bytes, delimiter: str) -> tuple[str, ...]:
    """The column names in the first line of ``head``; nameless columns become ``column_<n>``.

    Raises:
        ManifestError: There is no such line, or a name occurs twice.
    """
    stream = io.BufferedReader(io.BytesIO(head))
    _, _, cells = next(split_records(stream, delimiter), (0, 0, broken("has no header line", b"")))
    if isinstance(cells, BrokenRecord):
        raise ManifestError(f"{name}: the header {cells.reason}")
    header = tuple(cell.strip() or f"column_{index + 1}" for index, cell in enumerate(cells))
    require_unique(name, header)
    return header


def require_unique(name: str, columns: tuple[str, ...]) -> None:
    """Checks that no column occurs twice.

    Raises:
        ManifestError: One does.
    """
    seen: set[str] = set()
    for column in columns:
        if column in seen:
            raise ManifestError(
                f"{name}: column {show(column)!r} occurs twice", hint="give one of them another name"
            )
        seen.add(column)


def split_records(
    stream: ByteStream, delimiter: str, place: Place = START
) -> Iterator[tuple[int, int, list[str] | BrokenRecord]]:
    """The first line's number and byte offset and the cells of each record; blank lines are none.

    ``stream`` is at ``place``.
    """
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    lines = _Lookahead(iter_whole_lines(stream, place.line, place.offset))
    for number, offset, whole in lines:
        line = without_ending(whole)
        if not line or (line.isspace() and delimiter not in line.decode("latin-1")):
            continue
        if len(line) > MAX_LINE_BYTES:
            yield number, offset, broken(TOO_LONG, line)
        elif b'"' not in line:
            yield number, offset, _checked(line, line.decode("utf-8", "surrogateescape").split(delimiter))
        else:
            yield number, offset, _quoted(whole, lines, delimiter)


class _Lookahead:
    """Lines of which some can be looked at before they are taken."""

    def __init__(self, lines: Iterator[tuple[int, int, bytes]]) -> None:
        self._lines = lines
        self._ahead: deque[tuple[int, int, bytes]] = deque()

    def __iter__(self) -> _Lookahead:
        return self

    def __next__(self) -> tuple[int, int, bytes]:
        return self._ahead.popleft() if self._ahead else next(self._lines)

    def ahead(self) -> Iterator[bytes]:
        """The lines to come, from the next."""
        for index in range(MAX_LINES_A_RECORD):
            if index == len(self._ahead):
                line = next(self._lines, None)
                if line is None:
                    return
                self._ahead.append(line)
            yield self._ahead[index][2]

    def take(self, count: int) -> bytes:
        return b"".join(self._ahead.popleft()[2] for _ in range(count))


def _quoted(whole: bytes, lines: _Lookahead, delimiter: str) -> list[str] | BrokenRecord:
    """The cells of a record that starts with the line ``whole`` and may go on in the next lines."""
    # The csv module draws one line after the other for as long as a quote is open.
    reader = csv.reader(_record_lines(whole, lines), delimiter=delimiter, strict=True)
    line = without_ending(whole)
    try:
        cells = next(reader)
    except csv.Error:  # a quote is not closed, or something follows a closing one
        cells = None
    if cells is not None:
        more = lines.take(reader.line_num - 1)
        return _checked(whole + more if more else line, cells)
    if delimiter == "\t":
        # Many TSV files are written without quoting; there a quote is a character like any other.
        return _checked(line, line.decode("utf-8", "surrogateescape").split(delimiter))
    return broken("has a quote that is not closed, or text after a closing quote", line)


def _record_lines(whole: bytes, lines: _Lookahead) -> Iterator[str]:
    """The line ``whole`` and those that could belong to the same record, as far as records may be long."""
    num_bytes = len(whole)
    for line in chain([whole], lines.ahead()):
        yield line.decode("utf-8", "surrogateescape")
        num_bytes += len(line)
        if num_bytes > MAX_LINE_BYTES:
            return


def _checked(raw: bytes, cells: list[str]) -> list[str] | BrokenRecord:
    try:
        "".join(cells).encode("utf-8")
    except UnicodeEncodeError:
        return broken("is not UTF-8", raw)
    return cells
