"""Parquet files and datasets: Arrow columns, turned into rows a small batch at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offline_diffusion.data.readers.base import BrokenRecord, DamagedError, Record, Records, RowCursor, Stamp
from offline_diffusion.data.readers.delimited import require_unique
from offline_diffusion.data.readers.files import DAMAGED_HINT, DataFile, digest_of
from offline_diffusion.data.readers.lines import FileReader
from offline_diffusion.data.readers.parquet_bounds import MAX_BATCH_ROWS, ParquetBounds
from offline_diffusion.data.readers.watched import WatchedFiles
from offline_diffusion.data.values import show
from offline_diffusion.errors import ManifestError

READ_BUFFER_BYTES = 64 * 1024
PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError)
"""Of pyarrow where a file is damaged; a ValueError is a name that is not UTF-8."""
MAX_ROW_BYTES = 64 * 2**20
"""Of all values of a row; a longer row is a fault."""


class ParquetReader(FileReader):
    """A Parquet file; memory depends neither on its row groups nor on its size."""

    @cached_property
    def _footer(self) -> pq.FileMetaData:
        with self._open() as parquet:
            return parquet.metadata

    @cached_property
    def schema(self) -> pa.Schema:
        schema = self._footer.schema.to_arrow_schema()
        require_unique(self.name, tuple(schema.names))
        return schema

    @cached_property
    def _bounds(self) -> ParquetBounds:
        with self.file.open() as stream:
            return ParquetBounds(stream)

    @property
    def can_jump(self) -> bool:
        return True

    def _open(self) -> pq.ParquetFile:
        source = self.file.path if self.file.is_local else self.file.open()
        try:
            # Without pre-buffering, and through a small buffer, a column is read page by page; by
            # default Arrow would hold a whole row group.
            return pq.ParquetFile(
                source, pre_buffer=False, buffer_size=READ_BUFFER_BYTES, page_checksum_verification=True
            )
        except PARQUET_ERRORS as error:
            raise ManifestError(f"{self.name}: cannot be read as Parquet: {error}") from None

    def check_codecs(self) -> None:
        """Checks that this installation can decompress the file, as far as its first row group tells.

        Raises:
            ManifestError: It cannot.
        """
        if not self._footer.num_row_groups:
            return
        try:
            with self._open() as parquet, self.file.open() as stream:
                self._bounds.batch_rows(0, stream)
                # By reading: pyarrow ends the process when it is asked for a codec that it does not know.
                next(parquet.iter_batches(batch_size=1, row_groups=[0], use_threads=False), None)
        except pa.ArrowNotImplementedError as error:
            hint = "write it with another compression, or pip install --force-reinstall pyarrow"
            raise ManifestError(f"{self.name}: cannot be read here: {error}", hint=hint) from None
        except (*PARQUET_ERRORS, DamagedError) as error:
            raise ManifestError(f"{self.name}: cannot be read: {error}", hint=DAMAGED_HINT) from None

    def records(self, first_row: int, cursor: RowCursor) -> Records:
        row = first_row
        with self._open() as parquet, self.file.open() as stream:
            for index in range(self._footer.num_row_groups):
                group = self._footer.row_group(index)
                if cursor.wants_any(row, row + group.num_rows):
                    batches = parquet.iter_batches(
                        batch_size=self._bounds.batch_rows(index, stream),
                        row_groups=[index],
                        use_threads=False,
                    )
                    yield from _records_of(batches, row, first_row, cursor, row + group.num_rows)
                row += group.num_rows
                if cursor.done:
                    break
        return row - first_row


def _records_of(
    batches: Iterator[pa.RecordBatch], row: int, first_row: int, cursor: RowCursor, stop: int | None = None
) -> Iterator[Record]:
    """The wanted records of consecutive batches, the first of which starts at ``row``.

    Raises:
        DamagedError: They do not end with row ``stop - 1``.
    """
    for batch in batches:
        end = row + batch.num_rows
        # One at a time: the cursor may have got more by the time the part before is through.
        while (wanted := cursor.first_within(row, end)) is not None:
            part = batch.slice(wanted.start - row, len(wanted))
            for number, values in zip(wanted, _rows_in_bounds(part), strict=True):
                yield Record(number, number - first_row + 1, values)
            batch, row = batch.slice(wanted.stop - row), wanted.stop  # noqa: PLW2901
        row = end
        if stop is not None and row > stop:
            break
        cursor.wants(row)
        if cursor.done:
            return
    if stop is not None and row != stop:
        raise DamagedError("a row group has not as many rows as its metadata says")


def _rows_in_bounds(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | BrokenRecord]:
    """As ``batch_rows``; a large batch is taken row by row, and rows over ``MAX_ROW_BYTES`` are faults."""
    if batch.nbytes <= MAX_ROW_BYTES:
        yield from batch_rows(batch)
        return
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        if row.nbytes > MAX_ROW_BYTES:
            yield BrokenRecord(f"is over {MAX_ROW_BYTES} bytes long")
        else:
            yield from batch_rows(row)


def batch_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | BrokenRecord]:
    """The rows of ``batch`` as Python values."""
    names = batch.schema.names
    columns = [cell_values(column, name) for name, column in zip(names, batch.columns, strict=True)]
    is_sound = not any(BrokenRecord in set(map(type, column)) for column in columns)
    for cells in zip(*columns, strict=True):
        fault = None if is_sound else next((cell for cell in cells if isinstance(cell, BrokenRecord)), None)
        yield fault or dict(zip(names, cells, strict=True))


def cell_values(column: pa.Array, name: str) -> list[Any]:
    """The values of ``column`` without loss: Python's own where they can hold it, else Arrow scalars."""
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if not (pa.types.is_time64(column.type) and column.type.unit == "ns"):  # Python's time has no ns
        try:
            return list(column.to_pylist())
        except (ValueError, OverflowError):
            pass
    return [_cell_value(scalar, name) for scalar in column]


