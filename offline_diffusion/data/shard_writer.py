"""One shard from its first finished image to its publication, safe against a crash at any point.

A shard is made in four steps: every finished image is appended to a partial file; once all are there
the tables are written under scratch names; they are renamed into place; the marker is written. Only
then do the partials go.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offline_diffusion.config import ImageFormat
from offline_diffusion.data.files import disk_errors, sync_folder
from offline_diffusion.data.layout import TABLES, Shard, table_files
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import Marker, PublishedFile
from offline_diffusion.data.partial import (
    ImageKey,
    PartialWriter,
    Record,
    new_partial_path,
    partial_paths,
    read_record,
    scan_partials,
)
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.schemas import INVALID_ROW
from offline_diffusion.data.shard_images import ImageKeys, ShardImages, SlotTable
from offline_diffusion.data.tables import TableWriter, failures_writer, images_writer, metrics_writer
from offline_diffusion.errors import JobError


class ShardWriter:
    """Collects the images of one shard and publishes them. Not thread-safe.

    Opening it makes this process the shard's owner: a process that had it open before can no longer
    publish it.

    Args:
        ledger: The open output folder.
        shard: Which rows.
        rows: Those rows, in order; a ``RowFault`` for each that is quarantined.
        task, worker: Recorded with quarantined rows and in the marker.
        image_format: Of the encoded images; names their files.
        retry_failed: Do images again that failed before, also of a published shard.

    Raises:
        JobError: The disk is full or cannot be written to.
    """

    def __init__(
        self,
        ledger: Ledger,
        shard: Shard,
        rows: Sequence[ManifestRow | RowFault],
        *,
        task: int,
        worker: str,
        image_format: ImageFormat,
        retry_failed: bool = False,
    ) -> None:
        self.shard = shard
        self._ledger, self._rows = ledger, rows
        self._task, self._worker, self._image_format = task, worker, image_format
        numbers = [row.row for row in rows]
        assert numbers == list(range(shard.start, shard.stop)), "rows must be the shard's, in order"
        self.images = ShardImages(rows)
        self._failed_attempts: dict[int, int] = {}  # by an image's number; only of what is retried
        with disk_errors(ledger.out):
            self._slots = self._recover(retry_failed)
            path = new_partial_path(ledger.partials, shard.stem)
            self._partial = PartialWriter(path)
            sync_folder(ledger.partials)

    def _recover(self, retry_failed: bool) -> SlotTable:
        """What earlier attempts left: the first good image of each key, else its failure."""
        slots = SlotTable(self.images)
        for slot, record in scan_partials(partial_paths(self._ledger.partials, self.shard.stem)):
            if not self._wanted(record.key, record.result.get("row_hash")):
                continue
            if retry_failed and record.status != "ok":
                self._count_attempts(record.key, record.result["attempts"])
                continue
            known = slots.get(record.key)
            if known is None or (known.status != "ok" and record.status == "ok"):
                slots[record.key] = slot
        return slots

    def _wanted(self, key: ImageKey, row_hash: str | None) -> bool:
        return self.images.number(key) is not None and row_hash == self.row_hash(key[0])

    def _count_attempts(self, key: ImageKey, attempts: int) -> None:
        """A failure's count holds those before it: the largest is that of all."""
        number = self.images.number(key)
        assert number is not None
        self._failed_attempts[number] = max(attempts, self._failed_attempts.get(number, 0))

    def count_failures(self, failures: Iterable[tuple[ImageKey, str, int]]) -> None:
        """Lets the next attempts at images know of published ones that failed.

        Args:
            failures: ``(row, image_index)``, the row's hash and the attempts so far.
        """
        for key, row_hash, attempts in failures:
            if self._wanted(key, row_hash):
                self._count_attempts(key, attempts)

    def earlier_attempts(self, key: ImageKey) -> int:
        """Attempts at an image that failed before this one; any thread may ask."""
        number = self.images.number(key)
        return 0 if number is None else self._failed_attempts.get(number, 0)

    def adopt(self, records: Iterable[Record]) -> None:
        """Takes over good images that were published or begun elsewhere, durably.

        Those of rows that have changed, and those that are here already, are left.
        """
        with disk_errors(self._partial.path):
            for record in records:
                is_wanted = self._wanted(record.key, record.result.get("row_hash"))
                if is_wanted and record.status == "ok" and record.key not in self._slots:
                    self._slots[record.key] = self._partial.append(record)
            self._partial.sync()

    @property
    def finished(self) -> ImageKeys:
        """Images that need not be made again, as of now."""
        return self._slots.keys()

    @property
    def num_ok(self) -> int:
        """Good images among the finished."""
        return self._slots.num_ok

    @property
    def num_failed(self) -> int:
        """Failed images among the finished."""
        return self._slots.num_failed

    @property
    def missing(self) -> ImageKeys:
        """Images that are still to be made, as of now."""
        return self._slots.missing()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return len(self._slots) == len(self.images)

    def row_hash(self, row: int) -> str:
        """Content hash of one of the shard's rows; any thread may ask."""
        return self._rows[row - self.shard.start].content_hash

    def append(self, record: Record) -> bool:
        """Keeps a finished or failed image: once this returns, kill -9 cannot lose it.

        Returns:
            Whether it was new; a second one of the same image is dropped.

        Raises:
            JobError: The disk is full or failed.
        """
        assert self.images.number(record.key) is not None, (
            f"image {record.key} is not of shard {self.shard.index}"
        )
        if record.key in self._slots:
            return False
        with disk_errors(self._partial.path):
            self._slots[record.key] = self._partial.append(record)
        return True

    def sync(self) -> None:
        """Makes everything appended survive a power loss."""
        with disk_errors(self._partial.path):
            self._partial.sync()

    def close(self) -> None:
        """Closes the partial, which stays for the next attempt."""
        self._partial.close()

    def publish(self) -> Marker:
        """Writes the tables, renames them into place and writes the marker.

        Raises:
            JobError: The disk is full, or another process took the shard over.
        """
        assert self.complete, f"shard {self.shard.index} lacks {len(self.missing)} images"
        with disk_errors(self._ledger.out):
            self._partial.sync()
            self._check_owner()
            writers = self._table_writers()
            try:
                written = self._write_tables(*writers)
                self._check_owner()
                marker = self._marker([file for _, file in written])
                self._rename(written)
                self._check_owner()
                self._ledger.write_marker(self.shard, marker)
            finally:
                for writer in writers:
                    writer.discard()
            self.close()
            for path in partial_paths(self._ledger.partials, self.shard.stem):
                path.unlink(missing_ok=True)
        return marker

    def _check_owner(self) -> None:
        """A late process must not publish over the one that took its shard over."""
        self._ledger.check_current()
        paths = partial_paths(self._ledger.partials, self.shard.stem)
        if not paths or paths[-1] != self._partial.path:
            raise JobError(
                f"shard {self.shard.index} of {self._ledger.out} was taken over by another process",
                hint="the same task seems to run twice; this one stops and nothing is lost",
            )

    def _table_writers(self) -> tuple[TableWriter, TableWriter, TableWriter]:
        scratch, shard = self._ledger.scratch, self.shard
        images = images_writer(scratch, shard, self._ledger.job.identity.carried_schema)
        return images, metrics_writer(scratch, shard), failures_writer(scratch, shard)

    def _write_tables(self, *writers: TableWriter) -> list[tuple[Path, PublishedFile]]:
        for row, record in self._records():
            self._add(row, record, *writers)
        return [file for writer in writers for file in writer.close()]

    def _records(self) -> Iterator[tuple[ManifestRow | RowFault, Record | None]]:
        """Rows in manifest order with each of their images; None for a faulty row."""
        for row in self._rows:
            if isinstance(row, RowFault):
                yield row, None
            for image_index in range(len(self.images.span(row.row))):
                yield row, read_record(self._slots[row.row, image_index])

    def _add(
        self,
        row: ManifestRow | RowFault,
        record: Record | None,
        images: TableWriter,
        metrics: TableWriter,
        failures: TableWriter,
    ) -> None:
        if isinstance(row, RowFault) or record is None:
            assert isinstance(row, RowFault)
            metrics.add(self._fault_metrics(row))
            failures.add(_fault_values(row))
            return
        key = {"id": row.id, "row": row.row, "image_index": record.image_index}
        metrics.add(record.result | key | {"status": record.status})
        if record.image is None:
            failures.add(_failure_values(row, record) | key)
        else:
            path = f"{row.row:08d}-{record.image_index}.{self._image_format}"
            image = {"bytes": record.image, "path": path}
            values = record.result | key | {"prompt": row.prompt, "image": image, "carried": row.carried}
            images.add(values, len(record.image))

    def _fault_metrics(self, fault: RowFault) -> dict[str, Any]:
        return {
            "id": fault.id,
            "row": fault.row,
            "status": "failed",
            "error_type": INVALID_ROW,
            "error": str(fault),
            "attempts": 0,
            "task": self._task,
            "worker": self._worker,
            "finished_at": time.time_ns() // 1000,
            "row_hash": fault.content_hash,
        }

    def _marker(self, files: list[PublishedFile]) -> Marker:
        return Marker(
            shard=self.shard.index,
            start=self.shard.start,
            stop=self.shard.stop,
            num_ok=self.num_ok,
            num_failed=self.num_failed,
            num_invalid_rows=sum(isinstance(row, RowFault) for row in self._rows),
            files=tuple(files),
            task=self._task,
            worker=self._worker,
            finished_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )

    def _rename(self, written: list[tuple[Path, PublishedFile]]) -> None:
        """From the first rename until the marker is there the partials alone hold the shard."""
        out, ledger = self._ledger.out, self._ledger
        ledger.remove_marker(self.shard)
        for path, file in written:
            target = out / file.path
            target.parent.mkdir(exist_ok=True)
            os.replace(path, target)
        fresh = {out / file.path for _, file in written}
        for table in TABLES:
            for path in table_files(out, table, self.shard):
                if path not in fresh:
                    path.unlink()
            if (out / table).exists():
                sync_folder(out / table)
        sync_folder(out)


def _fault_values(fault: RowFault) -> dict[str, Any]:
    return {
        "id": fault.id,
        "row": fault.row,
        "file": fault.file,
        "line": fault.line,
        "column": fault.column,
        "value": fault.value,
        "reason": fault.reason,
        "error_type": INVALID_ROW,
    }


def _failure_values(row: ManifestRow, record: Record) -> dict[str, Any]:
    reason, error_type = record.result["error"], record.result["error_type"]
    return {"file": row.file, "line": row.line, "reason": reason, "error_type": error_type}
