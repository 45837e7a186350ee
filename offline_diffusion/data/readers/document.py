"""A whole file that is one JSON list or one JSON object: read element by element."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from offline_diffusion.data.readers.base import BrokenRecord, DamagedError, Record, Records, RowCursor, broken
from offline_diffusion.data.readers.files import BOM, MAX_LINE_BYTES, MAX_PASSED_BYTES, ByteStream
from offline_diffusion.data.readers.json_text import decode_json, object_record
from offline_diffusion.data.readers.lines import TOO_LONG, FileReader

CHUNK_BYTES = 64 * 1024

_OUTSIDE = re.compile(rb'["\[\]{},]')
_IN_STRING = re.compile(rb'["\\]')


class JsonDocumentReader(FileReader):
    """A list of prompts or of rows, or an object of ids to prompts or rows.

    One element at a time is in memory, and a faulty element costs only its row.
    """

    def records(self, first_row: int, cursor: RowCursor) -> Records:
        row = first_row
        with self.file.open_decompressed() as stream:
            splitter = ElementSplitter(stream)
            for line, raw in splitter:
                if cursor.wants(row):
                    make = _entry_row if splitter.is_object else _element_row
                    yield Record(row, line, make(raw))
                elif cursor.done:
                    break
                row += 1
        return row - first_row


def _element_row(raw: bytes) -> dict[str, Any] | BrokenRecord:
    if len(raw) > MAX_LINE_BYTES:
        return broken(TOO_LONG, raw)
    value = decode_json(raw)
    return {"prompt": value} if isinstance(value, str) else object_record(value, raw)


def _entry_row(raw: bytes) -> dict[str, Any] | BrokenRecord:
    if len(raw) > MAX_LINE_BYTES:
        return broken(TOO_LONG, raw)
    entry = decode_json(b"{" + raw + b"}")
    if isinstance(entry, BrokenRecord) or len(entry) != 1:
        return entry if isinstance(entry, BrokenRecord) else broken("is not one key and its value", raw)
    [(key, value)] = entry.items()
    if isinstance(value, str):
        return {"id": key, "prompt": value}
    if not isinstance(value, dict):
        return broken("must be a prompt or an object with one", raw)
    return {"id": key, **{name if name != "id" else "id_carried": cell for name, cell in value.items()}}


@dataclass
class _Element:
    """The element being collected."""

    line: int
    raw: bytearray = field(default_factory=bytearray)
    num_bytes: int = 0
    num_newlines: int = 0

    def add(self, part: bytes) -> None:
        # One byte over the limit tells the reader that the element was cut.
        self.raw += part[: MAX_LINE_BYTES + 1 - len(self.raw)]
        self.num_newlines += part.count(b"\n")
        self.num_bytes += len(part)
        if self.num_bytes > MAX_PASSED_BYTES:
            raise DamagedError(
                f"the row that begins in line {self.line} does not end within {MAX_PASSED_BYTES} bytes"
            )

    def finish(self) -> tuple[int, bytes]:
        raw = bytes(self.raw)
        lead = len(raw) - len(raw.lstrip())
        line = self.line + raw.count(b"\n", 0, lead)
        return line, raw if len(raw) > MAX_LINE_BYTES else raw.strip()


class ElementSplitter:
    """Iterates over the elements of a JSON list or object: line number and raw text of each.

    Raises:
        DamagedError: The document is cut off, something follows it, or an element does not end within
            ``MAX_PASSED_BYTES``.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._line = 1
        self.is_object = self._skip_to_opening() == b"{"

    def _skip_to_opening(self) -> bytes:
        if self._stream.peek(3)[:3] == BOM:
            self._stream.read(3)
        while (byte := self._stream.read(1)).isspace():
            self._line += byte == b"\n"
        return byte

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        element = _Element(self._line)
        depth, in_string, escaped = 0, False, False
        while chunk := self._stream.read(CHUNK_BYTES):
            start, position = 0, int(escaped)
            escaped = False
            while match := (_IN_STRING if in_string else _OUTSIDE).search(chunk, position):
                mark, position = match[0], match.end()
                if mark == b"\\":
                    escaped = position == len(chunk)
                    position += 1
                elif mark == b'"':
                    in_string = not in_string
                elif mark in b"[{":
                    depth += 1
                elif mark in b"]}" and depth:
                    depth -= 1
                elif not depth:
                    element.add(chunk[start : position - 1])
                    line, raw = element.finish()
                    if raw or mark == b",":
                        yield line, raw
                    if mark != b",":
                        self._require_end(chunk[position:])
                        return
                    start, element = position, _Element(element.line + element.num_newlines)
            element.add(chunk[start:])
        raise DamagedError("the JSON document is cut off")

    def _require_end(self, rest: bytes) -> None:
        while rest:
            if not rest.isspace():
                raise DamagedError("something follows the JSON document")
            rest = self._stream.read(CHUNK_BYTES)
