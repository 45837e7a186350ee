"""A manifest: one or more sources, read as one numbered stream of rows and faults."""

from __future__ import annotations

from array import array
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from offline_diffusion.data.columns import (
    ColumnPlan,
    RowBuilder,
    check_column_map,
    flatten_openai_line,
    flatten_openai_schema,
    is_openai_line,
    names_prompt,
)
from offline_diffusion.data.readers.base import BrokenRecord, Reader, Record, RowCursor, Stamp
from offline_diffusion.data.readers.files import DAMAGED_HINT, READ_ERRORS
from offline_diffusion.data.readers.lines import TextReader
from offline_diffusion.data.requests_again import RequestsAgain
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.sources import SourceExpander
from offline_diffusion.data.values import show
from offline_diffusion.errors import ManifestError, did_you_mean

NUM_SAMPLE_ROWS = 200
NO_LIMIT = 2**63 - 1

CHANGED_HINT = (
    "a manifest must not change while a job runs: once it is as it was, the same command goes on; "
    "--allow-manifest-change goes on with the new rows"
)

DUPLICATE_REASON = "an earlier row has the same id"


class Manifest:
    """The rows of all sources in order, numbered from 0 over all of them, faulty rows included.

    Args:
        sources: As the user named them.
        files: A reader for every file.
        builder: Makes rows of records.
        column_map: Name in the files to ours.
        limit: Rows after so many are not there.
        notes: Lines to show the user once: what columns are read as, what was left out. Rows that
            bring new columns may add more while they are read.
    """

    def __init__(
        self,
        sources: tuple[str, ...],
        files: tuple[Reader, ...],
        builder: RowBuilder,
        *,
        column_map: Mapping[str, str],
        limit: int | None,
        notes: list[str],
    ) -> None:
        self.sources = sources
        self.files = files
        self.column_map = dict(column_map)
        self.limit = limit
        self.notes = notes
        self._builder = builder
        self._digests: dict[int, tuple[Stamp, str]] = {}
        self._changed: dict[int, str] = {}
        self._num_rows: dict[int, int] = {}

    @property
    def can_jump(self) -> bool:
        """Whether rows may be read in any order at little cost."""
        return all(file.can_jump for file in self.files)

    def known_places(self) -> array[int]:
        """Where rows begin in text files, as far as they were read: file, row, line and byte of each."""
        texts = [(index, file) for index, file in enumerate(self.files) if isinstance(file, TextReader)]
        return array(
            "q", (value for index, file in texts for place in file.places for value in (index, *place))
        )

    def known_row_counts(self) -> dict[int, int]:
        """Rows of each file that was read to its end, by its place in ``files``."""
        return dict(self._num_rows)

    def recall(self, places: Sequence[int], row_counts: Mapping[int, int]) -> None:
        """Takes over what was known when the files were read before; they must be the same."""
        self._num_rows.update(row_counts)
        for start in range(0, len(places), 4):
            index, *place = places[start : start + 4]
            file = self.files[index]
            if isinstance(file, TextReader):
                file.places.learn(*place)

    def read(
        self, ranges: Iterable[range] | None = None, *, duplicates: Container[int] = ()
    ) -> Iterator[ManifestRow | RowFault]:
        """Reads the files once and yields one item per row: the row, or its first fault.

        Args:
            ranges: Sorted, disjoint ranges of row numbers; None for all. Other rows are passed over
                without being parsed, and reading ends after the last range.
            duplicates: Numbers of rows whose id an earlier row has: these are faults.

        Raises:
            ManifestError: A file cannot be read to its end.
            ValueError: The ranges are not sorted or not disjoint.
        """
        for item in self.check(ranges):
            if isinstance(item, tuple):
                yield item[0]
            elif item.row in duplicates:
                yield duplicate_fault(item)
            else:
                yield item

    def check(self, ranges: Iterable[range] | None = None) -> Iterator[ManifestRow | tuple[RowFault, ...]]:
        """As ``read``, but a faulty row gives all of its faults, and ids are not compared."""
        limit = NO_LIMIT if self.limit is None else self.limit
        wanted = [range(limit)] if ranges is None else ranges
        return self.walk(RowCursor(range(part.start, min(part.stop, limit)) for part in wanted))

    def walk(self, cursor: RowCursor) -> Iterator[ManifestRow | tuple[RowFault, ...]]:
        """As ``check``, over the ranges of a cursor, which may get more between two items.

        How many rows a file has is remembered once it was read to its end: it is passed over at once when
        none of them is wanted.
        """
        first_row = 0
        for index, file in enumerate(self.files):
            cursor.wants(first_row)  # passes the ranges that ended with the file before
            if cursor.done:
                return
            known = self._num_rows.get(index)
            if known is not None and not cursor.first_within(first_row, first_row + known):
                first_row += known
                continue
            num_rows = yield from self._check_file(file, first_row, cursor)
            first_row += num_rows
            if not cursor.done:
                self._num_rows[index] = num_rows

    def _check_file(
        self, file: Reader, first_row: int, cursor: RowCursor
    ) -> Generator[ManifestRow | tuple[RowFault, ...], None, int]:
        records = file.records(first_row, cursor)
        build, name, row = self._builder.build, file.name, first_row
        try:
            while True:
                try:
                    record = next(records)
                except StopIteration as end:
                    return int(end.value)
                except READ_ERRORS as error:
                    raise ManifestError(
                        f"{name}: cannot be read beyond about row {row - first_row} of it: {error}",
                        hint=DAMAGED_HINT,
                    ) from None
                row = record.row + 1
                yield build(name, record)
        finally:
            records.close()

    def plan(self, file: Reader) -> ColumnPlan | None:
        """What the columns of a file are read as; None where every row has its own."""
        schema = file.schema
        return None if schema is None else self._builder.plan(tuple(flatten_openai_schema(schema).names))

    def fingerprint(self) -> dict[str, Any]:
        """What tells this manifest from others, for JSON: files with size, version and digest, map, limit.

        From then on its files must stay as they are, see ``require_unchanged``.
        """
        for index, file in enumerate(self.files):
            self._digest(index, file.stamp())
        return self.known_fingerprint()

    def known_fingerprint(self) -> dict[str, Any]:
        """The fingerprint without a look at the files, which ``same_manifest`` has had."""
        looks = [self._digests[index] for index in range(len(self.files))]
        files = [
            {"name": file.name, "size": stamp.size, "version": stamp.version, "digest": digest}
            for file, (stamp, digest) in zip(self.files, looks, strict=True)
        ]
        return {"files": files, "column_map": self.column_map, "limit": self.limit}

    def has_content(self, index: int, before: Mapping[str, Any]) -> bool:
        """Whether file ``index`` holds what it held when ``before``, its part of a fingerprint, was made."""
        stamp = self.files[index].stamp()
        is_known = before["name"] == self.files[index].name and stamp.version is not None
        if is_known and stamp == Stamp(before["size"], before["version"]):
            self._digests[index] = (stamp, str(before["digest"]))
            return True
        return stamp.size == before["size"] and self._digest(index, stamp) == str(before["digest"])

    def require_unchanged(self, rows: range) -> None:
        """Checks that the files of some rows are as they were when the fingerprint was made.

        One that looks otherwise is read through: it may only have been touched.

        Raises:
            ManifestError: One has changed, or is gone.
        """
        first_row = 0
        for index, file in enumerate(self.files):
            num_rows = self._num_rows.get(index, NO_LIMIT)
            start, stop = max(rows.start - first_row, 0), min(rows.stop - first_row, num_rows)
            changed = file.changed(range(start, stop)) if start < stop else None
            if changed is not None and not self._was_only_touched(index):
                self._changed[index] = changed
            if start < stop and index in self._changed:
                raise ManifestError(
                    f"{self._changed[index]}: has changed since this run began", hint=CHANGED_HINT
                )
            first_row += num_rows
            if first_row >= rows.stop:
                return

    def _was_only_touched(self, index: int) -> bool:
        _, digest = self._digests[index]
        stamp = self.files[index].stamp()  # first: what changes while it is read looks changed afterwards
        if self.files[index].digest() != digest:
            return False
        self._digests[index] = (stamp, digest)
        return True

    def _digest(self, index: int, stamp: Stamp) -> str:
        known = self._digests.get(index)
        if known is None or known[0] != stamp:
            known = self._digests[index] = (stamp, self.files[index].digest())
        return known[1]


