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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from offline_diffusion.data.files import create_file, move_away, replace_file, scratch_path, to_json
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
from offline_diffusion.data.remote_folder import RemoteFolder
from offline_diffusion.data.state_files import StateFiles
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
    def danger(self, num_tasks: int) -> str | None:
        """What to warn of who runs so many tasks; None when nothing can go wrong."""

    @abc.abstractmethod
    def pull_heartbeats(self) -> None:
        """Gets the workers' signs of life, for readers, where they are shown over there."""

    @abc.abstractmethod
    def push_heartbeat(self, heartbeat: Heartbeat, content: bytes) -> None:
        """Shows others a worker's sign of life now and then, if it can: soon there is another one."""

    @abc.abstractmethod
    def drop_old_heartbeats(self, task: int, worker: str) -> None:
        """Leaves only the newest few signs of a task's earlier workers."""

    @abc.abstractmethod
    def park(self, stem: str, *, until: float) -> None:
        """Leaves what was made of a shard so far over there: the next owner may be another machine.

        Args:
            stem: Which shard.
            until: No file is begun later, in seconds of the monotonic clock.

        Raises:
            JobError, JobInterrupted: That cannot be done. Here everything is kept.
        """

    @abc.abstractmethod
    def unpark(self, stem: str) -> None:
        """Gets what other machines have made of a shard, as far as they could park it."""

    @abc.abstractmethod
    def drop_parked(self, is_over: Callable[[str], bool]) -> None:
        """Deletes files that are parked, by name, where nobody will go on with them."""

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

    def check_current(self) -> None:
        """Raises ``JobError`` when the place was emptied, or given to another job, meanwhile."""
        try:
            content = self.storage.read(JOB_FILE)
        except FileNotFoundError:
            content = b""
        if content != (self.out / JOB_FILE).read_bytes():
            raise JobError(
                f"{self.storage} is not this job's any more: its {JOB_FILE} was deleted or replaced",
                hint="give the job another --out",
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
        foreign = [name for name in names if name != STATE and not name.startswith(".")]
        if foreign and not self.storage.exists(JOB_FILE):  # else somebody else has begun meanwhile
            shown = ", ".join(sorted(foreign)[:5]) + (", ..." if len(foreign) > 5 else "")
            raise JobError(
                f"{self.storage} is not empty and was not written by offdiff: it holds {shown}",
                hint="choose a new or empty place for --out",
            )

    def _take_job_file(self, content: bytes) -> None:
        path = self.out / JOB_FILE
        (self.out / SCRATCH).mkdir(parents=True, exist_ok=True)
        if not create_file(path, content, self.out / SCRATCH) and path.read_bytes() != content:
            # Of a job that was deleted over there. Of several workers that find that one clears up.
            aside = scratch_path(self.out / STATE, JOB_FILE)
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, aside)
                for name in os.listdir(self.out / STATE):
                    if name not in (MANIFEST_INDEX, aside.name):
                        shutil.rmtree(self.out / STATE / name, ignore_errors=True)
                aside.unlink()
            (self.out / SCRATCH).mkdir(parents=True, exist_ok=True)
            create_file(path, content, self.out / SCRATCH)

    def pull_markers(self, *, drop: bool = False) -> None:
        """Gets the markers that are not here yet.

        Args:
            drop: Those that are here but no longer there go: somebody wants their shards made again.
        """
        folder = self.out / SHARDS
        folder.mkdir(parents=True, exist_ok=True)
        here = {path.name: path.stat().st_size for path in folder.iterdir()} if drop else os.listdir(folder)
        # Listed after those here: what is here and not there was deleted there.
        there = self.storage.names(SHARDS)
        self._pull(SHARDS, [name for name in there if name not in here])
        if isinstance(here, dict):
            gone = [name for name, size in here.items() if there.get(name) != size]
            for name in gone:
                (folder / name).unlink(missing_ok=True)
            self._pull(SHARDS, [name for name in gone if name in there])

    def pull_marker(self, stem: str, number: int) -> bool:
        """Gets one marker; False when there is none."""
        name = f"{publication_name(stem, number)}.json"
        if not (self.out / SHARDS / name).exists():
            self._pull(SHARDS, [name])
        return (self.out / SHARDS / name).exists()

    def refresh_marker(self, stem: str, number: int) -> None:
        """Makes the copy of a marker like the one there; without one it goes."""
        name = f"{publication_name(stem, number)}.json"
        if not self._pull(SHARDS, [name]):
            (self.out / SHARDS / name).unlink(missing_ok=True)

    def _pull(self, folder: str, names: list[str]) -> int:
        found = self.storage.read_all([f"{folder}/{name}" for name in names])
        for path, content in found.items():
            replace_file(self.out / path, content, self.out / SCRATCH, durable=False)
        return len(found)

    def table_sizes(self) -> dict[str, int]:
        """Every file in the tables' folders, with its bytes."""
        return {
            f"{table}/{name}": size for table in TABLES for name, size in self.storage.names(table).items()
        }

    @contextlib.contextmanager
    def at_hand(self, marker: Marker) -> Iterator[None]:
        """Has the files of a published shard in the working folder for a while. What is gone is left out."""
        fetched: list[Path] = []
        try:
            for places in self.places(marker):
                fetched += self._download_first(places)
            yield
        finally:
            for path in fetched:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (self.out / f"{STAGED}/{marker.staged}").rmdir()

    def places(self, marker: Marker) -> list[list[str]]:
        """Where each file of a published shard may be: it is in the first of these that has one."""
        return [[file.path] for file in marker.files]

    def _download_first(self, places: list[str]) -> list[Path]:
        for place in places:
            (self.out / place).parent.mkdir(parents=True, exist_ok=True)
            self._download(place, self.out / place)
            if (self.out / place).exists():
                return [self.out / place]
        return []

    def _download(self, path: str, target: Path) -> None:
        scratch = scratch_path(self.out / SCRATCH, target.name)
        with contextlib.suppress(FileNotFoundError):
            self.storage.download(path, scratch)
            os.replace(scratch, target)


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

    def earlier_paths(self, staged: StagedFolder) -> set[str]:
        """The files of all publications of a shard before this one."""
        markers = [self.marker(staged.stem, number) for number in range(staged.number)]
        return {file.path for each in markers if each is not None for file in each.files}

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
