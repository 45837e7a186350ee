"""A shard's unfinished images on disk: append-only, so a crash costs at most the last record.

Kill -9 costs nothing that was appended, a power loss what was appended since the last sync. Each attempt
at a shard writes one new file, an Arrow IPC stream with one record batch an image; nothing is ever
truncated or appended over. Readers take every whole record and stop at a torn one.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from offline_diffusion.errors import JobError

PARTIAL_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("image_index", pa.int64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("image", pa.large_binary()),
        pa.field("result", pa.large_string(), nullable=False),
        pa.field("crc32", pa.uint32(), nullable=False),
    ]
)

ImageKey = tuple[int, int]
"""``(row, image_index)``: names one requested image of a job."""


@dataclass(frozen=True, slots=True)
class Record:
    """One finished or failed image.

    Args:
        row, image_index: Which one.
        status: ``ok`` has an image, ``failed`` has none.
        image: The encoded image.
        result: Column name → value for the images and metrics tables; plain JSON types.
    """

    row: int
    image_index: int
    status: Literal["ok", "failed"]
    image: bytes | None
    result: dict[str, Any] = field(hash=False)

    @property
    def key(self) -> ImageKey:
        return self.row, self.image_index


class Slot(NamedTuple):
    """Where a record lies: bytes ``offset`` to ``offset + length`` of a partial file."""

    path: Path
    offset: int
    length: int
    status: str


def new_partial_path(folder: Path, stem: str, generation: int) -> Path:
    """A fresh name for a partial of an owner of the shard; a later owner has a higher generation."""
    return folder / f"{stem}.{new_attempt(generation)}.arrows"


def new_attempt(generation: int) -> str:
    """Names what an owner of a shard writes; unlike any other name, also of the same generation."""
    return f"{generation:06d}-{secrets.token_hex(4)}"


def newest_generation(folder: Path, stem: str) -> int:
    """The highest generation that a shard's partials have; -1 without partials."""
    return max((int(attempt_of(path).split("-")[0]) for path in partial_paths(folder, stem)), default=-1)


def attempt_of(path: Path) -> str:
    """The part of a partial's name that ``new_attempt`` made."""
    return path.name.split(".")[1]


def partial_paths(folder: Path, stem: str) -> list[Path]:
    """A shard's partials, oldest attempt first."""
    return sorted(folder.glob(f"{stem}.*.arrows"))


class PartialWriter:
    """Appends records to a new partial file.

    After an error the file may end in a torn record, so it takes no more: ``is_whole`` is false.

    Raises:
        OSError: The disk is full or failed; no file is left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._offset = 0
        self.is_whole = self._synced = True
        try:
            self._write(PARTIAL_SCHEMA.serialize())
        except OSError:
            self.close()
            path.unlink()
            raise

    def append(self, record: Record) -> Slot:
        """Writes a record: once this returns, kill -9 cannot lose it.

        Raises:
            OSError: The disk is full or failed.
        """
        assert self.is_whole, "append after a failed write"
        offset = self._offset
        self._write(_to_batch(record).serialize())
        return Slot(self.path, offset, self._offset - offset, record.status)

    def _write(self, data: pa.Buffer) -> None:
        view = memoryview(data)
        self.is_whole = self._synced = False
        while view.nbytes:
            written = os.write(self._fd, view)
            self._offset += written
            view = view[written:]
        self.is_whole = True

    def sync(self) -> None:
        """Makes everything appended survive a power loss."""
        if not self._synced:
            os.fsync(self._fd)
            self._synced = True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def scan_partials(paths: Sequence[Path]) -> Iterator[tuple[Slot, Record]]:
    """Every whole record of some partial files, in order; a torn tail ends its file.

    A file that is gone has none: its shard was published meanwhile.
    """
    for path in paths:
        yield from _scan(path)


def _scan(path: Path) -> Iterator[tuple[Slot, Record]]:
    try:
        opened = pa.OSFile(str(path))
    except FileNotFoundError:
        return
    with opened as file:
        if _next_message(file) is None:
            return
        while True:
            offset = file.tell()
            message = _next_message(file)
            record = None if message is None else _from_message(message)
            if message is None:
                return
            if record is not None:
                yield Slot(path, offset, file.tell() - offset, record.status), record


def _next_message(file: pa.NativeFile) -> pa.ipc.Message | None:
    # Arrow says OSError, ArrowInvalid or EOFError, depending on where the tear is.
    try:
        return pa.ipc.read_message(file)
    except (EOFError, OSError, pa.ArrowException):
        return None


def read_record(slot: Slot) -> Record:
    """Reads one record back.

    Raises:
        JobError: It is no longer what was written.
    """
    fd = os.open(slot.path, os.O_RDONLY)
    try:
        data = os.pread(fd, slot.length, slot.offset)
    finally:
        os.close(fd)
    record = None
    if len(data) == slot.length:
        record = _from_message(pa.ipc.read_message(pa.py_buffer(data)))
    if record is None:
        raise JobError(
            f"{slot.path} is damaged at byte {slot.offset}",
            hint="the disk may be failing; run the same command: damaged images are made again",
        )
    return record


def _to_batch(record: Record) -> pa.RecordBatch:
    result = json.dumps(record.result, ensure_ascii=False, separators=(",", ":"))
    result = result.encode("utf-8", "replace").decode()
    values = (record.row, record.image_index, record.status, record.image, result)
    columns = [[value] for value in (*values, _checksum(*values))]
    arrays = [pa.array(column, type=at.type) for column, at in zip(columns, PARTIAL_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=PARTIAL_SCHEMA)


def _from_message(message: pa.ipc.Message) -> Record | None:
    """The record, or None when a part of it was never written: a power loss can leave holes of zeros."""
    try:
        batch = pa.ipc.read_record_batch(message, PARTIAL_SCHEMA)
        batch.validate(full=True)
        row, index, status, image, result, crc32 = (column[0].as_py() for column in batch.columns)
    except (OSError, IndexError, UnicodeDecodeError, pa.ArrowException):
        return None
    if crc32 != _checksum(row, index, status, image, result):
        return None
    return Record(row, index, status, image, json.loads(result))


def _checksum(row: int, image_index: int, status: str, image: bytes | None, result: str) -> int:
    return zlib.crc32(image or b"", zlib.crc32(f"{row}:{image_index}:{status}:{result}".encode()))
