"""Files with a row a line: JSONL and plain prompts; and folders with a prompt a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import pyarrow as pa

from offline_diffusion.data.readers.base import BrokenRecord, Record, Records, RowCursor, Stamp, broken
from offline_diffusion.data.readers.files import (
    BOM,
    MAX_LINE_BYTES,
    ByteStream,
    DataFile,
    digest_of,
    iter_whole_lines,
    without_ending,
)
from offline_diffusion.data.readers.json_text import decode_json, object_record
from offline_diffusion.data.readers.places import ROWS_A_PLACE, START, Place, Places
from offline_diffusion.data.readers.watched import WatchedFiles
from offline_diffusion.data.values import MAX_PROMPT_BYTES

PROMPT_SCHEMA = pa.schema([("prompt", pa.string())])

ItemT = TypeVar("ItemT")

TOO_LONG = f"is over {MAX_LINE_BYTES} bytes long"


@dataclass(frozen=True)
class FileReader:
    """What all readers of one file share."""

    file: DataFile

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def schema(self) -> pa.Schema | None:
        return None

    @property
    def can_jump(self) -> bool:
        return False

    @cached_property
    def _watched(self) -> WatchedFiles:
        return WatchedFiles((self.file,))

    def stamp(self) -> Stamp:
        return self._watched.stamp()

    def changed(self, _: range, /) -> str | None:
        return self._watched.changed()

    def digest(self) -> str:
        return self.file.digest()


class TextReader(FileReader, Generic[ItemT]):
    """A file of which each part makes a row. Where rows begin is remembered, so that they are jumped to."""

    @cached_property
    def places(self) -> Places:
        """Those that were come by."""
        return Places()

    @property
    def can_jump(self) -> bool:
        return not self.file.is_compressed

    def items(self, stream: ByteStream, place: Place) -> Iterator[tuple[int, int, ItemT]]:
        """The line, the byte offset and the content of each part from ``place`` on, where ``stream`` is."""
        raise NotImplementedError

    def values(self, item: ItemT) -> dict[str, Any] | BrokenRecord:
        """The row that a part makes."""
        raise NotImplementedError

    def records(self, first_row: int, cursor: RowCursor) -> Records:
        places, can_jump = self.places, self.can_jump
        with self.file.open_decompressed() as stream:
            place: Place | None = START
            while place is not None:
                row = first_row + place.row
                if place is not START:
                    stream.seek(place.offset)
                start, place = place, None
                for number, offset, item in self.items(stream, start):
                    if can_jump and not (row - first_row) % ROWS_A_PLACE:
                        places.learn(row - first_row, number, offset)
                    if cursor.wants(row):
                        yield Record(row, number, self.values(item))
                    elif cursor.done:
                        break
                    elif row - first_row < places.end:
                        place = places.before(cursor.next_start - first_row)
                        if place.row > row - first_row:
                            break
                        place = None
                    row += 1
        return row - first_row


class LinesReader(TextReader[bytes]):
    """A row a line; blank lines are no rows."""

    def items(self, stream: ByteStream, place: Place) -> Iterator[tuple[int, int, bytes]]:
        for number, offset, whole in iter_whole_lines(stream, place.line, place.offset):
            line = without_ending(whole)
            if line and not line.isspace():
                yield number, offset, line


class JsonLinesReader(LinesReader):
    """One JSON object a line."""

    def values(self, item: bytes) -> dict[str, Any] | BrokenRecord:
        if len(item) > MAX_LINE_BYTES:
            return broken(TOO_LONG, item)
        return object_record(decode_json(item), item)


class PromptLinesReader(LinesReader):
    """One prompt a line."""

    @property
    def schema(self) -> pa.Schema | None:
        return PROMPT_SCHEMA

    def values(self, item: bytes) -> dict[str, Any] | BrokenRecord:
        return prompt_record(item)


def prompt_record(raw: bytes) -> dict[str, Any] | BrokenRecord:
    """A row of nothing but a prompt."""
    try:
        return {"prompt": raw.decode("utf-8")}
    except UnicodeDecodeError as error:
        return broken(f"is not UTF-8 (byte {error.start + 1}: {raw[error.start]:#04x})", raw, "prompt")


@dataclass(frozen=True)
class PromptFolderReader:
    """A folder with a prompt a file; a row's id is the file's path in the folder without its suffix."""

    name: str
    folder: str
    files: tuple[tuple[str, DataFile], ...]

    @property
    def schema(self) -> pa.Schema | None:
        return PROMPT_SCHEMA

    @property
    def can_jump(self) -> bool:
        return True

    @cached_property
    def _watched(self) -> WatchedFiles:
        return WatchedFiles([file for _, file in self.files], self.folder)

    def records(self, first_row: int, cursor: RowCursor) -> Records:
        for index, (stem, file) in enumerate(self.files):
            if cursor.wants(first_row + index):
                yield Record(first_row + index, 1, self._row(stem, file), file.name)
            elif cursor.done:
                break
        return len(self.files)

    def _row(self, stem: str, file: DataFile) -> dict[str, Any] | BrokenRecord:
        with file.open_decompressed() as stream:
            # A few bytes more for a BOM and the line ending; what is still longer is a fault of the row.
            raw = stream.read(MAX_PROMPT_BYTES + 8)
        record = prompt_record(raw.removeprefix(BOM).removesuffix(b"\n").removesuffix(b"\r"))
        return record if isinstance(record, BrokenRecord) else {"id": stem, **record}

    def stamp(self) -> Stamp:
        return self._watched.stamp()

    def changed(self, rows: range, /) -> str | None:
        return self._watched.changed(slice(rows.start, rows.stop))

    def digest(self) -> str:
        return digest_of(part for stem, file in self.files for part in _named_content(stem, file))


def _named_content(stem: str, file: DataFile) -> Iterator[bytes]:
    num_bytes = sum(map(len, file.chunks()))  # where a name ends and the next begins
    yield f"{stem}\0{num_bytes}\0".encode("utf-8", "surrogateescape")
    yield from file.chunks()
