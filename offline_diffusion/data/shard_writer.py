"""One shard from its first finished image to its publication, safe against a crash at any point.

Every finished image is appended to a partial file; once all are there the tables are staged, committed and
moved into place, see ``publication``. Only then do the partials go.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offline_diffusion.config import ImageFormat
from offline_diffusion.data.disk_full import disk_stayed_full
from offline_diffusion.data.files import disk_errors, sync_folder
from offline_diffusion.data.layout import Shard, StagedFolder
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import Marker, PublishedFile
from offline_diffusion.data.partial import (
    ImageKey,
    PartialWriter,
    Record,
    attempt_of,
    new_partial_path,
    newest_generation,
    partial_paths,
    read_record,
    scan_partials,
)
from offline_diffusion.data.publication import ShardLostError
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.schemas import INVALID_ROW
from offline_diffusion.data.shard_images import ImageKeys, ShardImages, SlotTable
from offline_diffusion.data.tables import TableWriter, failures_writer, images_writer, metrics_writer
from offline_diffusion.errors import DiskFullError


class ShardWriter:
    """Collects the images of one shard and publishes them. Not thread-safe.

    A process that has it open with a lower generation can no longer publish it.

    Args:
        ledger: The open output folder.
        shard: Which rows.
        rows: Those rows, in order; a ``RowFault`` for each that is quarantined.
        number: Of the publication to be made, as ``Ledger.next_number`` told before anything of the
            shard was looked at.
        generation: Of this owner of the shard; None takes one above all that have left partials.
        task, worker: Recorded with quarantined rows and in the marker.
        image_format: Of the encoded images; names their files.
        retry_failed: Do images again that failed before, also of a published shard.

    Raises:
        DiskFullError: There is no space.
        JobError: The disk failed or cannot be written to.
    """

    def __init__(
        self,
        ledger: Ledger,
        shard: Shard,
        rows: Sequence[ManifestRow | RowFault],
        *,
        number: int,
        generation: int | None = None,
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
        self._number = number
        self._staged: StagedFolder | None = None  # from the commit on
        self._marker: Marker | None = None
        with disk_errors(ledger.out):
            newest = newest_generation(ledger.partials, shard.stem)
            self.generation = newest + 1 if generation is None else generation
            self._partial_paths = partial_paths(ledger.partials, shard.stem)
            self._slots = self._recover(retry_failed)
            self._partial = self._new_partial()

    def _new_partial(self) -> PartialWriter:
        folder = self._ledger.partials
        partial = PartialWriter(new_partial_path(folder, self.shard.stem, self.generation))
        self._partial_paths.append(partial.path)
        sync_folder(folder)
        return partial

    def _recover(self, retry_failed: bool) -> SlotTable:
        """What earlier attempts left: the first good image of each key, else its failure."""
        slots = SlotTable(self.images)
        for slot, record in scan_partials(self._partial_paths):
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

        Raises:
            DiskFullError: There is no space; it may be tried again with the same images.
            JobError: The disk failed.
        """
        for record in records:
            if record.status == "ok" and self._wanted(record.key, record.result.get("row_hash")):
                self.append(record)
        self.sync()

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
            DiskFullError: There is no space; it may be tried again.
            JobError: The disk failed.
        """
        assert self.images.number(record.key) is not None, (
            f"image {record.key} is not of shard {self.shard.index}"
        )
        if record.key in self._slots:
            return False
        if not self._partial.is_whole:  # it may end in a torn record: this one goes into another file
            self.sync()
            with disk_errors(self._ledger.partials):
                torn, self._partial = self._partial, self._new_partial()
                torn.close()
        with disk_errors(self._partial.path):
            self._slots[record.key] = self._partial.append(record)
        return True

    def sync(self) -> None:
        """Makes everything appended survive a power loss.

        Raises:
            JobInterrupted: There is no space. What was written since the last time may be lost, and the
                system does not say it twice, so the next run has to look at what is there.
            JobError: The disk failed.
        """
        try:
            with disk_errors(self._partial.path):
                self._partial.sync()
        except DiskFullError as error:
            raise disk_stayed_full(self._ledger.out, error) from error

    def close(self) -> None:
        """Closes the partial, which stays for the next attempt."""
        self._partial.close()

    def publish(self) -> Marker:
        """Stages the tables, commits them and moves them into place.

        Raises:
            ShardLostError: Another process has published the shard, or has taken it over.
            DiskFullError: There is no space; it may be tried again.
            JobError: The disk failed, or the folder was given to another manifest.
        """
        assert self.complete, f"shard {self.shard.index} lacks {len(self.missing)} images"
        if self._staged is None:
            self.sync()
            self._commit()
        assert self._staged is not None
        assert self._marker is not None
        with disk_errors(self._ledger.out):
            try:
                self._ledger.publications.move(self._staged, self._marker)
            except FileNotFoundError:
                self._ledger.check_current()
                raise
            self.close()
            for path in self._partial_paths:
                path.unlink(missing_ok=True)
        return self._marker

    def _commit(self) -> None:
        publications, attempt = self._ledger.publications, attempt_of(self._partial.path)
        with disk_errors(self._ledger.out):
            try:
                self._check_owner()
                staged = publications.stage(self.shard, self._number, attempt)
                try:
                    marker = self._stage_tables(staged)
                    self._check_owner()
                    if not publications.commit(staged, marker):
                        raise ShardLostError
                except Exception:
                    if publications.discard(staged):  # else the error came after the deed
                        raise
            except FileNotFoundError:  # whoever took the shard over, or the folder, has taken it away
                self._check_owner()
                raise
        self._staged, self._marker = staged, marker

    def _stage_tables(self, staged: StagedFolder) -> Marker:
        writers = self._table_writers(staged.path)
        try:
            for row, record in self._records():
                self._add(row, record, *writers)
            least = self._ledger.publications.least_files(staged)
            files = [file for writer in writers for file in writer.close(least.get(writer.table, 0))]
            return self._make_marker(staged, files)
        finally:
            for writer in writers:
                writer.discard()

    def _check_owner(self) -> None:
        """A late process does not publish over the one that took its shard over."""
        self._ledger.check_current()
        if self._ledger.next_number(self.shard) > self._number:
            raise ShardLostError
        if newest_generation(self._ledger.partials, self.shard.stem) > self.generation:
            raise ShardLostError

    def forget(self) -> None:
        """Closes a shard that was lost. Its partials go if it is published; else its owner reads them."""
        self.close()
        if self._ledger.next_number(self.shard) > self._number:
            with disk_errors(self._ledger.partials):
                for path in self._partial_paths:
                    path.unlink(missing_ok=True)

    def _table_writers(self, folder: Path) -> tuple[TableWriter, TableWriter, TableWriter]:
        images = images_writer(folder, self.shard, self._ledger.job.identity.carried_schema)
        return images, metrics_writer(folder, self.shard), failures_writer(folder, self.shard)

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

    def _make_marker(self, staged: StagedFolder, files: list[PublishedFile]) -> Marker:
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
            staged=staged.path.name,
        )


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
