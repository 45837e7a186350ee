"""Good images that were made before: of a published shard, and of earlier manifests of the folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from offline_diffusion.data.files import disk_errors
from offline_diffusion.data.job_file import read_job
from offline_diffusion.data.layout import (
    IMAGES,
    METRICS,
    Shard,
    StagedFolder,
    index_of,
    make_shards,
    staged_file,
    table_files,
)
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.manifest_change import superseded_folders
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.partial import ImageKey, Record, new_attempt, scan_partials
from offline_diffusion.data.publication import Publications
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.schemas import IMAGE_COLUMNS, METRICS_SCHEMA, images_schema
from offline_diffusion.data.shard_images import ImageKeys
from offline_diffusion.errors import JobError

_NOT_RESULTS = {"id", "row", "image_index", "status", "prompt", "image"}
_RESULT_COLUMNS = [name for name in IMAGE_COLUMNS if name not in _NOT_RESULTS]
_BATCH_ROWS = 8

Identity = tuple[str, str, int]
"""``(id, row_hash, image_index)``: the same in two manifests means the same image."""


@contextlib.contextmanager
def _readable(folder: Path, shard: Shard) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, pa.ArrowException) as error:
        raise JobError(
            f"published {shard.stem} in {folder} cannot be read: {error}",
            hint=f"delete its markers, {shard.stem}*.json, there and run the same command: it is made again",
        ) from error


def published_records(folder: Path, shard: Shard) -> Iterator[tuple[str, Record]]:
    """The good images of a published shard with their ids, one at a time.

    Raises:
        JobError: It is damaged.
    """
    with _readable(folder, shard):
        yield from _published_records(folder, shard)


def published_failures(folder: Path, shard: Shard) -> Iterator[tuple[ImageKey, str, int]]:
    """The failed images of a published shard: ``(row, image_index)``, the row's hash, attempts.

    Raises:
        JobError: It is damaged.
    """
    columns = ["row", "image_index", "row_hash", "attempts", "status"]
    with _readable(folder, shard):
        for path in table_files(folder, METRICS, shard.stem):
            for batch in pq.ParquetFile(path).iter_batches(1_000, columns=columns):
                for row, index, row_hash, attempts, status in zip(
                    *(batch.column(name).to_pylist() for name in columns), strict=True
                ):
                    if status == "failed" and index is not None:
                        yield (row, index), row_hash, attempts


def _published_records(folder: Path, shard: Shard) -> Iterator[tuple[str, Record]]:
    metrics = _good_metrics(folder, shard)
    columns = ["row", "image_index", "image", *_RESULT_COLUMNS]
    for path in table_files(folder, IMAGES, shard.stem):
        parquet = pq.ParquetFile(path, pre_buffer=False)  # else it holds several row groups
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=columns):
            for values in batch.to_pylist():
                key = values["row"], values["image_index"]
                cost = next(metrics, None)
                if cost is None or (cost["row"], cost["image_index"]) != key:
                    raise pa.ArrowInvalid(f"image {key[1]} of row {key[0]} is not in its metrics")
                result = {name: values[name] for name in _RESULT_COLUMNS}
                result |= {name: value for name, value in cost.items() if name not in _NOT_RESULTS}
                yield cost["id"], Record(*key, "ok", values["image"]["bytes"], result)


def _good_metrics(folder: Path, shard: Shard) -> Iterator[dict[str, Any]]:
    at = METRICS_SCHEMA.get_field_index("finished_at")
    for path in table_files(folder, METRICS, shard.stem):
        for batch in pq.ParquetFile(path).iter_batches(1_000):
            plain = batch.set_column(at, "finished_at", batch.column("finished_at").cast(pa.int64()))
            yield from (values for values in plain.to_pylist() if values["status"] == "ok")


@dataclass(frozen=True, slots=True)
class _Source:
    """A published shard or the partials of an unpublished one, in a superseded folder."""

    folder: Path
    shard: Shard
    marker: Marker | None

    def records(self) -> Iterator[tuple[str, Record]]:
        if self.marker is not None:
            yield from published_records(self.folder, self.shard)
            return
        for _, record in scan_partials(self._partials()):
            if record.status == "ok":
                yield record.result["id"], record

    def _partials(self) -> list[Path]:
        return sorted((self.folder / "partial").glob(f"{self.shard.stem}.*.arrows"))

    def identities(self) -> Iterator[Identity]:
        if self.marker is None:
            for record_id, record in self.records():
                yield record_id, record.result["row_hash"], record.image_index
            return
        columns = ["id", "row_hash", "image_index", "status"]
        with _readable(self.folder, self.shard):
            for path in table_files(self.folder, METRICS, self.shard.stem):
                for values in pq.ParquetFile(path).read(columns=columns).to_pylist():
                    if values["status"] == "ok":
                        yield values["id"], values["row_hash"], values["image_index"]


class Superseded:
    """Images of earlier manifests of a folder, found by what they show.

    The lookup is made when first needed: 12 bytes an image.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._folders = superseded_folders(ledger.out)
        self._sources: list[_Source] = []
        self._keys: npt.NDArray[np.uint64] | None = None
        self._source_of: npt.NDArray[np.int32] = np.empty(0, np.int32)

    def restore(self, shard: Shard, rows: Sequence[ManifestRow | RowFault], number: int) -> bool:
        """Publishes an earlier shard of the same rows as it is.

        Args:
            shard, rows: The shard.
            number: Of the publication.

        Returns:
            Whether there is one. Without hard links there is never one: its images are copied.

        Raises:
            JobError: The disk is full or failed.
        """
        for folder in self._folders:
            marker = self._same_shard(folder, shard, rows)
            if marker is not None and self._publish(folder, shard, marker, number):
                return True
        return False

    def _same_shard(
        self, folder: Path, shard: Shard, rows: Sequence[ManifestRow | RowFault]
    ) -> Marker | None:
        publications = Publications.of_superseded(self._ledger.out, folder)
        marker = publications.marker(shard.stem, publications.newest_number(shard.stem))
        if marker is None or (marker.start, marker.stop) != (shard.start, shard.stop):
            return None
        if not all(row.content_hash for row in rows):
            return None
        with _readable(folder, shard):
            return marker if self._same_contents(folder, shard, rows) else None

    def _same_contents(self, folder: Path, shard: Shard, rows: Sequence[ManifestRow | RowFault]) -> bool:
        schema = images_schema(self._ledger.job.identity.carried_schema)
        found = [pq.read_schema(path) for path in table_files(folder, IMAGES, shard.stem)]
        if not all(each.equals(schema) and each.metadata == schema.metadata for each in found):
            return False
        old, new = _metrics_keys(folder, shard), _keys_asked_for(rows)
        return all(before == now for before, now in zip_longest(old, new))

    def _publish(self, folder: Path, shard: Shard, marker: Marker, number: int) -> bool:
        publications = self._ledger.publications
        with disk_errors(self._ledger.out):
            staged = publications.stage(shard, number, new_attempt(0))
            marker = replace(marker, staged=staged.path.name)
            won = self._link(folder, staged, marker) and publications.commit(staged, marker)
            if not won and publications.discard(staged):
                return False
            publications.move(staged, marker)
        return True

    def _link(self, folder: Path, staged: StagedFolder, marker: Marker) -> bool:
        try:
            for file in marker.files:
                os.link(folder / file.path, staged_file(staged.path, file.path))
        except OSError:
            return False
        return True

    def records(self, rows: Sequence[ManifestRow | RowFault], images: ImageKeys) -> Iterator[Record]:
        """Earlier images of these rows that show the same, with the rows' present numbers."""
        if not self._folders or not images:
            return
        wanted = {(row.id, row.content_hash): row.row for row in rows if row.content_hash}
        for source in self._sources_of(_identities(rows, images)):
            for record_id, record in source.records():
                number = wanted.get((record_id, record.result["row_hash"]))
                if number is not None and (number, record.image_index) in images:
                    yield replace(record, row=number, result=record.result | {"id": record_id})

    def _sources_of(self, wanted: Iterator[Identity]) -> list[_Source]:
        if self._keys is None:
            self._build()
        assert self._keys is not None
        keys = np.unique(np.fromiter(map(_hash, wanted), np.uint64))
        first = np.searchsorted(self._keys, keys, "left")
        last = np.searchsorted(self._keys, keys, "right")
        found = {int(s) for a, b in zip(first, last, strict=True) for s in self._source_of[a:b]}
        return [self._sources[index] for index in sorted(found)]

    def _build(self) -> None:
        keys: list[npt.NDArray[np.uint64]] = []
        owners: list[npt.NDArray[np.int32]] = []
        for folder in self._folders:
            for source in _sources(self._ledger.out, folder):
                hashes = np.fromiter(map(_hash, source.identities()), np.uint64)
                keys.append(hashes)
                owners.append(np.full(len(hashes), len(self._sources), np.int32))
                self._sources.append(source)
        all_keys = np.concatenate([np.empty(0, np.uint64), *keys])
        order = np.argsort(all_keys, kind="stable")
        self._keys = all_keys[order]
        self._source_of = np.concatenate([np.empty(0, np.int32), *owners])[order]


