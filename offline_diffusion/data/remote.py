"""An output that is not on a file system: what is published lies there, what is under way in a folder here.

The working folder is an output folder like any other, but for the tables of published shards. Shards are
built in it and then published over there, how depends on the place: see `staged_remote` and `hub_remote`.
Markers are never changed, so the folder's copies of them stay true.
"""

from __future__ import annotations

import abc
import contextlib
import os
import shutil
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from offline_diffusion.data.files import create_file, move_away, replace_file, to_json
from offline_diffusion.data.heartbeat import Heartbeat
from offline_diffusion.data.job_file import JOB_FILE, JobIdentity, new_job
from offline_diffusion.data.layout import (
    METRICS,
    SCRATCH,
    SHARDS,
    STAGED,
    STATE,
    TABLES,
    Shard,
    StagedFolder,
    publication_name,
    staged_folders,
)
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.publication import Publications
from offline_diffusion.data.state_files import StateFiles
from offline_diffusion.data.storage import RemoteFolder
from offline_diffusion.errors import JobError

MANIFEST_INDEX = "manifest"
"""In ``_state``: what was read of the manifest. The same whatever job it is read for."""


@dataclass(slots=True)
class Remote(abc.ABC):
    """The far side of an output, and its working folder.

    Args:
        storage: Where the dataset is.
        out: The working folder.
    """

    storage: RemoteFolder
    out: Path

    @property
    @abc.abstractmethod
    def files(self) -> StateFiles:
        """What workers share: claims and signs of life."""

    @property
    @abc.abstractmethod
    def publications(self) -> RemotePublications:
        """Those that are there."""

    @abc.abstractmethod
    def danger_of_tasks(self) -> str | None:
        """What to warn of who runs several tasks; None when nothing can go wrong."""

    @abc.abstractmethod
    def pull_heartbeats(self) -> None:
        """Gets the workers' signs of life, for readers, where they are shown over there."""

    @abc.abstractmethod
    def push_heartbeat(self, heartbeat: Heartbeat, content: bytes) -> None:
        """Shows others a worker's sign of life now and then, if it can: soon there is another one."""

    @abc.abstractmethod
    def park(self, stem: str) -> None:
        """Leaves what was made of a shard so far over there: the next owner may be another machine.

        Raises:
            JobInterrupted: The place cannot be reached. Here everything is kept.
        """

    @abc.abstractmethod
    def unpark(self, stem: str) -> None:
        """Gets what other machines have made of a shard, as far as they could park it."""

    @abc.abstractmethod
    def drop_parked(self, stems: Container[str] | None = None) -> None:
        """Deletes what is parked of published shards; None is all."""

    def take(self, identity: JobIdentity) -> None:
        """Makes the working folder one of the job that is there; where there is none, of a new one.

        Raises:
            JobError: Something else is there, or it cannot be reached.
        """
        try:
            content = self.storage.read(JOB_FILE)
        except FileNotFoundError:
            self._refuse_foreign()
            self.storage.create(JOB_FILE, to_json(new_job(identity).to_dict()))
            content = self.storage.read(JOB_FILE)
        self._take_job_file(content)
        if not self.storage.folders(STATE) and self.storage.names(METRICS):
            raise JobError(
                f"{self.storage} has tables, but no {STATE}/{SHARDS.split('/')[1]}: which shards are whole?",
                hint="put that folder back, or choose a new --out",
            )

    def read_job(self) -> None:
        """Puts a copy of ``job.json`` into an empty working folder, for readers.

        Raises:
            JobError: There is none.
        """
        try:
            content = self.storage.read(JOB_FILE)
        except FileNotFoundError:
            raise JobError(
                f"{self.storage} is not an output of offdiff: it has no {JOB_FILE}",
                hint="give the URL that `offdiff run ... --out URL` wrote to",
            ) from None
        (self.out / SCRATCH).mkdir(parents=True, exist_ok=True)
        replace_file(self.out / JOB_FILE, content, self.out / SCRATCH, durable=False)

    def _refuse_foreign(self) -> None:
        names = [*self.storage.folders(""), *self.storage.names("")]
        if foreign := [name for name in names if name != STATE and not name.startswith(".")]:
            shown = ", ".join(sorted(foreign)[:5]) + (", ..." if len(foreign) > 5 else "")
            raise JobError(
                f"{self.storage} is not empty and was not written by offdiff: it holds {shown}",
                hint="choose a new or empty place for --out",
            )

    def _take_job_file(self, content: bytes) -> None:
        path = self.out / JOB_FILE
        if path.exists() and path.read_bytes() != content:  # of a job that was deleted over there
            path.unlink()
            for name in os.listdir(self.out / STATE):
                if name != MANIFEST_INDEX:
                    shutil.rmtree(self.out / STATE / name, ignore_errors=True)
        (self.out / SCRATCH).mkdir(parents=True, exist_ok=True)
        create_file(path, content, self.out / SCRATCH)

    def pull_markers(self, *, drop: bool = False) -> None:
        """Gets the markers that are not here yet.

        Args:
            drop: Those that are here but no longer there go: somebody wants their shards made again.
        """
        folder = self.out / SHARDS
        folder.mkdir(parents=True, exist_ok=True)
        there, here = set(self.storage.names(SHARDS)), set(os.listdir(folder))
        self._pull(SHARDS, sorted(there - here))
        for name in here - there if drop else ():
            (folder / name).unlink(missing_ok=True)

    def pull_marker(self, stem: str, number: int) -> bool:
        """Gets one marker; False when there is none."""
        name = f"{publication_name(stem, number)}.json"
        if not (self.out / SHARDS / name).exists():
            self._pull(SHARDS, [name])
        return (self.out / SHARDS / name).exists()

    def _pull(self, folder: str, names: list[str]) -> None:
        for path, content in self.storage.read_all([f"{folder}/{name}" for name in names]).items():
            replace_file(self.out / path, content, self.out / SCRATCH, durable=False)

    def table_sizes(self) -> dict[str, int]:
        """Every file in the tables' folders, with its bytes."""
        return {
            f"{table}/{name}": size for table in TABLES for name, size in self.storage.names(table).items()
        }

    @contextlib.contextmanager
    def at_hand(self, marker: Marker) -> Iterator[None]:
        """Has the files of a published shard in the working folder for a while. What is gone is left out."""
        paths = self.places(marker)
        try:
            for path in paths:
                (self.out / path).parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    self.storage.download(path, self.out / path)
            yield
        finally:
            for path in paths:
                (self.out / path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (self.out / f"{STAGED}/{marker.staged}").rmdir()

    def places(self, marker: Marker) -> list[str]:
        """Where the files of a published shard are."""
        return [file.path for file in marker.files]


@dataclass(frozen=True, slots=True)
class RemotePublications(Publications):
    """Publications that are staged in the working folder and committed over there.

    Args:
        remote: Where to.
    """

    remote: Remote

    def table_names(self) -> list[str]:
        return sorted(self.remote.table_sizes())

    def is_committed(self, staged: StagedFolder) -> bool:
        self.remote.pull_marker(staged.stem, staged.number)
        return super(RemotePublications, self).is_committed(staged)

    def surplus(self, staged: StagedFolder, marker: Marker) -> Iterator[str]:
        """Files of the publications before, where this one has fewer."""
        kept = {file.path for file in marker.files}
        for number in range(staged.number):
            old = self.marker(staged.stem, number)
            yield from (file.path for file in old.files if file.path not in kept) if old is not None else ()

    def clear_staged(self, shard: Shard | None = None) -> None:
        """Deletes what is staged here and has been published, or can no longer be.

        Args:
            shard: Only of this one; None takes all.
        """
        here = [each for each in staged_folders(self.staged) if shard is None or each.shard == shard.index]
        numbers = self.numbers() if here else {}
        for staged in here:
            if staged.number <= numbers.get(staged.shard, -1):
                move_away(staged.path, self.scratch)