def duplicate_fault(row: ManifestRow) -> RowFault:
    """The fault of a row whose id an earlier row has."""
    place = (row.row, row.id, row.file, row.line)
    return RowFault(*place, "id", row.id, DUPLICATE_REASON, row.content_hash)


def open_manifest(
    sources: Sequence[str],
    *,
    column_map: Mapping[str, str] | None = None,
    limit: int | None = None,
    requests: RequestsAgain | None = None,
) -> Manifest:
    """Opens a manifest and looks into every file, without reading it whole.

    Args:
        sources: Files, folders, globs, URLs, ``hf://datasets/…``, or ``-`` for standard input.
        column_map: Name in the files to ours (``--map theirs=ours``).
        limit: Take only so many rows.
        requests: Makes those to what lies elsewhere.

    Raises:
        ManifestError: A source is not there, is empty, cannot be read, or has no prompt column.
        JobInterrupted: What a source lies on cannot be reached for too long; also while rows are read.
    """
    column_map = column_map or {}
    check_column_map(column_map)
    if sources.count("-") > 1:
        raise ManifestError("standard input can be named only once")
    notes: list[str] = []
    builder = RowBuilder(column_map, notes)
    prompt_columns = tuple(theirs for theirs, ours in column_map.items() if ours == "prompt")
    expander = SourceExpander(prompt_columns, notes, requests or RequestsAgain())
    files = tuple(file for source in sources for file in expander.readers(source))
    if not files:
        raise ManifestError("no manifest is named")
    manifest = Manifest(tuple(sources), files, builder, column_map=column_map, limit=limit, notes=notes)
    columns = [_check_columns(manifest, file, builder) for file in files]
    _check_mapped(column_map, columns, files)
    return manifest


