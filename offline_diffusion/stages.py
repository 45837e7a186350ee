"""The stages of a job, timed when a profile is asked for. Free of torch.

Whoever does a stage's work has ``stages`` and enters it by name; without a profile that is `NO_STAGES`,
which does nothing.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar

StageName = Literal[
    "other",
    "scan",
    "load",
    "read",
    "prompt_encode",
    "pack",
    "denoise",
    "solver",
    "decode",
    "copy",
    "engine",
    "wait_device",
    "wait_sink",
    "profiler",
    "image_encode",
    "write",
    "publish",
]
"""``other`` is the rest of the job, ``engine`` the rest of drawing; the last three are done by threads."""

P = ParamSpec("P")
R = TypeVar("R")


class Stages(Protocol):
    """Hears of every stage that begins and ends, in any thread."""

    def stage(self, name: StageName, /) -> AbstractContextManager[None]:
        """To be held while a stage's work is done; stages nest."""
        ...


class NoStages:
    """`Stages` without a profile."""

    _nothing = nullcontext()

    def stage(self, _: StageName, /) -> AbstractContextManager[None]:
        return self._nothing


NO_STAGES = NoStages()


class HasStages(Protocol):
    """Whose methods can be stages."""

    stages: Stages


S = TypeVar("S", bound=HasStages)


def in_stage(name: StageName) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Makes a method a stage of its object's ``stages``."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self.stages.stage(name):
                return method(self, *args, **kwargs)

        functools.update_wrapper(run, method)
        return run

    return decorate


@dataclass(slots=True)
class StageTime:
    """How often a stage was entered, and its seconds, those of stages inside it left out."""

    count: int = 0
    seconds: float = 0.0


class StageClock:
    """Adds up the time of each stage on the host.

    Of one thread the stages add up to the time that the outermost was held.

    Args:
        clock: Seconds; replaced in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.times: dict[StageName, StageTime] = {}
        self._clock = clock
        self._lock = threading.Lock()  # guards times
        self._thread = threading.local()

    @contextmanager
    def stage(self, name: StageName, /) -> Iterator[None]:
        """Times a stage; see `Stages`."""
        nested = self._nested()
        nested.append(0.0)
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            self._book(name, seconds - nested.pop())
            if nested:
                nested[-1] += seconds
            self._on_end(name, start, seconds)

    def _nested(self) -> list[float]:
        """For each open stage of this thread the seconds of stages inside it."""
        if not hasattr(self._thread, "nested"):
            self._thread.nested = []
        nested: list[float] = self._thread.nested
        return nested

    def _on_end(self, name: StageName, start: float, seconds: float) -> None:
        """Called after each stage, in its thread, with all of its seconds."""

    def _book(self, name: StageName, own: float) -> None:
        with self._lock:
            time = self.times.setdefault(name, StageTime())
            time.count += 1
            time.seconds += own
