"""A task's sign of life: a small file that it replaces every few seconds."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from offline_diffusion.data.files import read_json, replace_file, to_json
from offline_diffusion.data.layout import SCRATCH, TASKS
from offline_diffusion.errors import JobError

INTERVAL_S = 2.0
STALE_S = 30.0
"""A running task that was silent for longer is taken for dead."""


@dataclass(slots=True, kw_only=True)
class OpenShard:
    """A shard that a task works on; counts its images."""

    num_images: int
    num_ok: int = 0
    num_failed: int = 0


@dataclass(slots=True, kw_only=True)
class Heartbeat:
    """What a task says about itself.

    Args:
        task, num_tasks: Its index, and of how many.
        worker: The process, as recorded with its images.
        started_at, updated_at: Seconds since the epoch.
        state: ``stopped`` is a stop in good order before the end.
        num_ok, num_failed: Images made since it started.
        images_per_s: Over the last minute.
        shards: Those it has open, by index.
    """

    task: int
    num_tasks: int
    worker: str
    host: str = field(default_factory=socket.gethostname)
    started_at: float = field(default_factory=time.time)
    updated_at: float = 0.0
    state: Literal["running", "done", "stopped"] = "running"
    num_ok: int = 0
    num_failed: int = 0
    images_per_s: float = 0.0
    shards: dict[int, OpenShard] = field(default_factory=dict)

    def alive(self, now: float) -> bool:
        """Whether the task is at work, as far as its file says."""
        return self.state == "running" and now - self.updated_at < STALE_S


def write_heartbeat(out: Path, heartbeat: Heartbeat) -> None:
    """Replaces the task's file. A power loss may cost it."""
    folder = out / TASKS
    folder.mkdir(exist_ok=True)
    heartbeat.updated_at = time.time()
    path = folder / f"task-{heartbeat.task:05d}.json"
    replace_file(path, to_json(asdict(heartbeat)), out / SCRATCH, durable=False)


def read_heartbeats(out: Path) -> list[Heartbeat]:
    """The last sign of every task, by task index; damaged files are left out."""
    found = (_read(path) for path in sorted((out / TASKS).glob("task-*.json")))
    return sorted((beat for beat in found if beat is not None), key=lambda beat: beat.task)


def _read(path: Path) -> Heartbeat | None:
    try:
        values: dict[str, Any] = read_json(path)
        shards = {int(index): OpenShard(**counts) for index, counts in values.pop("shards").items()}
        return Heartbeat(shards=shards, **values)
    except (OSError, KeyError, TypeError, ValueError, JobError):
        return None
