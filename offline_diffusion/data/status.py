"""How far a job is, told by its output folder alone; cheap enough to ask every second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from offline_diffusion.data.heartbeat import Heartbeat, OpenShard, read_heartbeats
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.plan import task_shards

ShardState = Literal["done", "running", "begun"]
TaskState = Literal["running", "done", "stopped", "lost"]


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
class TaskStatus:
    """A task that has been seen; ``lost`` fell silent without a word, ``updated_at`` in epoch seconds.

    ``images_per_s`` is over the last minute while it runs, else the mean of its last run.
    """

    task: int
    state: TaskState
    worker: str
    host: str
    num_shards: int
    num_shards_done: int
    num_ok: int
    num_failed: int
    images_per_s: float
    updated_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A job's progress.

    Args:
        num_rows, num_rows_done: Of the manifest, and in published shards.
        num_shards, num_shards_done, num_shards_running: All, published, being worked on.
        num_ok, num_failed: Images, those in unfinished shards included.
        num_invalid_rows: Quarantined rows in published shards.
        images_per_s: Of the running tasks together, over the last minute; of all tasks together when
            the job is finished.
        eta_s: Seconds left at that rate; None when nothing runs or it is too early to say.
        tasks: Every task that has been seen.
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
    shards: list[ShardStatus]

    @property
    def finished(self) -> bool:
        return self.num_shards_done == self.num_shards

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self) | {"finished": self.finished}


def read_status(out: Path, *, now: float | None = None) -> Status:
    """Reads markers and heartbeats.

    Args:
        out: The output folder.
        now: Seconds since the epoch, for judging who is alive; None takes the clock.

    Raises:
        JobError: The folder is not one of ours.
    """
    now = time.time() if now is None else now
    ledger = Ledger(out)
    markers = ledger.markers()
    beats = read_heartbeats(ledger.out)
    shards = _shards(ledger, markers, beats, now)
    running = [shard for shard in shards if shard.state == "running"]
    rate = sum((beat.images_per_s for beat in beats if beat.alive(now)), 0.0)
    num_rows_done = sum(marker.stop - marker.start for marker in markers.values())
    num_ok, num_failed = sum(shard.num_ok for shard in shards), sum(shard.num_failed for shard in shards)
    tasks = [_task(beat, markers, len(ledger.shards), now) for beat in beats]
    if len(markers) == len(ledger.shards):
        rate = sum((task.images_per_s for task in tasks), 0.0)
    status = Status(
        out=str(out),
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
        shards=shards,
    )
    return _with_eta(status, markers)


def _shards(
    ledger: Ledger, markers: Mapping[int, Marker], beats: list[Heartbeat], now: float
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
    for beat in sorted(beats, key=lambda beat: beat.updated_at):
        for index, counts in beat.shards.items():
            if index not in markers:
                found[index] = _open_shard(index, counts, beat, alive=beat.alive(now))
            elif beat.alive(now):  # its failures are being retried
                found[index] = replace(found[index], state="running")
    for path in ledger.partials.glob("*.arrows"):
        index = int(path.name.split(".")[0].split("-")[1])
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


def _task(beat: Heartbeat, markers: Mapping[int, Marker], num_shards: int, now: float) -> TaskStatus:
    owned = task_shards(num_shards, beat.num_tasks, beat.task)
    lost = beat.state == "running" and not beat.alive(now)
    state: TaskState = "lost" if lost else beat.state
    mean = (beat.num_ok + beat.num_failed) / max(1e-3, beat.updated_at - beat.started_at)
    return TaskStatus(
        task=beat.task,
        state=state,
        worker=beat.worker,
        host=beat.host,
        num_shards=len(owned),
        num_shards_done=sum(index in markers for index in owned),
        num_ok=beat.num_ok,
        num_failed=beat.num_failed,
        images_per_s=beat.images_per_s if state == "running" else mean,
        updated_at=beat.updated_at,
    )


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
