"""Reads a whole output folder again and says what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offline_diffusion.data.encode import DECODE_ERRORS, decode_image, pixels_sha256
from offline_diffusion.data.files import file_sha256
from offline_diffusion.data.layout import (
    FAILURES,
    IMAGES,
    METRICS,
    Shard,
    publication_numbers,
    staged_file,
    stem_of,
    table_file,
    table_files,
)
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import Marker, PublishedFile, marker_from_tables, read_marker
from offline_diffusion.data.schemas import FAILURES_SCHEMA, INVALID_ROW, METRICS_SCHEMA, images_schema
from offline_diffusion.errors import JobError

_BATCH_ROWS = {IMAGES: 8, METRICS: 1_000, FAILURES: 1_000}
_MAX_PROBLEMS = 1_000
_MAX_HINTED = 5


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a file; ``row`` is a manifest row, None where the file as a whole is wrong."""

    file: str
    reason: str
    row: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.file}: {self.reason}"
            if self.row is None
            else f"{self.file}: row {self.row}: {self.reason}"
        )


@dataclass(slots=True, kw_only=True)
class ShardReport:
    """What was found in one shard.

    ``done`` is false while it is not published, ``unmoved`` true while it is but not all of its files are
    in their places. Neither is a fault.
    """

    shard: int
    done: bool
    unmoved: bool = False
    num_rows: int = 0
    num_images: int = 0
    problems: list[Problem] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What was found in a folder.

    Args:
        num_shards, num_shards_done: All, and published.
        num_rows, num_images: Rows covered and images read.
        pending: Shards not published yet.
        unmoved: Shards that are published, but whose files the next run has to put into their places.
        num_leftovers: Staged publications that were not committed: a run is at work, or it died.
        broken: Published shards with a problem; see ``redo_hint``.
        problems: At most the first thousand.
        num_problems: All of them.
    """

    num_shards: int = 0
    num_shards_done: int = 0
    num_rows: int = 0
    num_images: int = 0
    pending: list[int] = field(default_factory=list)
    unmoved: list[int] = field(default_factory=list)
    num_leftovers: int = 0
    broken: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    num_problems: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; shards may still be pending."""
        return self.num_problems == 0

    @property
    def finished(self) -> bool:
        """Whether every shard is published and in its place."""
        return not self.pending and not self.unmoved

    def add(self, shard: ShardReport) -> None:
        self.num_rows += shard.num_rows
        self.num_images += shard.num_images
        if shard.done:
            self.num_shards_done += 1
        else:
            self.pending.append(shard.shard)
        if shard.unmoved:
            self.unmoved.append(shard.shard)
        if shard.problems:
            self.broken.append(shard.shard)
        self.add_problems(shard.problems)

    def add_problems(self, problems: list[Problem]) -> None:
        self.num_problems += len(problems)
        self.problems += problems[: _MAX_PROBLEMS - len(self.problems)]

    def add_folder(self, ledger: Ledger) -> None:
        """Adds what is told by the folder as a whole: strays and leftovers."""
        ledger.look_again()
        self.add_problems(find_strays(ledger))
        publications = ledger.publications
        self.num_leftovers = sum(not publications.is_committed(each) for each in publications.folders())


def verify(out: Path, *, num_threads: int | None = None) -> VerifyReport:
    """Checks a whole folder; see ``verify_shards``.

    Raises:
        JobError: The folder is not one of ours.
    """
    ledger = Ledger(out)
    report = VerifyReport(num_shards=len(ledger.shards))
    for shard in verify_shards(ledger, num_threads=num_threads):
        report.add(shard)
    report.add_folder(ledger)
    return report


def redo_hint(ledger: Ledger, broken: Sequence[int]) -> str | None:
    """How to have broken shards made again; None when none is.

    A run takes a shard for done while it has its marker, or, where all markers were deleted, its metrics.
    """
    if not broken:
        return None
    shards = [ledger.shards[index] for index in broken[:_MAX_HINTED]]
    numbers = publication_numbers(ledger.markers_folder)
    paths = [ledger.marker_path(shard, number) for shard in shards for number in numbers.get(shard.index, ())]
    if ledger.remote is not None:  # others have copies of markers; that a table is missing everybody sees
        paths = [ledger.out / METRICS / table_file(shard.stem, 0) for shard in shards]
    elif not ledger.markers_folder.exists():
        paths = [path for shard in shards for path in table_files(ledger.out, METRICS, shard.stem)]
    more = f" (likewise for {len(broken) - len(shards):,} more shards)" if len(broken) > len(shards) else ""
    what = f"shard {broken[0]}" if len(broken) == 1 else f"{len(broken):,} shards"
    return (
        f"to make {what} again, delete {', '.join(map(ledger.shown, paths))}{more} and run the job's command"
    )


