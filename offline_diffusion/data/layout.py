"""Where things lie in an output folder, and how its rows fall into shards."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import overload

IMAGES, METRICS, FAILURES, STATE = "images", "metrics", "failures", "_state"
TABLES = (IMAGES, METRICS, FAILURES)
SHARDS, PARTIALS, STAGED, STEPS, SCRATCH, TASKS, PROFILE, FLIGHTS, DEATHS, PREVIEWS = (
    f"{STATE}/{name}"
    for name in (
        "shards", "partial", "staged", "steps", "tmp", "tasks", "profile", "flights", "deaths", "previews"
    )
)  # fmt: skip

_MARKER_NAME = re.compile(r"shard-(\d{5,})(?:\.r([1-9]\d*))?\.json")
_STAGED_NAME = re.compile(r"(shard-(\d{5,}))(?:\.r([1-9]\d*))?\.\d{6,}-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Shard:
    """Manifest rows ``start`` to ``stop - 1``: the unit of publication and of resuming."""

    index: int
    start: int
    stop: int
    digits: int = 5

    @property
    def stem(self) -> str:
        """File name without suffix; sorts as the shards do."""
        return f"shard-{self.index:0{self.digits}d}"

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class Shards(Sequence[Shard]):
    """All shards of a job, made when asked for."""

    def __init__(self, num_rows: int, shard_size: int) -> None:
        self._num_rows, self._shard_size = num_rows, shard_size
        self._count = -(-num_rows // shard_size)
        self._digits = max(5, len(str(max(0, self._count - 1))))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> list[Shard]: ...
    def __getitem__(self, index: int | slice) -> Shard | list[Shard]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        index = range(self._count)[index]
        start = index * self._shard_size
        return Shard(index, start, min(start + self._shard_size, self._num_rows), self._digits)


def make_shards(num_rows: int, shard_size: int) -> Shards:
    """The shards of a manifest: fixed ranges of rows, whatever the number of tasks."""
    return Shards(num_rows, shard_size)


def table_files(out: Path, table: str, stem: str) -> list[Path]:
    """The files of a shard, by its stem, in one of the tables, in manifest order; usually one.

    Each name is looked at: a listing of the folder for every shard would take longer with each.
    """
    paths = (out / table / table_file(stem, part) for part in count())
    return list(takewhile(Path.exists, paths))


def table_file(stem: str, part: int) -> str:
    """The name of a shard's file number ``part`` in a table; what is too large for one goes on in more."""
    return f"{stem}.part{part:03d}.parquet" if part else f"{stem}.parquet"


def publication_name(stem: str, number: int) -> str:
    """Names a publication of a shard: the first, 0, by the shard alone, later ones ``.r1``, ``.r2``, ..."""
    return f"{stem}.r{number}" if number else stem


def publication_numbers(markers_folder: Path) -> dict[int, list[int]]:
    """For every shard with markers in a folder the numbers of its publications, ascending."""
    found: dict[int, list[int]] = {}
    try:
        names = os.listdir(markers_folder)
    except FileNotFoundError:
        return found
    for name in names:
        if match := _MARKER_NAME.fullmatch(name):
            found.setdefault(int(match[1]), []).append(int(match[2] or 0))
    return {index: sorted(numbers) for index, numbers in found.items()}


@dataclass(frozen=True, slots=True)
class StagedFolder:
    """A folder with the files of a publication that is on its way."""

    path: Path
    shard: int
    stem: str
    number: int

    @property
    def generation(self) -> int:
        """Of the owner that made it."""
        return int(self.path.name.rpartition(".")[2].partition("-")[0])


def staged_folders(staged: Path) -> list[StagedFolder]:
    """All of them, by name; empty when there is no such folder."""
    try:
        names = os.listdir(staged)
    except FileNotFoundError:
        return []
    return staged_of(staged, names)


def staged_of(staged: Path, names: Iterable[str]) -> list[StagedFolder]:
    """Those of some names in a folder that staged folders have, by name."""
    matches = ((name, _STAGED_NAME.fullmatch(name)) for name in sorted(names))
    return [
        StagedFolder(staged / name, int(match[2]), match[1], int(match[3] or 0))
        for name, match in matches
        if match
    ]


def staged_file(folder: Path, path: str) -> Path:
    """Where a file lies in a staged folder that will be published as ``path``."""
    return folder / path.replace("/", ".")


def stem_of(name: str) -> str:
    """The shard that a file of its owner is of, by the file's name."""
    return name.split(".", maxsplit=1)[0]


def index_of(name: str) -> int:
    """That shard's index."""
    return int(stem_of(name).split("-")[1])


def generation_of(name: str) -> int:
    """The owner of a shard that has made a file, by the file's name; -1 where that does not tell."""
    match = re.search(r"\.(\d{6,})[.-]", name)
    return int(match[1]) if match else -1
