"""One worker process of `local`: a device's share of a job, told what to do through its standard input.

The first line there is the job's options as JSON. Each further line, and the end of input, is a request to
stop: signals are the parent's business, and a parent that is gone has closed the pipe. Standard output
carries one JSON object a line, see `Event`; whatever a library prints goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Any, TypedDict

from offline_diffusion.config import make_job_config
from offline_diffusion.errors import OffdiffError
from offline_diffusion.launch.outcome import WorkerError, error_of
from offline_diffusion.progress import Progress, StopFlag

if TYPE_CHECKING:
    from offline_diffusion.job import JobSummary

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""They reach the whole process group; the parent passes its own on, once."""

PROGRESS_INTERVAL_S = 0.5


class Event(TypedDict, total=False):
    """What a worker says; each event has one of these keys."""

    progress: dict[str, Any]
    say: str
    summary: dict[str, Any]
    error: WorkerError
    hung_s: float


class Speaker:
    """Writes events; any thread may."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._next_progress, self._phase = 0.0, ""

    def send(self, event: Event) -> None:
        line = json.dumps(event, default=str)
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()

    def say(self, line: str) -> None:
        self.send({"say": line})

    def progress(self, progress: Progress) -> None:
        """Not more often than anyone reads it."""
        now = time.monotonic()
        if now >= self._next_progress or progress.phase != self._phase:
            self._next_progress, self._phase = now + PROGRESS_INTERVAL_S, progress.phase
            self.send({"progress": dataclasses.asdict(progress)})


def main() -> None:
    """Runs a worker; what it has to tell goes to standard output."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    speaker = Speaker(_private_stdout())
    options = json.loads(sys.stdin.readline())
    stop = StopFlag()
    threading.Thread(target=_listen, args=(sys.stdin, stop), daemon=True).start()
    try:
        summary = _run(options, speaker, stop)
    except OffdiffError as error:
        speaker.send({"error": error_of(error)})
    else:
        speaker.send({"summary": dataclasses.asdict(summary)})


def _run(options: dict[str, Any], speaker: Speaker, stop: StopFlag) -> JobSummary:
    from offline_diffusion.job import run_task

    config = make_job_config(options)
    return run_task(
        config,
        observer=speaker.progress,
        stop=stop,
        say=speaker.say,
        own_process=True,
        is_part=True,
        on_hung=lambda seconds: speaker.send({"hung_s": seconds}),
    )


def _private_stdout() -> IO[str]:
    """Standard output for us alone; prints of anybody else go to standard error from now on."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours


def _listen(stream: IO[str], stop: StopFlag) -> None:
    for line in stream:
        stop.request(line.strip() or "stop")
    if not stop.requests:
        stop.request("the parent process is gone")


def spawn_options(config: Any) -> str:
    """The first line for a worker."""
    return json.dumps(config.model_dump(mode="json", exclude_none=True))


if __name__ == "__main__":
    main()
