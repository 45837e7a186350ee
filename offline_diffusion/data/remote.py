"""An output on object storage: what is published lies there, what is under way in a working folder here.

The working folder is an output folder like any other, but for the tables of published shards. Shards are
built in it, uploaded, committed by a marker that the storage lets only one process create, and then copied
into their places by the storage itself. Markers are never changed, so the folder's copies of them stay true.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from offline_diffusion.data.files import (
    create_file,
    move_away,
    replace_file,
    scratch_path,
    to_json,
    write_file,
)
from offline_diffusion.data.heartbeat import Heartbeat, heartbeat_name
from offline_diffusion.data.job_file import JOB_FILE, JobIdentity, new_job, read_job
from offline_diffusion.data.layout import (
    METRICS,
    PARTIALS,
    SCRATCH,
    SHARDS,
    STAGED,
    STATE,
    STEPS,
    TABLES,
    TASKS,
    Shard,
    StagedFolder,
    publication_name,
    staged_file,
    staged_folders,
    staged_of,
)
from offline_diffusion.data.marker import Marker, PublishedFile
from offline_diffusion.data.publication import MARKER_FILE, Publications
from offline_diffusion.data.state_files import StorageFiles
from offline_diffusion.data.storage import LIST_INTERVAL_S, Storage
from offline_diffusion.errors import JobError

UNFINISHED = (PARTIALS, STEPS)
"""Folders with what was made of shards that are not published yet."""

MANIFEST_INDEX = "manifest"
"""In ``_state``: what was read of the manifest. The same whatever job it is read for."""


@dataclass(slots=True)
class Remote:
    """The storage side of an output, and its working folder.

    Args:
        storage: Where the dataset is.
        out: The working folder.
    """

    storage: Storage
    out: Path
    _next_push: float = 0.0

    @property
    def files(self) -> StorageFiles:
        """What workers share: claims and signs of life."""
        return StorageFiles(self.storage)

    @property
    def publications(self) -> RemotePublications:
        base = Publications.of(self.out)
        return RemotePublications(base.out, base.markers, base.staged, base.scratch, self)

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

    def is_exclusive(self) -> bool:
        """Whether the storage lets only one process create a file."""
        return self.storage.is_exclusive(JOB_FILE)

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

    def pull_heartbeats(self) -> None:
        """Gets the workers' signs of life, for readers."""
        (self.out / TASKS).mkdir(parents=True, exist_ok=True)
        self._pull(TASKS, sorted(self.storage.names(TASKS)))

    def push_heartbeat(self, heartbeat: Heartbeat, content: bytes) -> None:
        """Shows others a worker's sign of life now and then, if it can: soon there is another one."""
        if time.monotonic() >= self._next_push or heartbeat.state != "running":
            self.storage.try_replace(heartbeat_name(heartbeat.task, heartbeat.worker), content)
            self._next_push = time.monotonic() + LIST_INTERVAL_S

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

    def park(self, stem: str, *, until: float) -> None:
        """Uploads what was made of a shard so far: the next owner may be another machine.

        Args:
            stem: Which shard.
            until: No file is begun later, in seconds of the monotonic clock.

        Raises:
            JobError, JobInterrupted: That cannot be done. Here everything is kept.
        """
        for folder in UNFINISHED:
            for path in (self.out / folder).glob(f"{stem}.*"):
                if time.monotonic() < until:
                    self.storage.upload(path, f"{self._parked(folder)}/{path.name}")

    def unpark(self, stem: str) -> None:
        """Gets what other machines have made of a shard, as far as they could park it."""
        for folder in UNFINISHED:
            (self.out / folder).mkdir(parents=True, exist_ok=True)
            for name in self.storage.names(self._parked(folder)):
                target = self.out / folder / name
                if name.startswith(f"{stem}.") and not target.exists():
                    self._download(f"{self._parked(folder)}/{name}", target)

    def drop_parked(self, stem: str = "") -> None:
        """Deletes what is parked of a published shard, or of all."""
        for folder in UNFINISHED:
            for name in self.storage.names(self._parked(folder)):
                if name.startswith(f"{stem}." if stem else ""):
                    self.storage.remove(f"{self._parked(folder)}/{name}")

    def _parked(self, folder: str) -> str:
        """Of this job alone: the place may have been emptied and begun anew since."""
        return f"{STATE}/parked/{read_job(self.out).job_id}/{Path(folder).name}"

    def _download_first(self, places: list[str]) -> list[Path]:
        """Gets a file from the first of some places where it is."""
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

    def table_sizes(self) -> dict[str, int]:
        """Every file in the tables' folders, with its bytes."""
        return {
            f"{table}/{name}": size for table in TABLES for name, size in self.storage.names(table).items()
        }

    @contextlib.contextmanager
    def at_hand(self, marker: Marker) -> Iterator[None]:
        """Has the files of a published shard in the working folder for a while: in their places, or staged
        where they are staged still. What is gone is left out."""
        staged = f"{STAGED}/{marker.staged}"
        still_staged = self.storage.names(staged)
        fetched: list[Path] = []
        try:
            for file in marker.files:
                name = staged_file(Path(staged), file.path)
                # It may be moved between the look and the download.
                places = [str(name), file.path] if name.name in still_staged else [file.path]
                fetched += self._download_first(places)
            yield
        finally:
            for path in fetched:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (self.out / staged).rmdir()


