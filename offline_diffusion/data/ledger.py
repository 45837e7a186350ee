"""The output folder's books: the job it belongs to, and which shards are published."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from offline_diffusion.data.files import (
    create_file,
    disk_errors,
    drop_dead_scratch,
    replace_file,
    scratch_path,
    sync_folder,
    to_json,
)
from offline_diffusion.data.job_file import JOB_FILE, Job, JobIdentity, differences, new_job, read_job
from offline_diffusion.data.layout import (
    IMAGES,
    METRICS,
    PARTIALS,
    SCRATCH,
    SHARDS,
    STATE,
    Shard,
    Shards,
    make_shards,
    published_in,
)
from offline_diffusion.data.manifest_change import change_manifest, finish_change, superseded_folders
from offline_diffusion.data.marker import Marker, marker_from_tables, read_marker
from offline_diffusion.data.partial import partial_paths
from offline_diffusion.errors import JobError

__all__ = ["JobIdentity", "Ledger", "Marker", "Shard", "Shards", "make_shards"]


class Ledger:
    """The books of one output folder; several processes may have it open.

    ``open`` comes first when writing; readers may go without.
    """

    def __init__(self, out: Path) -> None:
        self.out = out.absolute()
        self.state = self.out / STATE
        self.scratch = self.out / SCRATCH
        self.partials = self.out / PARTIALS
        self.markers_folder = self.out / SHARDS
        self._job: Job | None = None

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
                change_manifest(self.out, identity, allowed=allow_manifest_change)
                self._job = read_job(self.out)
            for folder in (self.out / IMAGES, self.out / METRICS, self.partials, self.markers_folder):
                folder.mkdir(parents=True, exist_ok=True)

    def _refuse_foreign_folder(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
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

    def published(self) -> set[int]:
        """Indices of the published shards: one directory listing."""
        return published_in(self.markers_folder)

    def marker_path(self, shard: Shard) -> Path:
        return self.markers_folder / f"{shard.stem}.json"

    def marker(self, shard: Shard) -> Marker | None:
        """The marker of a shard, or None while it is not published.

        Raises:
            JobError: The marker is damaged.
        """
        try:
            return read_marker(self.marker_path(shard))
        except FileNotFoundError:
            return None

    def markers(self) -> dict[int, Marker]:
        """All markers by shard index, ascending.

        Raises:
            JobError: A marker is damaged.
        """
        shards = self.shards
        if not self.markers_folder.exists():  # ``_state`` was deleted: the tables tell as much
            restored = ((shard.index, marker_from_tables(self.out, shard)) for shard in shards)
            return {index: marker for index, marker in restored if marker is not None}
        found = ((index, self.marker(shards[index])) for index in sorted(self.published()))
        return {index: marker for index, marker in found if marker is not None}

    def write_marker(self, shard: Shard, marker: Marker) -> None:
        """Publishes a shard whose files are in place and durable."""
        replace_file(self.marker_path(shard), to_json(asdict(marker)), self.scratch)

    def remove_marker(self, shard: Shard) -> None:
        """Takes a shard's publication back: it is about to be published anew."""
        try:
            self.marker_path(shard).unlink()
        except FileNotFoundError:
            return
        sync_folder(self.markers_folder)

    def check_current(self) -> None:
        """Raises ``JobError`` when the folder was given to another manifest meanwhile."""
        if read_job(self.out).job_id != self.job.job_id:
            raise JobError(
                f"{self.out} was given to another manifest by another process; this one stops",
                hint="nothing is lost: what it made is in the folder and is adopted by the new job",
            )

    def clear_leftovers(self, shards: Iterable[Shard]) -> None:
        """Deletes what a crash left of published shards. Only for the task that owns them."""
        published = self.published()
        with disk_errors(self.state):
            for shard in shards:
                if shard.index in published:
                    for path in partial_paths(self.partials, shard.stem):
                        path.unlink(missing_ok=True)
                for path in self.scratch.glob(f"{shard.stem}.*"):
                    path.unlink(missing_ok=True)

    def finish(self) -> bool:
        """When every shard is published, drops what earlier manifests left.

        Returns:
            Whether every shard is published.
        """
        if len(self.published()) < len(self.shards):
            return False
        for folder in superseded_folders(self.out):
            shutil.rmtree(folder, ignore_errors=True)
        return True
