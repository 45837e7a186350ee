"""Markers: a shard is published when its marker is there, and the marker says what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offline_diffusion.data.files import read_json
from offline_diffusion.data.layout import FAILURES, IMAGES, METRICS, TABLES, Shard, generation_of, table_files
from offline_diffusion.data.schemas import INVALID_ROW
from offline_diffusion.errors import JobError


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A published file.

    Args:
        path: Relative to the output folder.
        num_rows, num_bytes: Of the whole file.
        sha256: Of its bytes; None when unknown.
        mtime_ns: Of the file as it was written; None when unknown. A file with another one was touched.
    """

    path: str
    num_rows: int
    num_bytes: int
    sha256: str | None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Says that a shard is published, and what it holds.

    Args:
        shard, start, stop: Which rows.
        num_ok, num_failed: Images.
        num_invalid_rows: Quarantined rows.
        files: Everything published.
        task, worker, finished_at: By whom and when (ISO 8601, UTC).
        staged: Name of the folder where the files lie until they are moved into place; None when they
            never were anywhere else.
    """

    shard: int
    start: int
    stop: int
    num_ok: int
    num_failed: int
    num_invalid_rows: int
    files: tuple[PublishedFile, ...]
    task: int
    worker: str
    finished_at: str
    staged: str | None = None

    @property
    def generation(self) -> int:
        """Of the owner of the shard that published it; -1 where that is not known."""
        return generation_of(self.staged or "")

    @property
    def has_failures(self) -> bool:
        """Whether ``--retry-failed`` has something to do here."""
        return self.num_failed > 0 or self.num_invalid_rows > 0


def read_marker(path: Path) -> Marker:
    """Reads a marker.

    Raises:
        JobError: It is damaged.
    """
    values: dict[str, Any] = read_json(path)
    try:
        files = tuple(PublishedFile(**file) for file in values.pop("files"))
        return Marker(files=files, **values)
    except (KeyError, TypeError) as error:
        raise JobError(
            f"{path} is damaged: {error}",
            hint="run the job's command: its shard is made again",
        ) from None


def marker_from_tables(out: Path, shard: Shard) -> Marker | None:
    """The marker of a shard whose tables are whole and agree with each other, else None.

    Checksums of the files are left out: reading a whole dataset for them takes hours.
    """
    try:
        metrics = _read(
            out,
            METRICS,
            shard,
            ["row", "image_index", "status", "error_type", "task", "worker", "finished_at"],
        )
        images = _read(out, IMAGES, shard, ["row", "image_index"])
        failures = _read(out, FAILURES, shard, ["row", "image_index"])
        files = tuple(
            _describe(out, path) for table in TABLES for path in table_files(out, table, shard.stem)
        )
    except (OSError, KeyError, pa.ArrowException):
        return None
    is_ok = pc.equal(metrics["status"], "ok")
    ok, failed = metrics.filter(is_ok), metrics.filter(pc.invert(is_ok))
    rows = pc.unique(metrics["row"]).to_pylist()
    keys = ["row", "image_index"]
    if rows != list(range(shard.start, shard.stop)) or not ok.select(keys).equals(images):
        return None
    if not failed.select(keys).equals(failures):
        return None
    num_invalid = pc.sum(pc.equal(failed["error_type"], INVALID_ROW)).as_py() or 0
    finished_at = pc.max(metrics["finished_at"]).as_py()
    return Marker(
        shard=shard.index,
        start=shard.start,
        stop=shard.stop,
        num_ok=ok.num_rows,
        num_failed=failed.num_rows - num_invalid,
        num_invalid_rows=num_invalid,
        files=files,
        task=metrics["task"][-1].as_py(),
        worker=metrics["worker"][-1].as_py(),
        finished_at=finished_at.isoformat(timespec="seconds"),
    )


def _read(out: Path, table: str, shard: Shard, columns: list[str]) -> pa.Table:
    schema = pa.schema([("row", pa.int64()), ("image_index", pa.int32())])
    paths = table_files(out, table, shard.stem)
    if not paths:
        if table == METRICS:
            raise FileNotFoundError(shard.stem)
        return schema.empty_table()
    tables = [pq.ParquetFile(path).read(columns=columns) for path in paths]
    return pa.concat_tables([table.replace_schema_metadata() for table in tables])


def _describe(out: Path, path: Path) -> PublishedFile:
    num_rows = pq.read_metadata(path).num_rows
    return PublishedFile(path.relative_to(out).as_posix(), num_rows, path.stat().st_size, None)
