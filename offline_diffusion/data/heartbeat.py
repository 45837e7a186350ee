"""A worker's sign of life: a small file of its own that it replaces every few seconds."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from offline_diffusion.data.files import read_json, replace_file, to_json
from offline_diffusion.data.layout import SCRATCH, TASKS
from offline_diffusion.data.process import ProcessId, is_known_dead, this_process
from offline_diffusion.errors import JobError

INTERVAL_S = 2.0
STALE_S = 30.0
"""A running worker that was silent for longer is taken for dead."""

MAX_KEPT = 4
"""Signs of earlier workers that are kept for each task."""

_signs = itertools.count(1)


@dataclass(slots=True, kw_only=True)
class OpenShard:
    """A shard that a worker works on; counts its images."""

    num_images: int
    num_ok: int = 0
    num_failed: int = 0


@dataclass(slots=True, kw_only=True)
class Heartbeat:
    """What a worker says about itself.

    Args:
        task, num_tasks: Its task's index, and of how many.
        worker: Its name, as recorded with its images.
        process: Where it runs.
        started_at, updated_at: Seconds since the epoch, for people: clocks of two machines differ.
        count: Grows with every sign, so that no two are alike whatever the clock says.
        state: ``stopped`` is a stop in good order before the end.
        num_ok, num_failed: Images made since it started.
        images_per_s: Over the last minute.
        shards: Those it has open, by index.
    """

    task: int
    num_tasks: int
    worker: str
    host: str = field(default_factory=socket.gethostname)
    process: ProcessId = field(default_factory=this_process)
    started_at: float = field(default_factory=time.time)
    updated_at: float = 0.0
    count: int = 0
    state: Literal["running", "done", "stopped"] = "running"
    num_ok: int = 0
    num_failed: int = 0
    images_per_s: float = 0.0
    shards: dict[int, OpenShard] = field(default_factory=dict)

    def alive(self, now: float) -> bool:
        """Whether the worker is at work, as far as its file says at one look.

        Who takes a shard over relies on `claims.OwnerWatch` instead, which compares no clocks.
        """
        if self.state != "running" or is_known_dead(self.process):
            return False
        return now - self.updated_at < STALE_S


def heartbeat_path(out: Path, task: int, worker: str) -> Path:
    """The file of a worker; it alone writes it."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", worker)
    return out / TASKS / (f"task-{task:05d}.{name}.json" if name else f"task-{task:05d}.json")


def write_heartbeat(out: Path, heartbeat: Heartbeat) -> None:
    """Replaces the worker's file. A power loss may cost it."""
    path = heartbeat_path(out, heartbeat.task, heartbeat.worker)
    path.parent.mkdir(exist_ok=True)
    heartbeat.updated_at, heartbeat.count = time.time(), next(_signs)
    replace_file(path, to_json(asdict(heartbeat)), out / SCRATCH, durable=False)


def read_heartbeats(out: Path) -> list[Heartbeat]:
    """The last sign of every worker, by task and then by age; damaged files are left out."""
    found = (read_heartbeat(path) for path in sorted((out / TASKS).glob("task-*.json")))
    known = [beat for beat in found if beat is not None]
    return sorted(known, key=lambda beat: (beat.task, beat.started_at, beat.worker))


def read_heartbeat(path: Path) -> Heartbeat | None:
    """One worker's last sign; None when there is none, or none that can be read."""
    try:
        values: dict[str, Any] = read_json(path)
        shards = {int(index): OpenShard(**counts) for index, counts in values.pop("shards").items()}
        process = ProcessId(**values.pop("process", {}))
        return Heartbeat(shards=shards, process=process, **values)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, JobError):
        return None


def drop_old_heartbeats(out: Path, task: int, worker: str) -> None:
    """Leaves only the newest few signs of a task's earlier workers.

    What changed lately stays; times are the file system's own. Should a live worker lose its file all the
    same, it only puts it back: nobody is taken for dead in so short a time.
    """
    own = heartbeat_path(out, task, worker)
    with contextlib.suppress(OSError):
        oldest_fresh_ns = own.stat().st_mtime_ns - STALE_S * 1e9
        dated = [(path.stat().st_mtime_ns, path) for path in own.parent.glob(f"task-{task:05d}.*json")]
        old = sorted(each for each in dated if each[0] < oldest_fresh_ns)
        for _, path in old[:-MAX_KEPT]:
            path.unlink(missing_ok=True)
