"""How far a job is, on standard error: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

import click

from offline_diffusion.cli.text import duration
from offline_diffusion.progress import plural

if TYPE_CHECKING:
    import rich.progress

    from offline_diffusion.progress import Progress

PLAIN_INTERVAL_S = 5.0


class ProgressDisplay(Protocol):
    """Shows progress while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, progress: Progress) -> None:
        """Takes the newest state; cheap enough for every engine step."""

    def say(self, line: str) -> None:
        """Prints a line without disturbing the display."""


def describe(progress: Progress) -> str:
    """One line without the bar."""
    if progress.phase == "scanning":
        return f"scanning the manifest: {plural(progress.num_rows_scanned, 'row')}"
    if progress.phase == "loading":
        return "loading the model"
    parts = [
        f"{progress.num_done:,}/{plural(progress.num_images, 'image')}",
        f"{progress.images_per_s:.3g} images/s",
        f"ETA {duration(progress.eta_s)}",
        f"step fill {progress.step_fill:.0%}",
        f"{progress.num_failed:,} failed",
        f"{progress.num_running:,} running",
        f"{progress.num_waiting:,} waiting",
    ]
    if progress.num_resumed:
        parts.append(f"{progress.num_resumed:,} done before")
    return f"{progress.phase}: {', '.join(parts)}"


def describe_briefly(progress: Progress) -> str:
    """What stands beside the bar: 80 columns are enough for both."""
    if progress.phase in ("scanning", "loading"):
        return describe(progress)
    return (
        f"{progress.num_done:,}/{plural(progress.num_images, 'image')} {progress.images_per_s:.3g}/s "
        f"ETA {duration(progress.eta_s)} fill {progress.step_fill:.0%} {progress.num_failed:,} failed"
    )


class PlainProgress:
    """A line at every change of phase and every ``PLAIN_INTERVAL_S`` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase = ""
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, progress: Progress) -> None:
        now = self._clock()
        if progress.phase == self._phase and now < self._next:
            return
        self._phase, self._next = progress.phase, now + PLAIN_INTERVAL_S
        self.say(describe(progress))

    def say(self, line: str) -> None:
        click.echo(line, err=True)


class TerminalProgress:
    """A bar by work done, so that the estimate holds for rows of unlike size."""

    def __init__(self, stream: TextIO) -> None:
        import rich.console
        import rich.progress

        self._bar: rich.progress.Progress = rich.progress.Progress(
            rich.progress.SpinnerColumn(),
            rich.progress.BarColumn(bar_width=12),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.description}", markup=False),
            console=rich.console.Console(file=stream),
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        total = progress.work_total or None if progress.phase in ("running", "finishing") else None
        self._bar.update(
            self._task, description=describe_briefly(progress), total=total, completed=progress.work_done
        )

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def make_progress() -> ProgressDisplay:
    """The display that fits standard error."""
    if sys.stderr.isatty():
        return TerminalProgress(sys.stderr)
    return PlainProgress()


@contextmanager
def ticking(describe_now: Callable[[], str], interval_s: float = PLAIN_INTERVAL_S) -> Iterator[None]:
    """Inside, prints a line to standard error every few seconds, from a thread of its own."""
    done = threading.Event()

    def tick() -> None:
        while not done.wait(interval_s):
            click.echo(describe_now(), err=True)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
