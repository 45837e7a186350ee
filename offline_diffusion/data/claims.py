"""Who makes which shard: one owner at a time, told by file names alone.

``_state/claims/<stem>.<generation>.json`` is created exclusively and never changed; the highest
generation owns. A shard is taken over by creating the next one, and only from an owner that has let go or
is dead. No locks, and no comparison of two machines' clocks, so that it holds on NFS and Lustre.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from offline_diffusion.data import heartbeat
from offline_diffusion.data.files import to_json
from offline_diffusion.data.heartbeat import Heartbeat, Seen, SignWatch, read_heartbeat
from offline_diffusion.data.layout import STATE, Shard, stem_of
from offline_diffusion.data.process import ProcessId, is_known_dead, this_process
from offline_diffusion.data.state_files import FolderFiles, StateFiles
from offline_diffusion.errors import JobError, OffdiffError

CLAIMS = f"{STATE}/claims"

MAX_LOOK_GAP_S = 5.0
"""Most seconds from one look to the next. After a longer gap nothing is known of an owner: an observer that
was frozen itself, with the whole machine perhaps, has seen neither silence nor life."""

LOOK_INTERVAL_S = 2.0
"""Between two looks of the thread that watches while this worker is at a step."""

ALIVE_S = 5 * heartbeat.INTERVAL_S
"""An owner is known to be alive for so long after its sign was seen to change."""

Verdict = Literal["dead", "alive", "unsure"]

_NAME = re.compile(r"shard-(\d{5,})\.(\d{6,})\.(json|released)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """That a shard is a worker's.

    Args:
        shard: Its index.
        generation: Counts the owners of the shard from 0; names what this owner writes.
        worker, task, process: The owner.
        job_id: Of the job it works for: the folder may have been given to another manifest since.
        created_at: Seconds since the epoch, for people.
    """

    shard: int
    generation: int
    worker: str
    task: int
    process: ProcessId
    job_id: str
    created_at: float


@dataclass(frozen=True, slots=True)
class Newest:
    """The highest generation of a shard's claims, and whether its owner has let go."""

    generation: int
    released: bool


class Claims:
    """The claims of an output folder, as one worker sees and makes them.

    Args:
        out: The output folder.
        worker, task: Who claims.
        job_id: The job it works for.
        files: Where claims lie; None takes the output folder.
    """

    def __init__(
        self, out: Path, *, worker: str, task: int, job_id: str, files: StateFiles | None = None
    ) -> None:
        self.worker, self.task, self.job_id = worker, task, job_id
        self._files = files or FolderFiles(out)
        self._known: dict[str, Claim] = {}  # by name; claims never change while they are there
        self._process = this_process()

    def newest(self) -> dict[int, Newest]:
        """The owner of every shard that has one, by shard: one directory listing."""
        names = set(self._files.names(CLAIMS))
        self._known = {name: claim for name, claim in self._known.items() if name in names}
        return _newest(names)

    def read(self, shard: Shard, generation: int) -> Claim:
        """A claim; where it is damaged or gone, one of a worker that never gives a sign."""
        path = self._path(shard, generation)
        name = Path(path).name
        if name in self._known:
            return self._known[name]
        try:
            values = self._files.read(path)
            self._known[name] = Claim(process=ProcessId(**values.pop("process")), **values)
            return self._known[name]
        except (OSError, KeyError, TypeError, JobError):
            return Claim(
                shard=shard.index,
                generation=generation,
                worker=Path(path).stem,
                task=0,
                process=ProcessId(),
                job_id=self.job_id,
                created_at=0.0,
            )

    def create(self, shard: Shard, generation: int) -> bool:
        """Claims a shard; of several workers that try the same generation one wins.

        What counts is the name: a claim that could be made but not synced is held all the same. A power loss
        that costs it costs its owner too.

        Returns:
            Whether this one did.

        Raises:
            JobError: The folder cannot be written.
        """
        claim = Claim(
            shard=shard.index,
            generation=generation,
            worker=self.worker,
            task=self.task,
            process=self._process,
            job_id=self.job_id,
            created_at=time.time(),
        )
        return self._files.create(self._path(shard, generation), to_json(asdict(claim)))

    def release(self, shard: Shard, generation: int) -> None:
        """Lets go of a claim that is ours; where that cannot be written, our last heartbeat says it."""
        with contextlib.suppress(OSError, OffdiffError):
            self._files.create(self._path(shard, generation, "released"), b"")

    def remove(self, claimed: Iterable[tuple[Shard, int]]) -> None:
        """Takes the claims of published shards away, and torn ones: one directory listing.

        Args:
            claimed: Those shards, each with a generation; a later owner's claim stays.
        """
        generations = {shard.stem: generation for shard, generation in claimed}
        for name in self._files.names(CLAIMS) if generations else ():
            match, generation = _NAME.fullmatch(name), generations.get(stem_of(name), -1)
            if generation >= 0 and (match is None or int(match[2]) <= generation):
                self._files.remove(f"{CLAIMS}/{name}")

    def _path(self, shard: Shard, generation: int, suffix: str = "json") -> str:
        return f"{CLAIMS}/{shard.stem}.{generation:06d}.{suffix}"


