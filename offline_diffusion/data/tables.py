"""Writes the published tables: Parquet with explicit schemas, bounded row groups and files."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offline_diffusion.data.carried import carried_array
from offline_diffusion.data.files import file_sha256
from offline_diffusion.data.layout import FAILURES, IMAGES, METRICS, Shard, staged_file, table_file
from offline_diffusion.data.marker import PublishedFile
from offline_diffusion.data.schemas import (
    FAILURES_SCHEMA,
    IMAGE_COLUMNS,
    METRICS_SCHEMA,
    carried_names,
    images_schema,
)

ROW_GROUP_BYTES = 64 * 2**20
"""A row group is closed before it grows beyond this; a single larger row has one of its own."""

ROW_GROUP_ROWS = 10_000

FILE_BYTES = 1_900_000_000
"""The images of a shard go on in another file before one grows beyond this."""


_IMAGE_BYTES = "image.bytes"
_ROW_OVERHEAD = 256

Row = Mapping[str, Any]


class TableWriter:
    """Turns rows into the files of one table of one shard, not in their place yet.

    Args:
        folder: For the unpublished files; see ``layout.staged_file``.
        table: Name of the table: the folder that the files will go to.
        stem: File name without suffix.
        schema: Of the files.
        build: Makes an Arrow table of ``schema`` from rows.
    """

    def __init__(
        self,
        folder: Path,
        table: str,
        stem: str,
        schema: pa.Schema,
        build: Callable[[list[Row]], pa.Table],
    ) -> None:
        self.table = table
        self._folder, self._stem = folder, stem
        self._schema, self._build = schema, build
        self._options = _parquet_options(schema)
        self._rows: list[Row] = []
        self._num_bytes = 0
        self._writer: pq.ParquetWriter | None = None
        self._file: io.BufferedWriter | None = None
        self._num_rows = 0
        self._written: list[PublishedFile] = []

    def add(self, row: Row, num_bytes: int = 0) -> None:
        """Adds a row whose largest value has ``num_bytes``."""
        num_bytes += _ROW_OVERHEAD
        full = self._num_bytes + num_bytes > ROW_GROUP_BYTES or len(self._rows) >= ROW_GROUP_ROWS
        if full and self._rows:
            self._flush()
        self._rows.append(row)
        self._num_bytes += num_bytes

    def close(self, least_files: int = 0) -> list[PublishedFile]:
        """Ends the table. Its files are durable, but not in their place.

        Args:
            least_files: With fewer files empty ones are added.

        Returns:
            What they will be published as; without rows only empty ones.
        """
        if self._rows:
            self._flush()
        self._end_file()
        while len(self._written) < least_files:
            self._begin_file()
            self._end_file()
        return self._written

    def discard(self) -> None:
        """Lets go of what is open; the files stay where they are."""
        if self._writer is not None and self._file is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer.is_open = False  # a failed close would be tried again when it is collected
            with contextlib.suppress(OSError):
                self._file.close()

    def _flush(self) -> None:
        self._write_group(self._build(self._rows))
        self._rows, self._num_bytes = [], 0

    def _write_group(self, table: pa.Table) -> None:
        """Writes a row group, or several when carried columns make it too large."""
        if table.nbytes > ROW_GROUP_BYTES and table.num_rows > 1:
            half = table.num_rows // 2
            self._write_group(table.slice(0, half))
            self._write_group(table.slice(half))
            return
        if self._file is not None and self._file.tell() + table.nbytes > FILE_BYTES:
            self._end_file()
        if self._writer is None:
            self._begin_file()
        assert self._writer is not None
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._num_rows += table.num_rows

    def _begin_file(self) -> None:
        target = f"{self.table}/{table_file(self._stem, len(self._written))}"
        self._file = open(staged_file(self._folder, target), "xb")  # noqa: SIM115  (lives on)
        self._writer = pq.ParquetWriter(self._file, self._schema, **self._options)
        self._written.append(PublishedFile(target, 0, 0, None))

    def _end_file(self) -> None:
        if self._writer is None or self._file is None:
            return
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        target = self._written[-1].path
        path = staged_file(self._folder, target)
        stat, sha256 = path.stat(), file_sha256(path)
        self._written[-1] = PublishedFile(target, self._num_rows, stat.st_size, sha256, stat.st_mtime_ns)
        self._writer, self._file, self._num_rows = None, None, 0


def images_writer(folder: Path, shard: Shard, carried: pa.Schema) -> TableWriter:
    """For rows with the columns of ``IMAGE_COLUMNS`` and ``carried``: the manifest's other values."""
    schema = images_schema(carried)
    sources = list(zip(carried_names(carried), carried.names, strict=True))

    def build(rows: list[Row]) -> pa.Table:
        columns = [_array([row[name] for row in rows], schema.field(name).type) for name in IMAGE_COLUMNS]
        for name, source in sources:
            values = [row["carried"].get(source) for row in rows]
            columns.append(carried_array(values, schema.field(name).type))
        return pa.Table.from_arrays(columns, schema=schema)

    return TableWriter(folder, IMAGES, shard.stem, schema, build)


def metrics_writer(folder: Path, shard: Shard) -> TableWriter:
    """For rows with the columns of ``METRICS_SCHEMA``; missing ones are null."""
    return _plain_writer(folder, METRICS, shard, METRICS_SCHEMA)


def failures_writer(folder: Path, shard: Shard) -> TableWriter:
    """For rows with the columns of ``FAILURES_SCHEMA``; missing ones are null."""
    return _plain_writer(folder, FAILURES, shard, FAILURES_SCHEMA)


def _plain_writer(folder: Path, table: str, shard: Shard, schema: pa.Schema) -> TableWriter:
    def build(rows: list[Row]) -> pa.Table:
        columns = [_array([row.get(field.name) for row in rows], field.type) for field in schema]
        return pa.Table.from_arrays(columns, schema=schema)

    return TableWriter(folder, table, shard.stem, schema, build)


def _array(values: list[Any], type_: pa.DataType) -> pa.Array:
    if pa.types.is_string(type_):  # half of a surrogate pair is no text to Arrow
        values = [value and value.encode("utf-8", "replace").decode() for value in values]
    return pa.array(values, type_)


def _parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Encoded images gain nothing from compression, dictionaries or statistics; all else does."""
    sample = io.BytesIO()
    pq.write_table(schema.empty_table(), sample)
    columns = pq.ParquetFile(sample).schema
    paths = [columns.column(index).path for index in range(len(columns))]
    others = [path for path in paths if path != _IMAGE_BYTES]
    return {
        "compression": dict.fromkeys(others, "zstd") | {path: "none" for path in paths if path not in others},
        "use_dictionary": others,
        "write_statistics": others,
    }
