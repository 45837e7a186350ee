"""Publications: a shard's files are staged, committed by a marker, then moved into place.

1. The files and the marker are written in a folder of their own in ``_state/staged``.
2. The marker gets its second name among the markers: exclusively, so that of several processes one wins.
   From now on the shard is published.
3. Every file is renamed into its place; the folder goes last.

Whoever finds a folder that the newest marker of its shard names does the third step for a winner that
died. A shard is published anew (``--retry-failed``, or something broke) under the next number; the highest
one is valid. Before its files move, the folders of earlier publications are deleted. Each step of a process
needs its own folder, as a source or as a target, so one that was frozen and comes late can do nothing
more: it is too late to commit, and it has nothing left to move.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from offline_diffusion.data.files import (
    link_file,
    make_folder,
    move_away,
    scratch_path,
    sync_folder,
    to_json,
    write_file,
)
from offline_diffusion.data.layout import (
    SCRATCH,
    SHARDS,
    STAGED,
    TABLES,
    Shard,
    StagedFolder,
    publication_name,
    publication_numbers,
    staged_file,
    staged_folders,
    table_files,
)
from offline_diffusion.data.marker import Marker, read_marker
from offline_diffusion.errors import JobError

MARKER_FILE = "marker.json"
"""In a staged folder, until it gets its second name."""


class ShardLostError(Exception):
    """Another process has published the shard or works on it: what this one has made is not needed."""


@dataclass(frozen=True, slots=True)
class Publications:
    """The publications of an output folder, or of one that was set aside.

    Args:
        out: Holds the tables' folders.
        markers, staged: Where markers and staged folders are.
        scratch: Takes what is to be deleted.
    """

    out: Path
    markers: Path
    staged: Path
    scratch: Path

    @classmethod
    def of(cls, out: Path) -> Publications:
        return cls(out, out / SHARDS, out / STAGED, out / SCRATCH)

    @classmethod
    def of_superseded(cls, out: Path, folder: Path) -> Publications:
        """Those of an earlier manifest, in the folder that ``manifest_change`` made for them."""
        return cls(folder, folder / Path(SHARDS).name, folder / Path(STAGED).name, out / SCRATCH)

    def numbers(self) -> dict[int, int]:
        """For every published shard the number of its newest publication: one directory listing."""
        return {index: numbers[-1] for index, numbers in publication_numbers(self.markers).items()}

    def folders(self) -> list[StagedFolder]:
        """Publications that are on their way, or were when their process died."""
        return staged_folders(self.staged)

    def table_names(self) -> list[str]:
        """Every file in the tables' folders, relative to the output."""
        return [f"{table}/{path.name}" for table in TABLES for path in sorted((self.out / table).glob("*"))]

    def newest_number(self, stem: str, known: int = -1) -> int:
        """The number of a shard's newest publication, -1 without one: a look at a name or two, no listing.

        Args:
            stem: Of the shard.
            known: A number that it had before. They have no gaps: who publishes takes the next one.
        """
        while self.marker_path(stem, known + 1).exists():
            known += 1
        return known

    def marker_path(self, stem: str, number: int) -> Path:
        return self.markers / f"{publication_name(stem, number)}.json"

    def marker(self, stem: str, number: int) -> Marker | None:
        """The marker of a publication; None when it is damaged or not there."""
        try:
            return read_marker(self.marker_path(stem, number))
        except (FileNotFoundError, JobError):
            return None

    def stage(self, shard: Shard, number: int, attempt: str) -> StagedFolder:
        """Makes the folder for the files of a publication; what a try before this one left in it goes.

        Args:
            shard: Which shard.
            number: Of the publication.
            attempt: Names who makes it, see ``partial.new_attempt``.

        Raises:
            FileNotFoundError: The output folder was given to another manifest.
        """
        path = self.staged / f"{publication_name(shard.stem, number)}.{attempt}"
        move_away(path, self.scratch)
        path.mkdir()
        return StagedFolder(path, shard.index, shard.stem, number)

    def least_files(self, _: StagedFolder) -> Mapping[str, int]:
        """How many files each table must have at least, by its name. Here surplus ones are moved away."""
        return {}

    def commit(self, staged: StagedFolder, marker: Marker) -> bool:
        """Publishes a shard whose files are staged and durable.

        Returns:
            Whether this publication won; otherwise another one has its number.

        Raises:
            FileNotFoundError: The folder was taken away: another one has won, or the manifest changed.
        """
        source = staged.path / MARKER_FILE
        write_file(source, to_json(asdict(marker)))
        sync_folder(staged.path)
        sync_folder(self.staged)
        return link_file(source, self.marker_path(staged.stem, staged.number))

    def is_committed(self, staged: StagedFolder) -> bool:
        """Whether this very publication is the one of its number; true also when ``commit`` raised."""
        marker = self.marker(staged.stem, staged.number)
        return marker is not None and marker.staged == staged.path.name

    def move(self, staged: StagedFolder, marker: Marker) -> None:
        """Puts the files of a committed publication into their places, and what else was there away.

        Several processes may do so at once, and one that comes too late does nothing.
        """
        if not staged.path.exists():
            return
        sync_folder(self.markers)
        for other in self._others(staged):
            move_away(other.path, self.scratch)
        for file in marker.files:
            target = self.out / file.path
            if not target.parent.exists():
                make_folder(target.parent)
            with contextlib.suppress(FileNotFoundError):  # moved by somebody else, or too late
                os.replace(staged_file(staged.path, file.path), target)
        published = {self.out / file.path for file in marker.files}
        for table in TABLES:
            for path in reversed(table_files(self.out, table, staged.stem)):  # no gap, whenever this dies
                if path not in published:
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(path, staged.path / f"old.{table}.{path.name}")
            if (self.out / table).exists():
                sync_folder(self.out / table)
        sync_folder(self.out)  # somebody else may have made a table's folder just now
        move_away(staged.path, self.scratch)

    def _others(self, staged: StagedFolder) -> Iterator[StagedFolder]:
        """Folders of the same shard that can no longer win."""
        for other in staged_folders(self.staged):
            same_shard = other.shard == staged.shard and other.path != staged.path
            if same_shard and other.number <= staged.number:
                yield other

    def discard(self, staged: StagedFolder) -> bool:
        """Deletes a publication unless it was committed. Only for who made it.

        Somebody else's may be committed while this looks, and a winner that misses its files for however
        short a time takes them for moved.

        Returns:
            Whether it was not committed.
        """
        if self.is_committed(staged):
            return False
        aside = scratch_path(self.scratch, staged.path.name)
        try:
            os.rename(staged.path, aside)  # without its folder nobody can commit it any more
        except FileNotFoundError:
            return not self.is_committed(staged)
        if self.is_committed(staged):
            os.rename(aside, staged.path)
            return False
        shutil.rmtree(aside, ignore_errors=True)
        return True

    def drop_of_the_dead(self, is_dead: Callable[[StagedFolder], bool]) -> None:
        """Deletes publications that were never committed.

        Args:
            is_dead: Whether the process that made one has ended for certain: one that is merely silent may
                thaw and commit at any moment.
        """
        numbers = self.numbers()
        for staged in staged_folders(self.staged):
            is_late = staged.number > numbers.get(staged.shard, -1)  # others are `roll_forward`'s
            if is_late and is_dead(staged) and not self.is_committed(staged):
                move_away(staged.path, self.scratch)

    def roll_forward(self, shard: Shard | None = None) -> None:
        """Moves the files of publications that were committed by a process that died, and deletes what lost.

        Args:
            shard: Only this one; None takes all.
        """
        folders = [each for each in self.folders() if shard is None or each.shard == shard.index]
        numbers = self.numbers() if folders else {}
        for staged in folders:
            newest = numbers.get(staged.shard, -1)
            if staged.number > newest:  # its owner may still be at work
                continue
            marker = self.marker(staged.stem, newest)
            if marker is not None and marker.staged == staged.path.name:
                self.move(staged, marker)
            elif marker is not None:
                move_away(staged.path, self.scratch)