def _cell_value(scalar: pa.Scalar, name: str) -> Any:
    if not scalar.is_valid:
        return None
    if pa.types.is_time64(scalar.type):
        return scalar
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        value = show(bytes(error.object).decode("utf-8", "backslashreplace"))
        return BrokenRecord("is not UTF-8", value, name)
    except (ValueError, OverflowError):
        return scalar


@dataclass(frozen=True)
class SavedDatasetReader:
    """A split of a dataset that ``datasets`` saved to disk."""

    name: str
    files: tuple[DataFile, ...]
    schema: pa.Schema

    @property
    def can_jump(self) -> bool:
        return False

    def records(self, first_row: int, cursor: RowCursor) -> Records:
        row = first_row
        for file in self.files:
            # A stream, not the memory map that datasets would make: mapped pages count as memory in use.
            with file.open() as stream, pa.ipc.open_stream(stream) as batches:
                for batch in batches:
                    for part in _small_parts(batch):
                        yield from _records_of(iter([part]), row, first_row, cursor)
                        row += part.num_rows
                    if cursor.done:
                        return row - first_row
        return row - first_row

    @cached_property
    def _watched(self) -> WatchedFiles:
        return WatchedFiles(self.files)

    def stamp(self) -> Stamp:
        return self._watched.stamp()

    def changed(self, _: range, /) -> str | None:
        return self._watched.changed()

    def digest(self) -> str:
        return digest_of(file.digest().encode() for file in self.files)


def _small_parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, MAX_BATCH_ROWS):
        yield batch.slice(start, MAX_BATCH_ROWS)


def saved_dataset(name: str, folder: str, split: str | None, file_of: Any) -> SavedDatasetReader:
    """Opens the folder that ``save_to_disk`` made.

    Args:
        name: As the user gave it.
        folder: The folder's path.
        split: One of a ``DatasetDict``; None when there is only one.
        file_of: Makes a ``DataFile`` of a path.

    Raises:
        ManifestError: It cannot be read, or the split is not there or not named.
    """
    import datasets

    try:
        found = datasets.load_from_disk(folder)
    except Exception as error:  # whatever its parsers raise on damaged metadata
        raise ManifestError(f"{name}: cannot be read as a saved dataset: {error}") from None
    if isinstance(found, datasets.DatasetDict):
        split = choose_split(name, list(found), split)
        found = found[split]
    elif split is not None and str(found.split) != split:
        raise ManifestError(f"{name}: is one dataset without splits", hint=f"leave out :{split}")
    files = tuple(file_of(entry["filename"]) for entry in found.cache_files)
    return SavedDatasetReader(name, files, found.features.arrow_schema)


def choose_split(name: str, splits: list[str], split: str | None) -> str:
    """The split to read.

    Raises:
        ManifestError: It is not there, or none is named and there are several.
    """
    if split in splits:
        return str(split)
    if split is None and len(splits) == 1:
        return splits[0]
    problem = "has several splits" if split is None else f"has no split {split!r}"
    base = name if split is None else name.removesuffix(f":{split}")
    raise ManifestError(
        f"{name}: {problem}: it has {', '.join(splits)}", hint=f"name one, such as {base}:{splits[0]}"
    )


@dataclass(frozen=True)
class HubDatasetReader:
    """A split of a dataset on the Hugging Face Hub, pinned to the commit seen first."""

    name: str
    commit: str
    dataset: Any

    @property
    def schema(self) -> pa.Schema | None:
        features = self.dataset.features
        return None if features is None else features.arrow_schema

    @property
    def can_jump(self) -> bool:
        return False

    def records(self, first_row: int, cursor: RowCursor) -> Records:
        row = first_row
        try:
            for table in self.dataset.with_format("arrow").iter(batch_size=MAX_BATCH_ROWS // 4):
                for batch in table.to_batches():
                    yield from _records_of(iter([batch]), row, first_row, cursor)
                    row += batch.num_rows
                if cursor.done:
                    break
        except Exception as error:  # the network's, the Hub's and each file format's own errors
            raise ManifestError(f"{self.name}: cannot be read at about row {row}: {error}") from None
        return row - first_row

    def stamp(self) -> Stamp:
        return Stamp(None, None)

    def changed(self, _: range, /) -> str | None:
        return None  # a commit does not change

    def digest(self) -> str:
        return f"commit:{self.commit}"


def hub_dataset(name: str, repo: str, revision: str | None, split: str | None) -> HubDatasetReader:
    """Opens a dataset on the Hub for streaming.

    Raises:
        ManifestError: It cannot be reached, or the split is not there or not named.
    """
    import datasets
    import huggingface_hub

    try:
        commit = huggingface_hub.HfApi().dataset_info(repo, revision=revision).sha
        found = datasets.load_dataset(repo, revision=commit, streaming=True)
    except Exception as error:  # the network's, the Hub's and each builder's own errors
        raise ManifestError(
            f"{name}: cannot be opened: {error}",
            hint="is the name right, is the Hub reachable, is a token needed (hf auth login)?",
        ) from None
    split = choose_split(name, list(found), split)
    return HubDatasetReader(name, str(commit), found[split])


def huggingface_features(schema: pa.Schema) -> dict[str, Any]:
    """The ``datasets`` features that a schema's metadata declares, by column; empty when it has none."""
    try:
        info = json.loads((schema.metadata or {})[b"huggingface"])
        features = info["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}