def verify_shards(out: Path | Ledger, *, num_threads: int | None = None) -> Iterator[ShardReport]:
    """Checks shard by shard, holding a few images at a time.

    Files, checksums, schemas, row counts; that every manifest row is there once, with every image it
    asks for once, in order; that images decode to the size and the pixels recorded.

    Args:
        out: The output folder, or its books.
        num_threads: Decoders; None takes one a processor.

    Raises:
        JobError: The folder is not one of ours.
    """
    ledger = out if isinstance(out, Ledger) else Ledger(out)
    restored = not ledger.markers_folder.exists()
    numbers = ledger.publications.numbers()
    with ThreadPoolExecutor(num_threads or os.cpu_count() or 1) as decoders:
        for shard in ledger.shards:
            report = ShardReport(shard=shard.index, done=restored or shard.index in numbers)
            path = ledger.marker_path(shard, numbers.get(shard.index, 0))
            marker: Marker | None = None
            try:
                if restored:
                    marker = marker_from_tables(ledger.out, shard)
                    report.done = marker is not None
                elif report.done:
                    marker = read_marker(path)
            except JobError as error:
                report.problems.append(Problem(ledger.shown(path), error.message))
            if marker is not None:
                with ledger.tables_at_hand(shard):
                    _ShardCheck(ledger, shard, marker, report, decoders).run()
            yield report


def find_strays(ledger: Ledger) -> list[Problem]:
    """Files in the tables' folders that no marker speaks of: a reader of the folder would take them in.

    Those of a shard whose files are still on their way are left out: what is old goes when they come.
    """
    known = {file.path for marker in ledger.markers().values() for file in marker.files}
    publications = ledger.publications
    moving = {folder.stem for folder in publications.folders() if publications.is_committed(folder)}
    strays = []
    for name in publications.table_names():
        file = name.split("/")[1]
        is_known = name in known or stem_of(file) in moving
        if not is_known and not file.startswith("."):
            reason = "belongs to no published shard; if its shard is begun the next run replaces it"
            strays.append(Problem(name, reason))
    return strays


