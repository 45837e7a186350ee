"""Finds rows that repeat an id, in memory that does not grow with the rows."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np

from offline_diffusion.data.manifest import Manifest
from offline_diffusion.data.row_set import RowSet
from offline_diffusion.data.rows import ManifestRow
from offline_diffusion.errors import ManifestError

DIGEST_BYTES = 16
NUM_BUCKETS = 256
MAX_ROWS_IN_MEMORY = 2**20
"""More go to a temporary file, 24 bytes a row."""

_NO_ID = bytes(DIGEST_BYTES)

Entries = np.ndarray
"""uint64 ``[n, 3]``: both halves of the digest of an id, and its row; rows ascend."""


class IdTable:
    """The ids of all rows in order, as digests of 128 bits: no two ids that anybody can make share one.

    Args:
        max_rows: Rows in memory; when there are more, they go to a temporary file.
    """

    def __init__(self, max_rows: int = MAX_ROWS_IN_MEMORY) -> None:
        self._max_bytes = max_rows * DIGEST_BYTES
        self._digests = bytearray()
        self._first_row = 0
        self._file: IO[bytes] | None = None
        self._runs: list[np.ndarray] = []

    def add(self, row_id: str | None) -> None:
        """The next row's id; None for a faulty row, which claims none.

        Raises:
            ManifestError: The temporary file cannot be written.
        """
        if row_id is None:
            self._digests += _NO_ID
        else:
            self._digests += hashlib.blake2b(row_id.encode(), digest_size=DIGEST_BYTES).digest()
        if len(self._digests) >= self._max_bytes:
            self._spill()

    def repeated(self) -> RowSet:
        """The rows whose id an earlier good row has; no more may be added.

        Raises:
            ManifestError: The temporary file cannot be written or read.
        """
        repeated = RowSet()
        if self._file is None:
            repeated.add(_Repeats().take(self._entries()))
            return repeated
        self._spill()
        with self._file:
            for bucket in range(NUM_BUCKETS):
                repeats = _Repeats()
                for entries in self._blocks(bucket):
                    repeated.add(repeats.take(entries))
        return repeated

    def _entries(self) -> Entries:
        """What is in memory, rows without an id left out; the memory is empty afterwards."""
        digests = np.frombuffer(bytes(self._digests), np.uint64).reshape(-1, 2)
        rows = np.arange(self._first_row, self._first_row + len(digests), dtype=np.uint64)
        self._first_row += len(digests)
        self._digests.clear()
        entries: Entries = np.column_stack([digests, rows])
        return entries[digests.any(axis=1)]

    def _spill(self) -> None:
        """Appends what is in memory to the file, sorted by bucket: a run."""
        entries = self._entries()
        buckets = entries[:, 0] % NUM_BUCKETS
        ends = np.cumsum(np.bincount(buckets.astype(np.int64), minlength=NUM_BUCKETS))
        try:
            self._file = self._file or tempfile.TemporaryFile(prefix="offdiff-ids-")  # noqa: SIM115  # see repeated
            start = self._file.tell()
            self._file.write(entries[np.argsort(buckets, kind="stable")].tobytes())
        except OSError as error:
            needed = f"{3 * 8 * self._first_row / 1e6:.0f} MB so far, 24 bytes a row"
            raise ManifestError(
                f"the ids of the rows cannot be kept in {tempfile.gettempdir()}: {error}",
                hint=f"make room ({needed}), or name another folder in TMPDIR",
            ) from None
        self._runs.append(start + 24 * np.concatenate([[0], ends]))

    def _blocks(self, bucket: int) -> Iterator[Entries]:
        """The entries of a bucket, in blocks of little more than the rows that may be in memory."""
        assert self._file is not None
        parts, num_bytes = [], 0
        for offsets in self._runs:
            start, stop = offsets[bucket : bucket + 2].tolist()
            self._file.seek(start)
            parts.append(self._file.read(stop - start))
            num_bytes += stop - start
            if num_bytes > self._max_bytes:
                yield np.frombuffer(b"".join(parts), np.uint64).reshape(-1, 3)
                parts, num_bytes = [], 0
        yield np.frombuffer(b"".join(parts), np.uint64).reshape(-1, 3)


class _Repeats:
    """Finds repeated digests over blocks of ascending rows; keeps each digest once."""

    def __init__(self) -> None:
        self._seen: Entries = np.zeros((0, 3), np.uint64)

    def take(self, entries: Entries) -> np.ndarray:
        """The rows of ``entries`` whose digest an earlier one has: int64 ``[n]``."""
        together = np.concatenate([self._seen, entries])
        order = np.lexsort((together[:, 1], together[:, 0]))  # stable: of equals the first row leads
        ordered = together[order]
        is_repeat = np.zeros(len(ordered), bool)
        is_repeat[1:] = (ordered[1:, :2] == ordered[:-1, :2]).all(axis=1)
        self._seen = ordered[~is_repeat]
        repeats: np.ndarray = ordered[is_repeat, 2].astype(np.int64)
        return repeats


def repeated_rows(manifest: Manifest, repeated: RowSet) -> Iterator[ManifestRow]:
    """The rows of ``repeated``, read once more, in order.

    Raises:
        ManifestError: A file cannot be read to its end.
    """
    for row in manifest.read(repeated.ranges()) if repeated else ():
        if isinstance(row, ManifestRow):
            yield row