def _metrics_keys(folder: Path, shard: Shard) -> Iterator[tuple[int, str, str, int | None]]:
    """Row, id, hash and image index of everything in a shard's metrics; the index of a faulty row is None."""
    columns = ["row", "id", "row_hash", "image_index"]
    for path in table_files(folder, METRICS, shard.stem):
        for batch in pq.ParquetFile(path).iter_batches(1_000, columns=columns):
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def _keys_asked_for(
    rows: Sequence[ManifestRow | RowFault],
) -> Iterator[tuple[int, str, str, int | None]]:
    """What ``_metrics_keys`` finds when exactly these rows were published."""
    for row in rows:
        indices = (None,) if isinstance(row, RowFault) else range(row.params.num_images_per_prompt)
        yield from ((row.row, row.id, row.content_hash, index) for index in indices)


def _identities(rows: Sequence[ManifestRow | RowFault], images: ImageKeys) -> Iterator[Identity]:
    by_number = {row.row: row for row in rows if row.content_hash}
    for number, image_index in images:
        if (row := by_number.get(number)) is not None:
            yield row.id, row.content_hash, image_index


def _sources(out: Path, folder: Path) -> Iterator[_Source]:
    job = read_job(folder)
    shards = make_shards(job.identity.num_rows, job.identity.shard_size)
    publications = Publications.of_superseded(out, folder)
    numbers = publications.numbers()
    begun = {index_of(path.name) for path in (folder / "partial").glob("*.arrows")}
    for index in sorted(numbers.keys() | begun):
        shard = shards[index]
        marker = publications.marker(shard.stem, numbers[index]) if index in numbers else None
        yield _Source(folder, shard, marker)


def _hash(identity: Identity) -> int:
    text = "\0".join(map(str, identity)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