class _ShardCheck:
    """Checks one published shard into a report."""

    def __init__(
        self, ledger: Ledger, shard: Shard, marker: Marker, report: ShardReport, decoders: ThreadPoolExecutor
    ) -> None:
        self._out, self._shard, self._marker = ledger.out, shard, marker
        self._report, self._decoders = report, decoders
        self._staged = ledger.publications.staged / marker.staged if marker.staged else None
        images = images_schema(ledger.job.identity.carried_schema)
        self._schemas = {IMAGES: images, METRICS: METRICS_SCHEMA, FAILURES: FAILURES_SCHEMA}

    def run(self) -> None:
        if (self._marker.start, self._marker.stop) != (self._shard.start, self._shard.stop):
            span = f"{self._marker.start} to {self._marker.stop}"
            self._problem(self._shard.stem, f"its marker speaks of rows {span}, job.json of others")
        whole = [self._file_is_whole(file) for file in self._marker.files]
        if not all(whole):
            return
        try:
            self._check_counts(*self._check_metrics())
            self._check_images()
            self._compare(FAILURES, is_ok=False)
        except (OSError, KeyError, pa.ArrowException) as error:
            self._problem(self._shard.stem, f"cannot be read: {error}")

    def _problem(self, file: str, reason: str, row: int | None = None) -> None:
        self._report.problems.append(Problem(file, reason, row))

    def _path(self, file: PublishedFile) -> Path:
        """Where a file is: in its place, or still staged."""
        if self._staged is not None and (staged := staged_file(self._staged, file.path)).exists():
            self._report.unmoved = True
            return staged
        return self._out / file.path

    def _file_is_whole(self, file: PublishedFile) -> bool:
        path = self._path(file)
        try:
            num_bytes = path.stat().st_size
            if num_bytes != file.num_bytes:
                self._problem(file.path, f"has {num_bytes} bytes, published were {file.num_bytes}")
                return False
            if file.sha256 is not None and file_sha256(path) != file.sha256:
                self._problem(file.path, "its checksum is not that of what was published")
                return False
            parquet = pq.ParquetFile(path)
        except FileNotFoundError:
            self._problem(file.path, "is missing")
            return False
        except (OSError, pa.ArrowException) as error:
            self._problem(file.path, f"cannot be read: {error}")
            return False
        return self._footer_is_right(file, parquet)

    def _footer_is_right(self, file: PublishedFile, parquet: pq.ParquetFile) -> bool:
        if parquet.metadata.num_rows != file.num_rows:
            self._problem(file.path, f"has {parquet.metadata.num_rows} rows, published were {file.num_rows}")
            return False
        if not parquet.schema_arrow.equals(self._schemas[file.path.split("/")[0]]):
            self._problem(file.path, "has other columns than it should")
            return False
        return True

    def _rows(self, table: str, columns: list[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        for file in self._marker.files:
            if not file.path.startswith(f"{table}/"):
                continue
            parquet = pq.ParquetFile(self._path(file), pre_buffer=False)  # else it holds several row groups
            for batch in parquet.iter_batches(_BATCH_ROWS[table], columns=columns):
                yield file.path, batch.to_pylist()

    def _check_metrics(self) -> tuple[int, int]:
        """Every row of the shard once, with images 0, 1, 2, ... Counts its good and failed images."""
        num_ok = num_failed = 0
        row, next_index = self._shard.start - 1, 0
        for file, batch in self._rows(METRICS, ["row", "image_index", "status", "error_type"]):
            for values in batch:
                num_ok += values["status"] == "ok"
                num_failed += values["status"] != "ok"
                if values["row"] != row:
                    if values["row"] != row + 1:
                        self._problem(file, f"row {row + 1} is expected here", values["row"])
                    row, next_index = values["row"], 0
                    self._report.num_rows += 1
                expected = None if values["error_type"] == INVALID_ROW else next_index
                if values["image_index"] != expected:
                    self._problem(file, f"image {expected} is expected, not {values['image_index']}", row)
                next_index += 1
        if row != self._shard.stop - 1:
            self._problem(
                f"{METRICS}/{self._shard.stem}.parquet", f"ends at row {row}, not {self._shard.stop - 1}"
            )
        return num_ok, num_failed

    def _check_counts(self, num_ok: int, num_failed: int) -> None:
        published = self._marker.num_ok, self._marker.num_failed + self._marker.num_invalid_rows
        if (num_ok, num_failed) != published:
            file = f"{METRICS}/{self._shard.stem}.parquet"
            counts = (
                f"{num_ok} good and {num_failed} failed, published were {published[0]} and {published[1]}"
            )
            self._problem(file, f"has {counts}")

    def _check_images(self) -> None:
        for file, batch in self._rows(IMAGES, ["row", "image_index", "width", "height", "image", "sha256"]):
            self._report.num_images += len(batch)
            for values, fault in zip(batch, self._decoders.map(_image_fault, batch), strict=True):
                if fault is not None:
                    self._problem(file, f"image {values['image_index']}: {fault}", values["row"])
        self._compare(IMAGES, is_ok=True)

    def _keys(self, table: str, *, is_ok: bool) -> Iterator[tuple[int, int | None]]:
        """``(row, image_index)`` of all rows of a table, of the metrics only those with this status."""
        columns = ["row", "image_index", *(["status"] if table == METRICS else [])]
        for _, batch in self._rows(table, columns):
            for values in batch:
                if table != METRICS or (values["status"] == "ok") == is_ok:
                    yield values["row"], values["image_index"]

    def _compare(self, table: str, *, is_ok: bool) -> None:
        """The table has what the metrics say, in the same order."""
        pairs = zip_longest(self._keys(METRICS, is_ok=is_ok), self._keys(table, is_ok=is_ok))
        if all(expected == found for expected, found in pairs):
            return
        file = f"{table}/{self._shard.stem}.parquet"
        expected, found = (list(self._keys(source, is_ok=is_ok)) for source in (METRICS, table))
        missing, surplus = set(expected) - set(found), set(found) - set(expected)
        for row, index in sorted(missing, key=str):
            self._problem(file, f"image {index} is missing", row)
        for row, index in sorted(surplus, key=str):
            self._problem(file, f"image {index} is not in {METRICS}", row)
        if len(set(found)) < len(found):
            self._problem(file, "has an image twice")
        if not missing and not surplus and len(set(found)) == len(found):
            self._problem(file, "is not in manifest order")


def _image_fault(values: dict[str, Any]) -> str | None:
    try:
        pixels = decode_image(values["image"]["bytes"])
    except (*DECODE_ERRORS, TypeError) as error:
        return f"does not decode: {error}"
    if pixels.shape != (values["height"], values["width"], 3):
        return f"is {pixels.shape[1]}x{pixels.shape[0]}, recorded is {values['width']}x{values['height']}"
    if pixels_sha256(pixels) != values["sha256"]:
        return "its pixels are not those recorded"
    return None
