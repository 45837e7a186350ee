"""An output on object storage: shards are staged there too, committed by a marker, then copied in place.

The storage lets only one process create the marker, and copies the files by itself. Claims, signs of life
and unfinished shards go by way of it as well, so that machines need nothing else in common.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from offline_diffusion.data.files import move_away, to_json, write_file
from offline_diffusion.data.heartbeat import Heartbeat, drop_old_signs, heartbeat_name
from offline_diffusion.data.job_file import JOB_FILE, read_job
from offline_diffusion.data.layout import (
    FAILURES,
    IMAGES,
    PARTIALS,
    SHARDS,
    STAGED,
    STATE,
    STEPS,
    TASKS,
    Shard,
    StagedFolder,
    generation_of,
    publication_name,
    staged_file,
    staged_of,
    stem_of,
    table_file,
)
from offline_diffusion.data.marker import Marker, PublishedFile
from offline_diffusion.data.publication import MARKER_FILE, Publications
from offline_diffusion.data.remote import Remote, RemotePublications
from offline_diffusion.data.remote_folder import LIST_INTERVAL_S
from offline_diffusion.data.state_files import StorageFiles
from offline_diffusion.data.storage import Storage
from offline_diffusion.errors import JobError

UNFINISHED = (PARTIALS, STEPS)
"""Folders with what was made of shards that are not published yet."""


@dataclass(slots=True)
class StagedRemote(Remote):
    """An output on object storage, and its working folder."""

    storage: Storage
    _next_push: float = 0.0

    @property
    def files(self) -> StorageFiles:
        return StorageFiles(self.storage)

    @property
    def publications(self) -> StagedPublications:
        base = Publications.of(self.out)
        return StagedPublications(base.out, base.markers, base.staged, base.scratch, self)

    def is_exclusive(self) -> bool:
        """Whether the storage lets only one process create a file."""
        return self.storage.is_exclusive(JOB_FILE)

    def danger(self, _: int) -> str | None:
        if self.is_exclusive():
            return None
        return "lets two processes create the same file: give it one task at a time"

    def pull_heartbeats(self) -> None:
        (self.out / TASKS).mkdir(parents=True, exist_ok=True)
        ages = self.storage.ages(TASKS)
        self._pull(TASKS, sorted(ages))
        now = time.time()
        for name, age_s in ages.items():
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                written_at = max(0.0, now - age_s)
                os.utime(self.out / TASKS / name, (written_at, written_at))

    def push_heartbeat(self, heartbeat: Heartbeat, content: bytes) -> None:
        if time.monotonic() >= self._next_push or heartbeat.state != "running":
            self.storage.try_replace(heartbeat_name(heartbeat.task, heartbeat.worker), content)
            self._next_push = time.monotonic() + LIST_INTERVAL_S

    def drop_old_heartbeats(self, task: int, worker: str) -> None:
        drop_old_signs(self.files, task, worker)

    def park(self, stem: str, *, until: float) -> None:
        for folder in UNFINISHED:
            for path in (self.out / folder).glob(f"{stem}.*"):
                if time.monotonic() < until:
                    self.storage.upload(path, f"{self._parked(folder)}/{path.name}")

    def unpark(self, stem: str) -> None:
        for folder in UNFINISHED:
            (self.out / folder).mkdir(parents=True, exist_ok=True)
            for name in self.storage.names(self._parked(folder)):
                target = self.out / folder / name
                if name.startswith(f"{stem}.") and not target.exists():
                    self._download(f"{self._parked(folder)}/{name}", target)

    def drop_parked(self, is_over: Callable[[str], bool]) -> None:
        for folder in UNFINISHED:
            for name in self.storage.names(self._parked(folder)):
                if is_over(name):
                    self.storage.remove(f"{self._parked(folder)}/{name}")

    def _parked(self, folder: str) -> str:
        """Of this job alone: the place may have been emptied and begun anew since."""
        return f"{STATE}/parked/{read_job(self.out).job_id}/{Path(folder).name}"

    def places(self, marker: Marker) -> list[list[str]]:
        """Staged, where they are staged still: moved perhaps between this look and the download."""
        staged = f"{STAGED}/{marker.staged}"
        still_staged = self.storage.names(staged)
        names = {file.path: staged_file(Path(staged), file.path) for file in marker.files}
        return [[str(at), path] if at.name in still_staged else [path] for path, at in names.items()]


@dataclass(frozen=True, slots=True)
class StagedPublications(RemotePublications):
    """Publications of which a copy is staged on the storage.

    As with a file system each step of a process needs what it has staged: the files are copied from there.

    Args:
        remote: Where to.
    """

    remote: StagedRemote

    def folders(self) -> list[StagedFolder]:
        return staged_of(self.staged, self.remote.storage.folders(STAGED))

    def least_files(self, staged: StagedFolder) -> Mapping[str, int]:
        """As many as earlier publications have: empty ones take the places of those that are not needed.

        To delete these a process would need nothing that it could be too late for, as it does for all else.
        """
        first = {f"{table}/{table_file(staged.stem, 0)}" for table in (IMAGES, FAILURES)}  # metrics have rows
        paths = self.earlier_paths(staged)
        there = {path for path in first - paths if self.remote.storage.exists(path)}
        return Counter(path.split("/")[0] for path in paths | there)

    def commit(self, staged: StagedFolder, marker: Marker) -> bool:
        self.remote.check_current()
        storage, content = self.remote.storage, to_json(asdict(marker))
        write_file(staged.path / MARKER_FILE, content)
        for file in marker.files:
            storage.upload(staged_file(staged.path, file.path), self._place(staged, file))
        arrived = storage.names(f"{STAGED}/{staged.path.name}")
        for file in marker.files:
            if arrived.get(staged_file(Path(), file.path).name) != file.num_bytes:
                if self.remote.pull_marker(staged.stem, staged.number):  # who has won took them away
                    return False
                raise JobError(f"{storage}/{self._place(staged, file)} is not what was uploaded")
        name = publication_name(staged.stem, staged.number)
        won = storage.create(f"{SHARDS}/{name}.json", content)
        self.remote.pull_marker(staged.stem, staged.number)
        return won

    def move(self, staged: StagedFolder, marker: Marker) -> None:
        storage = self.remote.storage
        for other in self._others_there(staged):
            storage.remove_folder(f"{STAGED}/{other.path.name}")
        for file in marker.files:
            with contextlib.suppress(FileNotFoundError):  # copied by somebody else, or too late
                storage.copy(self._place(staged, file), file.path)
        storage.remove_folder(f"{STAGED}/{staged.path.name}")
        self.remote.drop_parked(
            lambda name: stem_of(name) == staged.stem and generation_of(name) <= staged.generation
        )
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
        numbers = self.numbers() if there else {}
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
        self.clear_staged(shard)

    def _place(self, staged: StagedFolder, file: PublishedFile) -> str:
        return f"{STAGED}/{staged.path.name}/{staged_file(Path(), file.path)}"

    def _others_there(self, staged: StagedFolder) -> Iterator[StagedFolder]:
        for other in self.folders():
            same_shard = other.shard == staged.shard and other.path.name != staged.path.name
            if same_shard and other.number <= staged.number:
                yield other