@dataclass(frozen=True, slots=True)
class RemotePublications(Publications):
    """Publications that are staged in the working folder and committed on object storage.

    As with a file system each step of a process needs what it has staged: the files are copied from there.

    Args:
        remote: Where to.
    """

    remote: Remote

    def folders(self) -> list[StagedFolder]:
        return staged_of(self.staged, self.remote.storage.folders(STAGED))

    def table_names(self) -> list[str]:
        return sorted(self.remote.table_sizes())

    def commit(self, staged: StagedFolder, marker: Marker) -> bool:
        self.remote.check_current()
        storage, content = self.remote.storage, to_json(asdict(marker))
        write_file(staged.path / MARKER_FILE, content)
        for file in marker.files:
            storage.upload(staged_file(staged.path, file.path), self._place(staged, file))
        arrived = storage.names(f"{STAGED}/{staged.path.name}")
        for file in marker.files:
            if arrived.get(staged_file(Path(), file.path).name) != file.num_bytes:
                raise JobError(f"{storage}/{self._place(staged, file)} is not what was uploaded")
        name = publication_name(staged.stem, staged.number)
        won = storage.create(f"{SHARDS}/{name}.json", content)
        self.remote.pull_marker(staged.stem, staged.number)
        return won

    def is_committed(self, staged: StagedFolder) -> bool:
        self.remote.pull_marker(staged.stem, staged.number)
        return super(RemotePublications, self).is_committed(staged)

    def move(self, staged: StagedFolder, marker: Marker) -> None:
        storage = self.remote.storage
        for other in self._others_there(staged):
            storage.remove_folder(f"{STAGED}/{other.path.name}")
        for file in marker.files:
            with contextlib.suppress(FileNotFoundError):  # copied by somebody else, or too late
                storage.copy(self._place(staged, file), file.path)
        if not self.remote.pull_marker(staged.stem, staged.number + 1):
            self._remove_surplus(staged, marker)
        storage.remove_folder(f"{STAGED}/{staged.path.name}")
        self.remote.drop_parked(staged.stem)
        for here in (staged, *self._others(staged)):
            move_away(here.path, self.scratch)

    def discard(self, staged: StagedFolder) -> bool:
        if self.is_committed(staged):
            return False
        self.remote.storage.remove_folder(f"{STAGED}/{staged.path.name}")
        move_away(staged.path, self.scratch)
        return True

    def roll_forward(self, shard: Shard | None = None) -> None:
        there = [each for each in self.folders() if shard is None or each.shard == shard.index]
        here = [each for each in staged_folders(self.staged) if shard is None or each.shard == shard.index]
        numbers = self.numbers() if there or here else {}
        for staged in there:
            newest = numbers.get(staged.shard, -1)
            if staged.number > newest:  # its owner may still be at work
                continue
            # Somebody may have deleted the marker that is known here, and another one published anew.
            self.remote.refresh_marker(staged.stem, newest)
            marker = self.marker(staged.stem, newest)
            if marker is not None and marker.staged == staged.path.name:
                self.move(staged, marker)
            elif marker is not None:
                self.remote.storage.remove_folder(f"{STAGED}/{staged.path.name}")
        for staged in here:
            if staged.number <= numbers.get(staged.shard, -1):
                move_away(staged.path, self.scratch)

    def _place(self, staged: StagedFolder, file: PublishedFile) -> str:
        return f"{STAGED}/{staged.path.name}/{staged_file(Path(), file.path)}"

    def _others_there(self, staged: StagedFolder) -> Iterator[StagedFolder]:
        for other in self.folders():
            same_shard = other.shard == staged.shard and other.path.name != staged.path.name
            if same_shard and other.number <= staged.number:
                yield other

    def _remove_surplus(self, staged: StagedFolder, marker: Marker) -> None:
        """Files of the publications before, where this one has fewer; their markers may be gone."""
        kept = {file.path for file in marker.files}
        markers = [self.marker(staged.stem, number) for number in range(staged.number)]
        old = {file.path for each in markers if each is not None for file in each.files}
        for path in {*old, *(f"{table}/{staged.stem}.parquet" for table in TABLES)} - kept:
            self.remote.storage.remove(path)
