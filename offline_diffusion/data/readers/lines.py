"""Files with a row a line: JSONL and plain prompts; and folders with a prompt a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from offline_diffusion.data.readers.base import BrokenRecord, Record, Records, RowCursor, Stamp, broken
from offline_diffusion.data.readers.files import BOM, MAX_LINE_BYTES, DataFile, digest_of, iter_lines
from offline_diffusion.data.readers.json_text import decode_json, object_record
from offline_diffusion.data.values import MAX_PROMPT_BYTES

PROMPT_SCHEMA = pa.schema([("prompt", pa.string())])

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

    def stamp(self) -> Stamp:
        return self.file.stamp()

    def digest(self) -> str:
        return self.file.digest()


class LinesReader(FileReader):
    """A row a line; blank lines are no rows."""

    def parse(self, line: bytes) -> dict[str, Any] | BrokenRecord:
        """The row of a line."""
        raise NotImplementedError

    def records(self, first_row: int, cursor: RowCursor) -> Records:
        row = first_row
        with self.file.open_decompressed() as stream:
            for number, line in iter_lines(stream):
                if not line or line.isspace():
                    continue
                if cursor.wants(row):
                    yield Record(row, number, self.parse(line))
                elif cursor.done:
                    break
                row += 1
        return row - first_row


class JsonLinesReader(LinesReader):
    """One JSON object a line."""

    def parse(self, line: bytes) -> dict[str, Any] | BrokenRecord:
        if len(line) > MAX_LINE_BYTES:
            return broken(TOO_LONG, line)
        return object_record(decode_json(line), line)


class PromptLinesReader(LinesReader):
    """One prompt a line."""

    @property
    def schema(self) -> pa.Schema | None:
        return PROMPT_SCHEMA

    def parse(self, line: bytes) -> dict[str, Any] | BrokenRecord:
        return prompt_record(line)


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
    files: tuple[tuple[str, DataFile], ...]

    @property
    def schema(self) -> pa.Schema | None:
        return PROMPT_SCHEMA

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
        # No time of change: it would not tell that a file was renamed, and names are ids.
        return Stamp(sum(file.stamp().size or 0 for _, file in self.files), None)

    def digest(self) -> str:
        return digest_of(part for stem, file in self.files for part in _named_content(stem, file))


def _named_content(stem: str, file: DataFile) -> Iterator[bytes]:
    num_bytes = sum(map(len, file.chunks()))  # where a name ends and the next begins
    yield f"{stem}\0{num_bytes}\0".encode("utf-8", "surrogateescape")
    yield from file.chunks()
