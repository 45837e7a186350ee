"""Several workers on one machine, one a device, that draw shards from one queue.

A worker is a process of its own, so one that dies takes nothing along: its unfinished shards are taken over,
and it is started again, unless it keeps dying without finishing an image.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

from offline_diffusion.config import JobConfig
from offline_diffusion.errors import BackendError, JobError, JobInterrupted
from offline_diffusion.launch.worker import Event, spawn_options
from offline_diffusion.progress import Observer, Progress, Say, StopFlag
from offline_diffusion.summary import JobSummary, summary_of_workers

MAX_RESTARTS = 3
"""Deaths of a worker in a row without a finished image after which it is not started again."""

POLL_S = 0.25

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
    started = time.monotonic()
    names = device_names(config.devices)
    own = [
        part.model_copy(update={"device": name, "devices": None})
        for name, part in zip(names, parts_of(config, len(names)), strict=True)
    ]
    index = prepare_job(own[0], observer=observer, stop=stop, say=say)
    parts = Supervisor(own, observer=observer, say=say, stop=stop).run()
    return summary_of_workers(config.out, index.num_images, parts, time.monotonic() - started)


def worker_command() -> Sequence[str]:
    """Starts a worker with this very interpreter."""
    return [sys.executable, "-m", "offline_diffusion.launch.worker"]


@dataclass(eq=False)
class Worker:
    """A device's worker over its lives.

    ``summaries`` are those of lives that ended in good order, ``error`` is of one that could not go on.
    """

    number: int
    config: JobConfig
    events: queue.Queue[tuple[Worker, int, Event | None]]
    process: subprocess.Popen[str] | None = None
    progress: Progress = field(default_factory=lambda: Progress(phase="loading"))
    summary: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    num_deaths: int = 0
    life: int = 0

    @property
    def name(self) -> str:
        return f"worker {self.number} on {self.config.device}"

    def start(self, command: Command, seconds_left: float | None) -> None:
        """Starts a life of it, which must end in time where there is a limit."""
        self.life += 1
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

    def _read(self, stream: IO[str], life: int) -> None:
        with stream:
            for line in stream:
                with contextlib.suppress(ValueError):  # a half line of one that died
                    self.events.put((self, life, json.loads(line)))
        self.events.put((self, life, None))

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
        command: Starts a worker; replaced in tests.
    """

    def __init__(
        self,
        configs: Sequence[JobConfig],
        *,
        observer: Observer,
        say: Say,
        stop: StopFlag,
        command: Command = worker_command,
    ) -> None:
        self._observer, self._say, self._stop, self._command = observer, say, stop, command
        self._events: queue.Queue[tuple[Worker, int, Event | None]] = queue.Queue()
        self.workers = [Worker(number, config, self._events) for number, config in enumerate(configs)]
        self._alive: set[Worker] = set()
        self._num_stops_told = 0
        limit = configs[0].time_limit
        self._deadline = None if limit is None else time.monotonic() + limit

    def run(self) -> list[dict[str, Any]]:
        """Runs all workers to their ends.

        Returns:
            The summaries of those that ended in good order.

        Raises:
            JobError: Workers could not go on, and none is left that could.
            JobInterrupted: Asked to stop before any of them had begun.
        """
        try:
            for worker in self.workers:
                self._start(worker)
            while self._alive:
                self._pass_stops_on()
                try:
                    worker, life, event = self._events.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                if life == worker.life:
                    self._take(worker, event)
        finally:
            self._kill_all()
        return self._outcome()

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

    def _take(self, worker: Worker, event: Event | None) -> None:
        if event is None:
            self._on_end(worker)
        elif (line := event.get("say")) is not None:
            self._say(line if len(self.workers) == 1 else f"{worker.name}: {line}")
        elif (values := event.get("progress")) is not None:
            worker.progress = Progress(**values)
            self._observer(joined([each.progress for each in self.workers]))
        elif (summary := event.get("summary")) is not None:
            worker.summary = summary
        elif (error := event.get("error")) is not None:
            worker.error = error

    def _on_end(self, worker: Worker) -> None:
        self._alive.discard(worker)
        how = worker.end_of()
        if worker.summary is not None:
            return
        if worker.error is not None:
            if worker.error["exit_code"] != JobInterrupted.exit_code:
                self._say(f"{worker.name} cannot go on: {worker.error['message']}")
            return
        has_drawn = worker.progress.num_done > worker.progress.num_resumed
        worker.num_deaths = 1 if has_drawn else worker.num_deaths + 1
        if self._stop.requests:
            self._say(f"{worker.name} died of {how}")
        elif worker.num_deaths > MAX_RESTARTS:
            self._say(f"{worker.name} died of {how}, {worker.num_deaths} times without an image: given up")
        else:
            self._say(f"{worker.name} died of {how}: started again")
            worker.progress = Progress(phase="loading")
            self._start(worker)

    def _kill_all(self) -> None:
        for worker in self._alive:
            if worker.process is not None:
                worker.process.kill()
                worker.process.wait()

    def _outcome(self) -> list[dict[str, Any]]:
        summaries = [worker.summary for worker in self.workers if worker.summary is not None]
        if summaries:
            return summaries
        errors = [worker.error for worker in self.workers if worker.error is not None]
        if not errors:
            raise JobError(
                "every worker died again and again without finishing an image",
                hint="what they printed is above; what is finished is kept, the same command goes on",
            )
        kind = JobInterrupted if errors[0]["exit_code"] == JobInterrupted.exit_code else JobError
        raise kind(errors[0]["message"], hint=errors[0]["hint"])


def joined(parts: Sequence[Progress]) -> Progress:
    """The progress of several workers as one: that of the busiest phase, counts added up."""
    order = ("scanning", "loading", "finishing", "running")
    phase = max((part.phase for part in parts), key=order.index)
    rates = sum(part.images_per_s for part in parts)
    left = sum(part.work_total - part.work_done for part in parts)
    speed = sum((p.work_total - p.work_done) / p.eta_s for p in parts if p.eta_s)
    first = replace(parts[0], phase=phase)
    return replace(
        first,
        num_images=sum(part.num_images for part in parts),
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
