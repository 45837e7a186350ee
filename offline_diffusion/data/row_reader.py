"""A manifest's rows in any order, a range at a time: forward reading goes on, a step back begins anew."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import islice

from offline_diffusion.data.manifest import Manifest, duplicate_fault
from offline_diffusion.data.readers.base import RowCursor
from offline_diffusion.data.rows import ManifestRow, RowFault


class RowReader:
    """Reads ranges of rows.

    Files that can be jumped in cost little in any order (`Manifest.can_jump`); others are passed over from
    their beginning after every step back.

    Args:
        manifest: What to read.
        duplicates: Numbers of rows whose id an earlier row has: these are faults.
    """

    def __init__(self, manifest: Manifest, *, duplicates: Container[int] = ()) -> None:
        self._manifest, self._duplicates = manifest, duplicates
        self._cursor = RowCursor([])
        self._position = 0
        self._items: Iterator[ManifestRow | tuple[RowFault, ...]] = iter(())

    def read(self, wanted: range) -> list[ManifestRow | RowFault]:
        """The rows of a range in order; fewer where the manifest ends before.

        Raises:
            ManifestError: A file cannot be read so far, or has changed since its fingerprint was made.
        """
        self._manifest.require_unchanged(wanted)
        if not self._position or wanted.start < self._position:
            self._cursor = RowCursor([wanted])
            self._items = self._manifest.walk(self._cursor)
        else:
            self._cursor.add(wanted)
        rows = [self._row(item) for item in islice(self._items, len(wanted))]
        # The rest of a range that was cut short is not to come first next time.
        self._position = wanted.stop if len(rows) == len(wanted) else 0
        self._manifest.require_unchanged(wanted)  # also while these were read
        return rows

    def _row(self, item: ManifestRow | tuple[RowFault, ...]) -> ManifestRow | RowFault:
        if isinstance(item, tuple):
            return item[0]
        return duplicate_fault(item) if item.row in self._duplicates else item
