"""A worker's sign of life: a small file of its own that it replaces every few seconds."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from offline_diffusion.data.files import replace_file, to_json
from offline_diffusion.data.layout import SCRATCH, TASKS
from offline_diffusion.data.process import ProcessId, is_known_dead, this_process
from offline_diffusion.data.state_files import FolderFiles, StateFiles
from offline_diffusion.errors import OffdiffError

INTERVAL_S = 2.0
STALE_S = 30.0
"""A running worker that was silent for longer is taken for dead."""

MAX_KEPT = 4
"""Signs of earlier workers that are kept for each task."""

OLD_S = 86_400.0

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

    @property
    def may_run(self) -> bool:
        """Whether the worker has not ended in good order, and is no process of this boot that has ended."""
        return self.state == "running" and not is_known_dead(self.process)


@dataclass(slots=True)
class Seen:
    """What was seen of a worker: its last sign, how long that has not changed, whether it ever did."""

    sign: int | None
    looked_at: float
    silent_s: float = 0.0
    has_changed: bool = False


@dataclass
class SignWatch:
    """Counts for how long workers are silent, for who looks again and again: no other clock counts.

    Args:
        clock: A monotonic clock in seconds.
        max_gap_s: After a longer gap between two looks nothing is known of a worker.
    """

    clock: Callable[[], float] = time.monotonic
    max_gap_s: float = math.inf
    seen: dict[str, Seen] = field(default_factory=dict)

    def note(self, worker: str, sign: int | None) -> Seen:
        """Notes what a look has shown.

        Args:
            worker: Its name.
            sign: The `Heartbeat.count` of its file; None without one.
        """
        now = self.clock()
        seen = self.seen.get(worker)
        if seen is None or now - seen.looked_at > self.max_gap_s:
            self.seen[worker] = seen = Seen(sign, now)
        elif seen.sign != sign:
            self.seen[worker] = seen = Seen(sign, now, has_changed=sign is not None)
        else:
            seen.silent_s += now - seen.looked_at
            seen.looked_at = now
        return replace(seen)


def workers_at_work(out: Path, beats: Iterable[Heartbeat]) -> set[str]:
    """Names of the workers that are at work, as far as a single look at their files tells.

    A file's time is the file system's, so it is compared with that of one made there just now, whatever the
    machines' clocks say. A time to come is of before that clock was set. Who can look again asks `SignWatch`.

    Args:
        out: The output folder. Where nothing can be written, this machine's clock is taken.
        beats: What their files say.
    """
    running = [beat for beat in beats if beat.may_run]
    now = _file_system_time(out) if running else 0.0
    return {beat.worker for beat in running if abs(now - _changed_at(out, beat)) < STALE_S}


def _file_system_time(out: Path) -> float:
    try:
        with tempfile.TemporaryFile(dir=out / SCRATCH) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _changed_at(out: Path, beat: Heartbeat) -> float:
    try:
        return heartbeat_path(out, beat.task, beat.worker).stat().st_mtime
    except OSError:  # deleted since
        return -math.inf


def heartbeat_name(task: int, worker: str) -> str:
    """The file of a worker, relative to the output; it alone writes it."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", worker)
    return f"{TASKS}/task-{task:05d}.{name}.json" if name else f"{TASKS}/task-{task:05d}.json"


def heartbeat_path(out: Path, task: int, worker: str) -> Path:
    """That file in an output folder."""
    return out / heartbeat_name(task, worker)


def write_heartbeat(out: Path, heartbeat: Heartbeat) -> bytes:
    """Replaces the worker's file, and returns what it holds. A power loss may cost it."""
    path = heartbeat_path(out, heartbeat.task, heartbeat.worker)
    path.parent.mkdir(exist_ok=True)
    heartbeat.updated_at, heartbeat.count = time.time(), next(_signs)
    content = to_json(asdict(heartbeat))
    replace_file(path, content, out / SCRATCH, durable=False)
    return content


def read_heartbeats(out: Path) -> list[Heartbeat]:
    """The last sign of every worker, by task and then by age; damaged files are left out."""
    files = FolderFiles(out)
    found = (_read(files, f"{TASKS}/{path.name}") for path in sorted((out / TASKS).glob("task-*.json")))
    known = [beat for beat in found if beat is not None]
    return sorted(known, key=lambda beat: (beat.task, beat.started_at, beat.worker))


def read_heartbeat(files: StateFiles, task: int, worker: str) -> Heartbeat | None:
    """One worker's last sign; None when there is none, or none that can be read."""
    return _read(files, heartbeat_name(task, worker))


def _read(files: StateFiles, path: str) -> Heartbeat | None:
    try:
        values = files.read(path)
        shards = {int(index): OpenShard(**counts) for index, counts in values.pop("shards").items()}
        process = ProcessId(**values.pop("process", {}))
        return Heartbeat(shards=shards, process=process, **values)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OffdiffError):
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


def drop_old_signs(files: StateFiles, task: int, worker: str) -> None:
    """Likewise on object storage, by what the signs say themselves: of a worker that is silent for a day."""
    own = Path(heartbeat_name(task, worker)).name
    with contextlib.suppress(OffdiffError):
        names = {name for name in files.names(TASKS) if name.startswith(f"task-{task:05d}.")} - {own}
        if len(names) <= MAX_KEPT:
            return
        beats = [(beat, name) for name in names if (beat := _read(files, f"{TASKS}/{name}")) is not None]
        old = [
            (beat.updated_at, name)
            for beat, name in beats
            if beat.state != "running" or time.time() - beat.updated_at > OLD_S
        ]
        for _, name in sorted(old)[:-MAX_KEPT]:
            files.remove(f"{TASKS}/{name}")