def _check_columns(manifest: Manifest, file: Reader, builder: RowBuilder) -> set[str]:
    """Checks that a file has rows and a prompt column; returns the columns of its first rows.

    Raises:
        ManifestError: It has none.
    """
    shapes, first = _sample(file)
    if first is None:
        raise ManifestError(f"{file.name}: holds no rows")
    plan = manifest.plan(file)
    if plan is None:
        if not shapes:
            raise _nothing_readable(file.name, first)
        plans = [builder.plan(shape) for shape in shapes]
    else:
        shapes, plans = [tuple(flatten_openai_schema(file.schema).names)], [plan]
    columns = dict.fromkeys(column for shape in shapes for column in shape)
    if all(plan.prompt is None for plan in plans):
        raise _no_prompt_column(file.name, list(columns), manifest.column_map)
    return set(columns)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    body = row["body"] if is_openai_line(row) else None
    return flatten_openai_line(row, body) if isinstance(body, dict) else row


def _sample(file: Reader) -> tuple[list[tuple[str, ...]], Record | None]:
    """The different columns of the first rows that can be read, and the first row; no more is kept."""
    records = file.records(0, RowCursor([range(NUM_SAMPLE_ROWS)]))
    shapes: dict[tuple[str, ...], None] = {}
    first = None
    try:
        for record in islice(records, NUM_SAMPLE_ROWS):
            first = first or record
            if not isinstance(record.values, BrokenRecord):
                shapes[tuple(_flat(record.values))] = None
        return list(shapes), first
    except READ_ERRORS as error:
        raise ManifestError(f"{file.name}: cannot be read: {error}", hint=DAMAGED_HINT) from None
    finally:
        records.close()


def _nothing_readable(name: str, first: Record) -> ManifestError:
    reason = first.values.reason if isinstance(first.values, BrokenRecord) else ""
    return ManifestError(
        f"{name}: none of its first rows can be read; line {first.line} {reason}",
        hint='a row is a JSON object, such as {"prompt": "a cup of coffee"}',
    )


def _no_prompt_column(name: str, columns: list[str], column_map: Mapping[str, str]) -> ManifestError:
    shown = ", ".join(map(show, columns[:20])) + (", …" if len(columns) > 20 else "")
    message = f"{name}: has no prompt column; its columns are: {shown}"
    taken = next((column for column in columns if names_prompt(column) and column in column_map), None)
    if taken is not None:
        hint = f"leave out --map {show(taken)}={column_map[taken]}: it takes the prompts away"
        return ManifestError(message, hint=hint)
    free = [show(column) for column in columns if column not in column_map]
    close = next((c for c in free if did_you_mean(c, ("prompt", "prompts", "caption", "text"))), None)
    close = close or next((c for c in free if "prompt" in c.lower() or "caption" in c.lower()), None)
    theirs = close or (free[0] if free else "column")
    hint = f"did you mean --map {theirs}=prompt?" if close else f"name it with --map {theirs}=prompt"
    return ManifestError(message, hint=hint)


def _check_mapped(
    column_map: Mapping[str, str], columns: Sequence[set[str]], files: Sequence[Reader]
) -> None:
    """Checks that every mapped column is in some file.

    Raises:
        ManifestError: It is in none, and no file could have it further down.
    """
    seen = {show(column) for column in set().union(*columns)}
    for theirs, ours in column_map.items():
        if show(theirs) not in seen and all(file.schema is not None for file in files):
            close = did_you_mean(theirs, seen)
            raise ManifestError(
                f"--map {theirs}={ours}: no file has a column {theirs!r}",
                hint=f"did you mean {close}?" if close else f"there are: {', '.join(sorted(seen)[:20])}",
            )


def same_manifest(old: Mapping[str, Any], manifest: Manifest) -> list[str]:
    """How ``manifest`` differs from the one with the fingerprint ``old``; empty when it is the same.

    A file whose name, size and version are as before is not read again; a file that was only
    touched or moved is the same.

    Args:
        old: From ``Manifest.fingerprint``.
        manifest: The manifest now.

    Raises:
        ManifestError: A file is gone.
    """
    differences = []
    if len(old["files"]) != len(manifest.files):
        differences.append(f"it had {len(old['files'])} files, now {len(manifest.files)}")
    for before, (index, file) in zip(old["files"], enumerate(manifest.files), strict=False):
        if not manifest.has_content(index, before):
            moved = "" if before["name"] == file.name else f" (it was {before['name']})"
            differences.append(f"{file.name}{moved}: its content has changed")
    for name, now in (("column_map", manifest.column_map), ("limit", manifest.limit)):
        if old[name] != now:
            differences.append(f"{name} was {old[name]}, now {now}")
    return differences
