"""How far a job is, told by its output folder alone; cheap enough to ask every second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from offline_diffusion.data.heartbeat import Heartbeat, OpenShard, read_heartbeats, workers_at_work
from offline_diffusion.data.layout import index_of
from offline_diffusion.data.ledger import Ledger, open_to_read
from offline_diffusion.data.marker import Marker

ShardState = Literal["done", "running", "begun"]
WorkerState = Literal["running", "done", "stopped", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """A shard that is not merely pending.

    ``begun`` has finished images but nobody works on it now. ``num_images`` counts those requested,
    None where unknown.
    """

    shard: int
    state: ShardState
    num_ok: int = 0
    num_failed: int = 0
    num_invalid_rows: int = 0
    num_images: int | None = None
    task: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker that has been seen; ``lost`` fell silent without a word, ``updated_at`` in epoch seconds.

    ``shards`` are those it holds, ``num_shards_done`` those it has published. ``images_per_s`` is over the
    last minute while it runs, else the mean of its run.
    """

    task: int
    worker: str
    host: str
    state: WorkerState
    num_shards_done: int
    shards: list[int]
    num_ok: int
    num_failed: int
    images_per_s: float
    updated_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """A task: all workers that have been seen under its number, now and before.

    ``state`` is ``running`` while one of them runs, else that of the last. ``num_shards_done`` counts what
    workers of this number have published, other runs included; images and rate are of those seen.
    """

    task: int
    state: WorkerState
    num_workers_running: int
    num_shards_done: int
    num_ok: int
    num_failed: int
    images_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A job's progress.

    Args:
        num_rows, num_rows_done: Of the manifest, and in published shards.
        num_shards, num_shards_done, num_shards_running: All, published, being worked on.
        num_ok, num_failed: Images, those in unfinished shards included.
        num_invalid_rows: Quarantined rows in published shards.
        images_per_s: Of the running workers together, over the last minute; of the last worker of every
            task together when the job is finished.
        eta_s: Seconds left at that rate; None when nothing runs or it is too early to say.
        tasks: Every task that has been seen.
        workers: Every worker that has been seen and is not long gone, by task and age.
        shards: Every shard that is done, running or begun; the others are pending.
    """

    out: str
    num_rows: int
    num_rows_done: int
    num_shards: int
    num_shards_done: int
    num_shards_running: int
    num_ok: int
    num_failed: int
    num_invalid_rows: int
    images_per_s: float
    eta_s: float | None
    tasks: list[TaskStatus]
    workers: list[WorkerStatus]
    shards: list[ShardStatus]

    @property
    def finished(self) -> bool:
        return self.num_shards_done == self.num_shards

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self) | {"finished": self.finished}


def read_status(out: Path | str) -> Status:
    """Reads markers and heartbeats.

    Args:
        out: The output folder, or a URL of object storage.

    Raises:
        JobError: The folder is not one of ours.
    """
    with open_to_read(str(out)) as ledger:
        return status_of(ledger, name=str(out))


def status_of(ledger: Ledger, *, name: str | None = None) -> Status:
    """Likewise, from books at hand, see ``Ledger.pull``; ``name`` is what the user calls the output."""
    markers = ledger.markers()
    beats = read_heartbeats(ledger.out)
    at_work = workers_at_work(ledger.out, beats)
    shards = _shards(ledger, markers, beats, at_work)
    running = [shard for shard in shards if shard.state == "running"]
    rate = sum((beat.images_per_s for beat in beats if beat.worker in at_work), 0.0)
    num_rows_done = sum(marker.stop - marker.start for marker in markers.values())
    num_ok, num_failed = sum(shard.num_ok for shard in shards), sum(shard.num_failed for shard in shards)
    workers = _workers(beats, markers, at_work)
    tasks = _tasks(workers, markers)
    if len(markers) == len(ledger.shards):
        rate = sum({worker.task: worker.images_per_s for worker in workers}.values())
    status = Status(
        out=str(ledger.place) if name is None else name,
        num_rows=ledger.job.identity.num_rows,
        num_rows_done=num_rows_done,
        num_shards=len(ledger.shards),
        num_shards_done=len(markers),
        num_shards_running=len(running),
        num_ok=num_ok,
        num_failed=num_failed,
        num_invalid_rows=sum(shard.num_invalid_rows for shard in shards),
        images_per_s=rate,
        eta_s=None,
        tasks=tasks,
        workers=workers,
        shards=shards,
    )
    return _with_eta(status, markers)


def _shards(
    ledger: Ledger, markers: Mapping[int, Marker], beats: list[Heartbeat], at_work: Collection[str]
) -> list[ShardStatus]:
    found = {
        index: ShardStatus(
            shard=index,
            state="done",
            num_ok=marker.num_ok,
            num_failed=marker.num_failed,
            num_invalid_rows=marker.num_invalid_rows,
            num_images=marker.num_ok + marker.num_failed,
            task=marker.task,
        )
        for index, marker in markers.items()
    }
    # Of several that speak of a shard whoever is at work counts, whatever the clock of one that died says.
    for beat in sorted(beats, key=lambda beat: (beat.worker in at_work, beat.updated_at)):
        for index, counts in beat.shards.items():
            if index not in markers:
                found[index] = _open_shard(index, counts, beat, alive=beat.worker in at_work)
            elif beat.worker in at_work:  # its failures are being retried
                found[index] = replace(found[index], state="running")
    for path in ledger.partials.glob("*.arrows"):
        index = index_of(path.name)
        found.setdefault(index, ShardStatus(shard=index, state="begun"))
    return [found[index] for index in sorted(found)]


def _open_shard(index: int, counts: OpenShard, beat: Heartbeat, *, alive: bool) -> ShardStatus:
    return ShardStatus(
        shard=index,
        state="running" if alive else "begun",
        num_ok=counts.num_ok,
        num_failed=counts.num_failed,
        num_images=counts.num_images,
        task=beat.task,
    )


def _workers(
    beats: list[Heartbeat], markers: Mapping[int, Marker], at_work: Collection[str]
) -> list[WorkerStatus]:
    num_done = Counter(marker.worker for marker in markers.values())
    return [_worker(beat, num_done[beat.worker], is_at_work=beat.worker in at_work) for beat in beats]


def _worker(beat: Heartbeat, num_shards_done: int, *, is_at_work: bool) -> WorkerStatus:
    lost = beat.state == "running" and not is_at_work
    state: WorkerState = "lost" if lost else beat.state
    mean = (beat.num_ok + beat.num_failed) / max(1e-3, beat.updated_at - beat.started_at)
    return WorkerStatus(
        task=beat.task,
        worker=beat.worker,
        host=beat.host,
        state=state,
        num_shards_done=num_shards_done,
        shards=sorted(beat.shards) if state == "running" else [],
        num_ok=beat.num_ok,
        num_failed=beat.num_failed,
        images_per_s=beat.images_per_s if state == "running" else mean,
        updated_at=beat.updated_at,
    )


def _tasks(workers: list[WorkerStatus], markers: Mapping[int, Marker]) -> list[TaskStatus]:
    num_done = Counter(marker.task for marker in markers.values())
    found = []
    for task, group in groupby(workers, key=lambda worker: worker.task):
        seen = list(group)
        running = [worker for worker in seen if worker.state == "running"]
        found.append(
            TaskStatus(
                task=task,
                state="running" if running else seen[-1].state,
                num_workers_running=len(running),
                num_shards_done=num_done[task],
                num_ok=sum(worker.num_ok for worker in seen),
                num_failed=sum(worker.num_failed for worker in seen),
                images_per_s=sum(worker.images_per_s for worker in running),
            )
        )
    return found


def _with_eta(status: Status, markers: Mapping[int, Marker]) -> Status:
    """Takes the rows left to ask for as many images each as those done."""
    if status.finished:
        return replace(status, eta_s=0.0)
    if not status.images_per_s:
        return status
    num_images_done = sum(marker.num_ok + marker.num_failed for marker in markers.values())
    per_row = num_images_done / status.num_rows_done if status.num_rows_done else 1.0
    left = status.num_rows * per_row - status.num_ok - status.num_failed
    return replace(status, eta_s=max(0.0, left) / status.images_per_s)
