"""Several workers on one machine, one a device, that draw shards from one queue.

A worker is a process of its own, so one that dies takes nothing along: its unfinished shards are taken over,
and it is started again, unless it keeps dying; so is one whose engine hangs.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

from offline_diffusion.config import JobConfig
from offline_diffusion.data.process import is_stopped
from offline_diffusion.errors import BackendError, JobInterrupted
from offline_diffusion.launch.memory_kills import CAUSE, MemoryKills
from offline_diffusion.launch.outcome import (
    IsFinished,
    LastWords,
    Record,
    WorkerError,
    folder_is_finished,
    forgive,
    helper_of,
    last_words,
    refuse_standard_input,
    summaries_of,
    too_many_failures,
)
from offline_diffusion.launch.worker import Event, spawn_options
from offline_diffusion.preparation import ledger_of
from offline_diffusion.progress import Observer, Progress, Say, StopFlag
from offline_diffusion.summary import JobSummary, summary_of_workers
from offline_diffusion.time_limit import REASON, TimeLimit

POLL_S = 0.25

PATIENCE_S = 30.0
"""How long a worker that is of no use any more may take to end before it is killed: it may be frozen."""

MAX_LOOK_GAP_S = 10.0
"""After a longer gap between two looks nothing counts: this process was stopped itself, and so were they."""

SILENCE_S = 5.0
"""Without a word for so long, a worker may be frozen."""

Command = Callable[[], Sequence[str]]


def device_names(devices: str) -> list[str]:
    """The devices that ``--devices`` names, one a worker.

    Raises:
        BackendError: ``all``, where there is none.
    """
    if devices != "all":
        return [f"cuda:{name}" if name.isdecimal() else name for name in devices.split(",")]
    from offline_diffusion.models.loader import cuda_devices

    if found := cuda_devices():
        return found
    raise BackendError("--devices all: there is no CUDA device", hint="--devices cpu,cpu starts two workers")


def parts_of(config: JobConfig, count: int) -> list[JobConfig]:
    """A task as ``count`` smaller ones, so that workers begin with shards of their own."""
    first, total = config.task_index * count, config.num_tasks * count
    return [
        config.model_copy(update={"num_tasks": total, "task_index": first + number})
        for number in range(count)
    ]


def run_on_devices(config: JobConfig, *, observer: Observer, say: Say, stop: StopFlag) -> JobSummary:
    """Runs a job with one worker on each of ``config.devices``; arguments and errors as of `job.run_task`."""
    from offline_diffusion.job import prepare_job

    assert config.devices is not None
    refuse_standard_input(config, "--devices")
    started, limit = time.monotonic(), TimeLimit(config.time_limit)
    names = device_names(config.devices)
    own = [
        part.model_copy(update={"device": name, "devices": None})
        for name, part in zip(names, parts_of(config, len(names)), strict=True)
    ]
    with limit.stopping(stop):
        index = prepare_job(own[0], observer=observer, stop=stop, say=say)
    supervisor = Supervisor(
        own,
        observer=observer,
        say=say,
        stop=stop,
        started=started,
        is_finished=lambda: folder_is_finished(config),
    )
    parts, seconds = supervisor.run(), time.monotonic() - started
    ledger = ledger_of(config)
    ledger.pull(signs=False)
    return summary_of_workers(ledger, index.num_images, parts, seconds, stopped=bool(stop.requests))


def worker_command() -> Sequence[str]:
    """Starts a worker with this very interpreter."""
    return [sys.executable, "-m", "offline_diffusion.launch.worker"]


@dataclass(eq=False, kw_only=True)
class Worker(Record):
    """A device's worker over its lives.

    ``heard_at`` is when it last said something, in monotonic seconds; ``hung_s`` how long its engine hangs.
    """

    config: JobConfig
    events: queue.Queue[tuple[Worker, int, Event | None]]
    process: subprocess.Popen[str] | None = None
    progress: Progress = field(default_factory=lambda: Progress(phase="loading"))
    life: int = 0
    heard_at: float = 0.0
    was_killed: bool = False
    hung_s: float | None = None
    has_ended_well: bool = False

    def start(self, command: Command, seconds_left: float | None) -> None:
        """Starts a life of it, which must end in time where there is a limit."""
        self.life += 1
        self.has_ended_well = self.was_killed = False
        self.hung_s = None
        self.heard_at = time.monotonic()
        self.process = subprocess.Popen(
            command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        assert self.process.stdout is not None
        threading.Thread(target=self._read, args=(self.process.stdout, self.life), daemon=True).start()
        self.tell(spawn_options(self.config.model_copy(update={"time_limit": seconds_left})))

    def tell(self, line: str) -> None:
        """Writes a line to its standard input; a worker that is gone hears nothing."""
        if self.process is None or self.process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.replace("\n", " ") + "\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """Ends a life of it that is of no use any more."""
        self.was_killed = True
        if self.process is not None:
            self.process.kill()

    def _read(self, stream: IO[str], life: int) -> None:
        with stream:
            for line in stream:
                with contextlib.suppress(ValueError):  # a half line of one that died
                    self.events.put((self, life, json.loads(line)))
        self.events.put((self, life, None))

    def last_words(self, cause: str) -> LastWords:
        """What its last life left, once it has died; ``cause`` as of `outcome.last_words`."""
        assert self.process is not None
        words = last_words(self.config.folder, socket.gethostname(), self.process.pid, cause)
        return words._replace(has_drawn=words.has_drawn or self.progress.has_drawn)

    def end_of(self) -> str:
        """How the last life ended, once it did."""
        assert self.process is not None
        code = self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # what it did not live to hear
                self.process.stdin.close()
        if code >= 0:
            return f"exit code {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"


class Supervisor:
    """Runs workers until none is left.

    Args:
        configs: One a worker; they differ in their device.
        observer, say, stop: As of `job.run_task`, for all workers together.
        started: When the job began, on the monotonic clock; its time limit counts from there.
        is_finished: Whether every shard is published.
        command: Starts a worker; replaced in tests.
        memory_kills: Tells a want of memory from other reasons for a SIGKILL.
    """

    def __init__(
        self,
        configs: Sequence[JobConfig],
        *,
        observer: Observer,
        say: Say,
        stop: StopFlag,
        started: float,
        is_finished: IsFinished,
        command: Command = worker_command,
        memory_kills: MemoryKills | None = None,
    ) -> None:
        self._observer, self._say, self._stop, self._command = observer, say, stop, command
        self._is_finished, self._memory_kills = is_finished, memory_kills or MemoryKills()
        self._events: queue.Queue[tuple[Worker, int, Event | None]] = queue.Queue()
        self.workers = [
            Worker(name=f"worker {number} on {config.device}", config=config, events=self._events)
            for number, config in enumerate(configs)
        ]
        self._alive: set[Worker] = set()
        self._num_stops_told = 0
        self._looked_at = 0.0
        self._useless_since: float | None = None
        limit = configs[0].time_limit
        self._deadline = None if limit is None else started + limit

    @property
    def why_stopped(self) -> str | None:
        """Why no worker may begin any more; None while they may."""
        if self._stop.requests:
            return self._stop.why
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        return REASON if is_late else None

    def run(self) -> list[dict[str, Any]]:
        """Runs all workers to their ends, and one of them again for what others that kept dying left.

        Returns:
            The summaries of those that ended in good order.

        Raises:
            JobError, JobInterrupted: See `summaries_of`.
        """
        try:
            self._run(self.workers)
            helper = None if self.why_stopped else helper_of(self.workers)
            if helper is not None and not self._is_finished():
                self._say(f"{helper.name} is started again for what others left")
                self._run([helper])
                if helper.has_done_all:
                    forgive(self.workers)
        finally:
            self._kill_all()
        why = self.why_stopped
        has_error = any(worker.error is not None for worker in self.workers)
        is_finished = (has_error or why is not None) and self._is_finished()
        return summaries_of(self.workers, is_finished=is_finished, why_stopped=why)

    def _run(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self._start(worker)
        while self._alive:
            self._pass_stops_on()
            self._end_the_useless(time.monotonic())
            try:
                worker, life, event = self._events.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if life == worker.life:
                self._take(worker, event)

    def _start(self, worker: Worker) -> None:
        left = None if self._deadline is None else max(1.0, self._deadline - time.monotonic())
        worker.start(self._command, left)
        self._alive.add(worker)
        for _ in range(self._num_stops_told):
            worker.tell(self._stop.why)

    def _pass_stops_on(self) -> None:
        while self._num_stops_told < self._stop.requests:
            self._num_stops_told += 1
            for worker in self._alive:
                worker.tell(self._stop.why)

    def _end_the_useless(self, now: float) -> None:
        """Kills, after a while, who does not end though it can do nothing of use any more."""
        gap = now - self._looked_at
        if gap < PATIENCE_S / 10:
            return
        self._looked_at = now
        if not self._all_are_useless(now):
            self._useless_since = None
            return
        if self._useless_since is None or gap > MAX_LOOK_GAP_S:
            self._useless_since = now
        if now - self._useless_since < PATIENCE_S:
            return
        for worker in self._alive:
            if not worker.was_killed:
                self._say(f"{worker.name} does not end: killed")
                worker.kill()

    def _all_are_useless(self, now: float) -> bool:
        """Asked twice to stop, or frozen, or silent when all is done, be it only their own part.

        While one of them is at work it takes over what a frozen one holds.
        """
        if self._stop.requests > 1:
            return True
        if all(worker.process is not None and is_stopped(worker.process.pid) for worker in self._alive):
            return True
        if not all(now - worker.heard_at > SILENCE_S for worker in self._alive):
            return False
        return all(worker.has_ended_well for worker in self._alive) or self._is_finished()

    def _take(self, worker: Worker, event: Event | None) -> None:
        worker.heard_at = time.monotonic()
        if event is None:
            self._on_end(worker)
        elif (line := event.get("say")) is not None:
            self._say(line if len(self.workers) == 1 else f"{worker.name}: {line}")
        elif (values := event.get("progress")) is not None:
            worker.progress = Progress(**values)
            self._observer(joined([each.progress for each in self.workers]))
        elif (summary := event.get("summary")) is not None:
            worker.summaries.append(summary)
            worker.has_ended_well = True
        elif (error := event.get("error")) is not None:
            worker.error = error
        elif (seconds := event.get("hung_s")) is not None:
            worker.hung_s = seconds
            worker.kill()

    def _on_end(self, worker: Worker) -> None:
        self._alive.discard(worker)
        how = worker.end_of()
        if worker.has_ended_well or (worker.was_killed and (self._stop.requests or self._is_finished())):
            return
        cause = ""
        if worker.hung_s is not None:
            how = f"a hang, {worker.hung_s / 60:.0f} min in a step"
        if how == "SIGKILL" and not worker.was_killed and self._memory_kills.explain_one():
            how, cause = "SIGKILL for want of memory", CAUSE
        if worker.error is not None:
            self._on_error(worker.name, worker.error)
        elif self.why_stopped is not None:
            self._say(f"{worker.name} died of {how}")
        elif worker.may_live_again(worker.last_words(cause)):
            self._say(f"{worker.name} died of {how}: started again")
            worker.progress = Progress(phase="loading")
            self._start(worker)
        else:
            self._say(worker.give_up(how))

    def _on_error(self, name: str, error: WorkerError) -> None:
        if error["exit_code"] != JobInterrupted.exit_code:
            self._say(f"{name} cannot go on: {error['message']}")
        if too_many_failures(self.workers) is not None and not self._stop.requests:
            self._stop.request("--max-failures")

    def _kill_all(self) -> None:
        for worker in self._alive:
            if worker.process is not None:
                worker.process.kill()
                worker.process.wait()


def joined(parts: Sequence[Progress]) -> Progress:
    """The progress of several workers as one: that of the busiest phase, counts added up.

    Who still loads does not know its share of the images; it counts as the others do on average.
    """
    order = ("scanning", "loading", "finishing", "running")
    phase = max((part.phase for part in parts), key=order.index)
    rates = sum(part.images_per_s for part in parts)
    left = sum(part.work_total - part.work_done for part in parts)
    speed = sum((p.work_total - p.work_done) / p.eta_s for p in parts if p.eta_s)
    shares = [part.num_images for part in parts if part.phase in ("running", "finishing")]
    first = replace(parts[0], phase=phase)
    return replace(
        first,
        num_images=round(sum(shares) * len(parts) / max(1, len(shares))),
        num_done=sum(part.num_done for part in parts),
        num_failed=sum(part.num_failed for part in parts),
        num_resumed=sum(part.num_resumed for part in parts),
        work_done=sum(part.work_done for part in parts),
        work_total=sum(part.work_total for part in parts),
        images_per_s=rates,
        eta_s=left / speed if speed else None,
        step_fill=sum(part.step_fill for part in parts) / len(parts),
        num_running=sum(part.num_running for part in parts),
        num_waiting=sum(part.num_waiting for part in parts),
    )
