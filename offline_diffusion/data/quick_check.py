"""Whether what is published is still there: a look at sizes and footers, at the start of every run.

What the files hold is read only where a file was touched since; all of it by ``verify``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from offline_diffusion.data.files import file_sha256
from offline_diffusion.data.layout import Shard
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import PublishedFile, read_marker
from offline_diffusion.errors import JobError

NUM_THREADS = 16
"""More than processors: on a file system across a network each look is mostly waiting."""

_CHUNK = 64
_MAX_LINES = 20


def find_broken(ledger: Ledger, shards: Iterable[Shard]) -> dict[int, str]:
    """Checks the published ones of some shards; those that are broken no longer count as published.

    Of each file that its marker names: it is there, has its size, its footer can be read and has its rows;
    where it was touched since it was published, also its checksum.

    Args:
        ledger: The open output folder.
        shards: Which shards.

    Returns:
        For each broken shard, by index and ascending, what is wrong with it.

    Raises:
        JobError: The disk failed: that says nothing about what is on it.
    """
    numbers = ledger.publications.numbers()
    sizes = None if ledger.remote is None else ledger.remote.table_sizes()
    published = [shard for shard in shards if shard.index in numbers]
    chunks = [published[at : at + _CHUNK] for at in range(0, len(published), _CHUNK)]

    def check(chunk: list[Shard]) -> list[Shard]:
        return [shard for shard in chunk if _fault(ledger, shard, numbers[shard.index], sizes) is not None]

    def check_again(shard: Shard) -> str | None:
        if ledger.remote is None:
            ledger.roll_forward(shard)
        number = ledger.publications.newest_number(shard.stem, numbers[shard.index] - 1)
        fault = _fault(ledger, shard, number, sizes)
        if fault is not None:
            ledger.set_aside(shard, number)
        return fault

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        suspects = [shard for chunk in threads.map(check, chunks) for shard in chunk]
        # Another process may be in the middle of putting the files into their places.
        if suspects and ledger.remote is not None:
            ledger.publications.roll_forward()
            sizes = ledger.remote.table_sizes()
        faults = list(threads.map(check_again, suspects))
    found = zip(suspects, faults, strict=True)
    return {shard.index: fault for shard, fault in found if fault is not None}


def broken_lines(broken: dict[int, str]) -> Iterator[str]:
    """What to say of broken shards, a line each, but not of thousands."""
    for index, reason in list(broken.items())[:_MAX_LINES]:
        yield f"shard {index} is made again: {reason}"
    if len(broken) > _MAX_LINES:
        yield f"and {len(broken) - _MAX_LINES:,} more broken shards are made again"


def _fault(ledger: Ledger, shard: Shard, number: int, sizes: Mapping[str, int] | None) -> str | None:
    path = ledger.publications.marker_path(shard.stem, number)
    try:
        files = read_marker(path).files
    except FileNotFoundError:
        return "its marker is gone"
    except JobError:
        return f"its marker {path.name} is damaged"
    faults = (
        _file_fault(ledger.out, file) if sizes is None else _fault_there(file, sizes.get(file.path))
        for file in files
    )
    return next((fault for fault in faults if fault is not None), None)


def _fault_there(file: PublishedFile, num_bytes: int | None) -> str | None:
    """On object storage: a file is there whole or not at all, so its size tells enough."""
    if num_bytes is None:
        return f"{file.path} is missing"
    return None if num_bytes == file.num_bytes else _other_size(file, num_bytes)


def _other_size(file: PublishedFile, num_bytes: int) -> str:
    return f"{file.path} has {num_bytes} bytes, published were {file.num_bytes}"


def _file_fault(out: Path, file: PublishedFile) -> str | None:
    path = out / file.path
    try:
        stat = path.stat()
        if stat.st_size != file.num_bytes:
            return _other_size(file, stat.st_size)
        num_rows = pq.read_metadata(path).num_rows
        if num_rows != file.num_rows:
            return f"{file.path} has {num_rows} rows, published were {file.num_rows}"
        is_known = file.mtime_ns is not None and file.sha256 is not None
        was_touched = is_known and file.mtime_ns != stat.st_mtime_ns
        if was_touched and file_sha256(path) != file.sha256:
            return f"{file.path} was changed: its checksum is not that of what was published"
    except FileNotFoundError:
        return f"{file.path} is missing"
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # Arrow's own have none
            raise JobError(
                f"cannot read {path}: {error.strerror}",
                hint="the disk may be failing; to have the shard made again, delete the file",
            ) from error
        return f"the footer of {file.path} cannot be read: {error}"
    if was_touched:
        _restore_mtime(path, stat.st_atime_ns, file.mtime_ns)
    return None


def _restore_mtime(path: Path, atime_ns: int, mtime_ns: int | None) -> None:
    """A copy of a dataset has other times: it is read once, not at the start of every run."""
    assert mtime_ns is not None
    with contextlib.suppress(OSError):
        os.utime(path, ns=(atime_ns, mtime_ns))
