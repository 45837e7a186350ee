"""The output folder's books: the job it belongs to, and which shards are published."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from offline_diffusion.config import is_storage_url
from offline_diffusion.data.files import (
    create_file,
    delete,
    disk_errors,
    drop_dead_scratch,
    make_folder,
    scratch_path,
    sync_folder,
    to_json,
)
from offline_diffusion.data.heartbeat import Heartbeat, drop_old_heartbeats, write_heartbeat
from offline_diffusion.data.job_file import JOB_FILE, Job, JobIdentity, differences, new_job, read_job
from offline_diffusion.data.layout import (
    IMAGES,
    METRICS,
    PARTIALS,
    SCRATCH,
    SHARDS,
    STAGED,
    STATE,
    STEPS,
    Shard,
    Shards,
    index_of,
    make_shards,
    staged_folders,
    stem_of,
)
from offline_diffusion.data.manifest_change import change_manifest, finish_change, superseded_folders
from offline_diffusion.data.marker import Marker, marker_from_tables
from offline_diffusion.data.publication import Publications
from offline_diffusion.data.remotes import AnyStorage, open_storage, remote_of
from offline_diffusion.data.state_files import FolderFiles, StateFiles
from offline_diffusion.errors import JobError, JobInterrupted

__all__ = ["JobIdentity", "Ledger", "Marker", "Shard", "Shards", "make_shards", "open_to_read"]

READER_GIVES_UP_AFTER_S = 30.0


class Ledger:
    """The books of one output folder; several processes may have it open.

    ``open`` comes first when writing; readers may go without.

    Args:
        out: The output folder; of an output on object storage its working folder.
        storage: Where the dataset goes in that case.
    """

    def __init__(self, out: Path, storage: AnyStorage | None = None) -> None:
        self.out = out.absolute()
        self.remote = None if storage is None else remote_of(storage, self.out)
        self.files: StateFiles = FolderFiles(self.out) if self.remote is None else self.remote.files
        self.state = self.out / STATE
        self.scratch = self.out / SCRATCH
        self.partials = self.out / PARTIALS
        self.markers_folder = self.out / SHARDS
        self.publications = Publications.of(self.out) if self.remote is None else self.remote.publications
        self._broken: dict[int, int] = {}
        self._listed: dict[int, int] | None = None  # numbers of publications, as of the last listing
        self._job: Job | None = None
        self._next_pull = 0.0

    @property
    def place(self) -> Path | str:
        """The output as users know it: a folder or a URL."""
        return self.out if self.remote is None else self.remote.storage.url

    @property
    def job(self) -> Job:
        """The job this folder belongs to.

        Raises:
            JobError: The folder is not one of ours.
        """
        if self._job is None:
            self._job = read_job(self.out)
        return self._job

    @property
    def shards(self) -> Shards:
        return make_shards(self.job.identity.num_rows, self.job.identity.shard_size)

    def open(self, identity: JobIdentity, *, allow_manifest_change: bool = False) -> None:
        """Takes the folder for a job, or finds that it belongs to the same one.

        With ``allow_manifest_change`` a folder made from another manifest is taken over: what it
        holds moves aside and is adopted shard by shard where a row's id and content are unchanged.

        Raises:
            JobMismatchError: The folder belongs to another job; every difference is named.
            JobError: The folder cannot be written to or holds something else.
        """
        with disk_errors(self.out):
            self._refuse_foreign_folder()
            if self.remote is not None:
                self.remote.take(identity)
            self.scratch.mkdir(parents=True, exist_ok=True)
            drop_dead_scratch(self.scratch)
            finish_change(self.out)
            if not (self.out / JOB_FILE).exists():
                self.markers_folder.mkdir(exist_ok=True)
                create_file(self.out / JOB_FILE, to_json(new_job(identity).to_dict()), self.scratch)
            self._job = read_job(self.out)
            if not self.markers_folder.exists():
                self._restore_markers()
            if differences(self._job.identity, identity):
                allowed = allow_manifest_change and self.remote is None
                change_manifest(self.out, identity, allowed=allowed)
                self._job = read_job(self.out)
            for name in (IMAGES, METRICS, PARTIALS, SHARDS, STAGED):
                (self.out / name).mkdir(parents=True, exist_ok=True)
            sync_folder(self.state)  # what is synced in a folder is lost with the folder's name
            sync_folder(self.out)
            if self.remote is not None:
                self.remote.pull_markers(drop=True)
            self.publications.roll_forward()

    def _refuse_foreign_folder(self) -> None:
        make_folder(self.out)
        foreign = [name for name in os.listdir(self.out) if name != STATE and not name.startswith(".")]
        if foreign and not (self.out / JOB_FILE).exists():
            shown = ", ".join(sorted(foreign)[:5]) + (", ..." if len(foreign) > 5 else "")
            raise JobError(
                f"output folder {self.out} is not empty and was not written by offdiff: it holds {shown}",
                hint="choose a new or empty folder for --out",
            )

    def _restore_markers(self) -> None:
        """Someone deleted ``_state``: what is published says itself that it is whole."""
        folder = scratch_path(self.state, "shards.restored")
        folder.mkdir()
        for shard in self.shards:
            if (marker := marker_from_tables(self.out, shard)) is not None:
                (folder / f"{shard.stem}.json").write_bytes(to_json(asdict(marker)))
        os.sync()
        try:
            os.rename(folder, self.markers_folder)
        except OSError:  # another process was faster
            shutil.rmtree(folder)

    def pull(self, *, signs: bool = True) -> None:
        """Gets what others have written on object storage, for readers.

        Args:
            signs: Signs of life too, over those that are here.

        Raises:
            JobError: The output is not one of ours, or cannot be reached.
        """
        if self.remote is not None:
            self.remote.read_job()
            self.remote.pull_markers(drop=True)
            if signs:
                self.remote.pull_heartbeats()

    def look_again(self) -> None:
        """Gets what was published over there since the last look."""
        if self.remote is not None:
            self.remote.pull_markers()

    def published(self) -> set[int]:
        """Indices of the published shards, without those found broken: one directory listing.

        Elsewhere what others published in the last few seconds may be missing, on the Hub in the last minute.
        """
        if self.remote is not None and time.monotonic() >= self._next_pull:
            self.remote.pull_markers()
            self._next_pull = time.monotonic() + self.remote.storage.list_interval_s
        return set(self.numbers())

    def refresh(self, shard: Shard) -> None:
        """Looks whether somebody has published a shard just now; on a file system that shows by itself."""
        if self.remote is not None:
            self.remote.pull_marker(shard.stem, self.next_number(shard))

    def park(self, shard: Shard, *, until: float) -> None:
        """Leaves what was made of a shard where other machines find it, if that can be done.

        Args:
            shard: Its partials are whole on disk.
            until: Nothing is begun later, in seconds of the monotonic clock.
        """
        if self.remote is not None:
            with contextlib.suppress(JobError, JobInterrupted, OSError):
                self.remote.park(shard.stem, until=until)

    def unpark(self, shard: Shard) -> None:
        """Gets what other machines left of a shard.

        Raises:
            JobInterrupted: The storage cannot be reached.
        """
        if self.remote is not None:
            self.remote.unpark(shard.stem)

    def drop_old_heartbeats(self, task: int, worker: str) -> None:
        """Leaves only the newest few signs of a task's earlier workers."""
        drop_old_heartbeats(self.out, task, worker)
        if self.remote is not None:
            self.remote.drop_old_heartbeats(task, worker)

    def shown(self, path: Path) -> str:
        """How to tell users of a path in the output."""
        return str(path) if self.remote is None else f"{self.place}/{path.relative_to(self.out).as_posix()}"

    def beat(self, heartbeat: Heartbeat) -> None:
        """Shows a worker's sign of life."""
        with disk_errors(self.state):
            content = write_heartbeat(self.out, heartbeat)
        if self.remote is not None:
            self.remote.push_heartbeat(heartbeat, content)

    @contextlib.contextmanager
    def tables_at_hand(self, shard: Shard) -> Iterator[None]:
        """Has the tables of a published shard in the output folder, on object storage for a while only."""
        if self.remote is None or (marker := self.marker(shard)) is None:
            yield
            return
        with self.remote.at_hand(marker):
            yield

    def numbers(self) -> dict[int, int]:
        """As ``published``, with the number of each shard's newest publication."""
        self._listed = self.publications.numbers()
        found = self._listed.items()
        return {index: number for index, number in found if number > self._broken.get(index, -1)}

    def _newest_number(self, shard: Shard) -> int:
        """Of a shard's newest publication, -1 without one; asked for each shard, so without a listing."""
        if self._listed is None:
            self._listed = self.publications.numbers()
        return self.publications.newest_number(shard.stem, self._listed.get(shard.index, -1))

    def next_number(self, shard: Shard) -> int:
        """The number that the shard's next publication has."""
        return self._newest_number(shard) + 1

    def roll_forward(self, shard: Shard) -> None:
        """Puts the files of a committed publication of a shard into their places, whoever made it."""
        with disk_errors(self.out):
            self.publications.roll_forward(shard)

    def set_aside(self, shard: Shard, number: int) -> None:
        """From now on a publication of a shard does not count in these books: it was found broken."""
        self._broken[shard.index] = number

    def marker_path(self, shard: Shard, number: int = 0) -> Path:
        return self.publications.marker_path(shard.stem, number)

    def marker(self, shard: Shard) -> Marker | None:
        """The valid marker of a shard: of its newest publication.

        None while it is not published, and when the marker is damaged or the shard was found broken:
        then it is to be made again.
        """
        number = self._newest_number(shard)
        is_valid = number > self._broken.get(shard.index, -1)
        return self.publications.marker(shard.stem, number) if is_valid else None

    def markers(self) -> dict[int, Marker]:
        """All valid markers by shard index, ascending."""
        shards = self.shards
        if not self.markers_folder.exists():  # ``_state`` was deleted: the tables tell as much
            found = ((shard.index, marker_from_tables(self.out, shard)) for shard in shards)
        else:
            newest = sorted(self.numbers().items())
            found = ((index, self.publications.marker(shards[index].stem, n)) for index, n in newest)
        return {index: marker for index, marker in found if marker is not None}

    def check_current(self) -> None:
        """Raises ``JobError`` when the folder was given to another manifest meanwhile."""
        if read_job(self.out).job_id != self.job.job_id:
            raise JobError(
                f"{self.place} was given to another manifest by another process; this one stops",
                hint="nothing is lost: what it made is in the folder and is adopted by the new job",
            )

    def leftovers(self) -> list[Path]:
        """What is there of shards outside their tables, by whoever is at work or was: a listing a folder."""
        folders = (self.partials, self.out / STEPS, self.scratch)
        with disk_errors(self.state):
            return [folder / name for folder in folders if folder.exists() for name in os.listdir(folder)]

    def clear_leftovers(self, shards: Iterable[Shard], leftovers: Iterable[Path]) -> None:
        """Deletes what crashes left of shards: of unpublished ones only scratch files.

        Args:
            shards: Nobody is at work on them, and no publication of theirs is to be made again.
            leftovers: As they were before that was known: who makes newer ones began later.
        """
        mine = {shard.stem: shard for shard in shards}
        published = self.published()
        with disk_errors(self.state):
            for path in leftovers:
                shard = mine.get(stem_of(path.name))
                if shard is not None and (path.parent == self.scratch or shard.index in published):
                    delete(path)
            for stem in {staged.stem for staged in staged_folders(self.publications.staged)} & mine.keys():
                self.publications.roll_forward(mine[stem])  # its winner may be at it

    def _is_over(self, name: str) -> bool:
        """Whether a file is of a shard of which nothing will be made again, unless it breaks."""
        marker = self.marker(self.shards[index_of(name)])
        return marker is not None and not marker.has_failures

    def finish(self) -> bool:
        """When every shard is published, drops what earlier manifests left.

        Returns:
            Whether every shard is published.
        """
        self._next_pull = 0.0
        if len(self.published()) < len(self.shards):
            return False
        for folder in superseded_folders(self.out):
            shutil.rmtree(folder, ignore_errors=True)
        if self.remote is not None:
            self.publications.roll_forward()
            self.remote.drop_parked(self._is_over)
        return True


@contextlib.contextmanager
def open_to_read(out: str) -> Iterator[Ledger]:
    """The books of an output for who only reads them.

    Args:
        out: A folder, or a URL of object storage.

    Raises:
        JobError: It is not one of ours, or cannot be reached.
    """
    if not is_storage_url(out):
        yield Ledger(Path(out))
        return
    with tempfile.TemporaryDirectory(prefix="offdiff-") as folder:
        ledger = Ledger(Path(folder), open_storage(out, give_up_after_s=READER_GIVES_UP_AFTER_S))
        ledger.pull()
        yield ledger
