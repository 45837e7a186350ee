"""A worker of `ray`, which runs as a task of the cluster, and the board on which workers and driver meet."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from offline_diffusion.config import make_job_config
from offline_diffusion.errors import BackendError, OffdiffError
from offline_diffusion.launch.outcome import error_of
from offline_diffusion.progress import Progress, StopFlag
from offline_diffusion.pulse import hung_line
from offline_diffusion.time_limit import REASON

if TYPE_CHECKING:
    from types import ModuleType

POLL_S = 1.0

Life = tuple[int, int]
"""A worker's number and which of its lives, from 1."""

PREPARATION: Life = (0, 0)
"""What comes before the first worker."""

Place = tuple[str, int]
"""Host and pid of a life."""


class Board:
    """What workers tell and are told; an actor."""

    def __init__(self) -> None:
        self._places: dict[Life, Place] = {}
        self._progress: dict[Life, dict[str, Any]] = {}
        self._lines: list[str] = []
        self._stops: list[str] = []
        self._seconds_left: float | None = None

    def begin(self, life: Life, place: Place) -> tuple[list[str], float | None]:
        """A worker is about to begin; returns the requests to stop so far, and the seconds left."""
        self._places[life] = place
        return self._stops, self._seconds_left

    def report(self, life: Life, progress: dict[str, Any] | None, lines: Sequence[str]) -> list[str]:
        """A worker's news; returns the requests to stop so far."""
        if progress is not None:
            self._progress[life] = progress
        who = "" if life == PREPARATION else f"worker {life[0]}: "
        self._lines += (f"{who}{line}" for line in lines)
        return self._stops

    def read(
        self, stops: Sequence[str], seconds_left: float | None
    ) -> tuple[dict[Life, Place], dict[Life, dict[str, Any]], list[str]]:
        """For the driver: where lives have begun, their progress, and the lines since last time."""
        self._stops, self._seconds_left = list(stops), seconds_left
        lines, self._lines = self._lines, []
        return self._places, self._progress, lines


def load_ray() -> ModuleType:
    """The library.

    Raises:
        BackendError: It is not installed.
    """
    try:
        import ray
    except ImportError:
        raise BackendError(
            "--launcher ray needs the package ray, which is not installed",
            hint="pip install 'offline-diffusion[ray]'",
        ) from None
    module: ModuleType = ray
    return module


def prepare(options: dict[str, Any], board: Any) -> dict[str, Any]:
    """The first task: what comes before the first image, on a machine of the kind that draws.

    The driver's own may have no GPU, and what ``auto`` comes to there is another job.
    """
    from offline_diffusion.job import prepare_job

    stop = StopFlag()
    with _reporting(PREPARATION, board, stop) as reporter:
        try:
            config = make_job_config(options)
            index = prepare_job(config, observer=reporter.observe, stop=stop, say=reporter.lines.append)
        except OffdiffError as error:
            return {"error": error_of(error)}
    return {"num_rows": index.num_rows, "num_images": index.num_images}


def work(options: dict[str, Any], life: Life, board: Any) -> dict[str, Any]:
    """The task: what is left of the job, as far as nobody else works on it; empty when it came too late."""
    from offline_diffusion.job import run_task

    stop = StopFlag()
    with _reporting(life, board, stop) as reporter:
        if stop.requests:
            return {}
        if reporter.seconds_left is not None:
            options = options | {"time_limit": max(1.0, reporter.seconds_left)}
        try:
            config = make_job_config(options)
            summary = run_task(
                config,
                observer=reporter.observe,
                stop=stop,
                say=reporter.lines.append,
                own_process=True,
                is_part=True,
                on_hung=reporter.end_process,
            )
        except OffdiffError as error:
            return {"error": error_of(error)}
    return {"summary": dataclasses.asdict(summary)}


class _Reporter:
    """What a worker has to say to the board since last time."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.seconds_left: float | None = None
        self._progress: Progress | None = None

    def observe(self, progress: Progress) -> None:
        self._progress = progress

    def end_process(self, seconds: float) -> None:
        """Of an engine that hangs: the driver finds the task lost, and submits it again."""
        self.lines.append(hung_line(seconds, "it is killed"))
        time.sleep(3 * POLL_S)  # for the board to hear of it
        os.kill(os.getpid(), signal.SIGKILL)

    def news(self) -> tuple[dict[str, Any] | None, list[str]]:
        lines, self.lines[:] = list(self.lines), []
        return None if self._progress is None else dataclasses.asdict(self._progress), lines


@contextmanager
def _reporting(life: Life, board: Any, stop: StopFlag) -> Iterator[_Reporter]:
    """Inside, tells the board every second and hears of stops there; of those so far before it begins.

    All of it in a thread: Ray lends the CPU of a task that waits in its main thread to another task.
    """
    ray = load_ray()
    reporter, begun, ended = _Reporter(), threading.Event(), threading.Event()

    def hear(stops: Sequence[str]) -> None:
        for why in stops[stop.requests :]:
            stop.request(why)

    def begin() -> None:
        with suppress(ray.exceptions.RayError):  # the board is being started again
            stops, left = ray.get(board.begin.remote(life, (socket.gethostname(), os.getpid())))
            hear(stops)
            reporter.seconds_left = left
            if left is not None and left <= 0 and not stop.requests:
                stop.request(REASON)

    def report() -> None:
        with suppress(ray.exceptions.RayError):
            hear(ray.get(board.report.remote(life, *reporter.news())))

    def talk() -> None:
        try:
            begin()
        finally:
            begun.set()
        while not ended.wait(POLL_S):
            report()
        report()

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    begun.wait()
    try:
        yield reporter
    finally:
        ended.set()
        thread.join()