def _newest(names: Iterable[str]) -> dict[int, Newest]:
    """The highest generation of each shard claimed, by shard, from the names of all claims."""
    found: dict[int, Newest] = {}
    for match in filter(None, map(_NAME.fullmatch, names)):
        shard, generation, released = int(match[1]), int(match[2]), match[3] == "released"
        known = found.get(shard)
        if known is None or generation > known.generation:
            found[shard] = Newest(generation, released)
        elif released and generation == known.generation:
            found[shard] = Newest(generation, True)
    return found


@dataclass
class OwnerWatch:
    """Tells dead owners from live ones by watching their heartbeats change. Any thread may ask.

    Args:
        out: The output folder.
        job_id: Owners that work for another job have nothing to do here any more.
        stale_s: Seconds of silence, while it was watched, after which an owner is taken for dead.
        clock: A monotonic clock in seconds; no other clock is asked.
        files: Where signs of life lie; None takes the output folder.
        max_gap_s: Most seconds from one look to the next, see `MAX_LOOK_GAP_S`.
        fresh_s: A look is not repeated within so many seconds.
    """

    out: Path
    job_id: str
    stale_s: float = field(default_factory=lambda: heartbeat.STALE_S)
    clock: Callable[[], float] = time.monotonic
    files: StateFiles | None = None
    max_gap_s: float = field(default_factory=lambda: MAX_LOOK_GAP_S)
    fresh_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _beats: dict[str, Heartbeat | None] = field(default_factory=dict)
    _tasks: dict[str, int] = field(default_factory=dict)  # of the workers that are watched

    def __post_init__(self) -> None:
        self._signs = SignWatch(self.clock, self.max_gap_s)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, a thread looks at those of whom nothing was known when they were asked about last, however
        long ago: a step may take minutes, and so may the loading of a model."""
        ended = threading.Event()

        def keep_looking() -> None:
            while not ended.wait(LOOK_INTERVAL_S):
                for worker, task in list(self._tasks.items()):
                    self._look(worker, task)

        thread = threading.Thread(target=keep_looking, name="offdiff-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def judge(self, claim: Claim) -> Verdict:
        """Looks at an owner once more; ``unsure`` until it was seen to change or was silent for long."""
        if claim.job_id != self.job_id or is_known_dead(claim.process):
            return "dead"
        self._tasks[claim.worker] = claim.task
        beat, seen = self._look(claim.worker, claim.task)
        if _has_ended(beat):
            del self._tasks[claim.worker]
            return "dead"
        if seen.silent_s >= self.stale_s:
            return "dead"
        if not seen.has_changed or seen.silent_s > ALIVE_S:
            return "unsure"
        del self._tasks[claim.worker]  # whoever has many neighbours would read their files for nothing
        return "alive"

    def is_gone(self, claim: Claim) -> bool:
        """Whether an owner has ended for certain: silence alone does not say so."""
        return is_known_dead(claim.process) or self.has_ended(claim)

    def has_ended(self, claim: Claim) -> bool:
        """Whether an owner says itself that it came to an end: no death, whatever it has left."""
        return _has_ended(self._read(claim.worker, claim.task))

    def _look(self, worker: str, task: int) -> tuple[Heartbeat | None, Seen]:
        with self._lock:  # also while it is read: signs must come in their order
            seen = self._signs.seen.get(worker)
            if seen is not None and self.clock() - seen.looked_at < self.fresh_s:
                return self._beats[worker], replace(seen)
            beat = self._beats[worker] = self._read(worker, task)
            return beat, self._signs.note(worker, None if beat is None else beat.count)

    def _read(self, worker: str, task: int) -> Heartbeat | None:
        return read_heartbeat(self.files or FolderFiles(self.out), task, worker)


def _has_ended(beat: Heartbeat | None) -> bool:
    return beat is not None and beat.state != "running"
