"""Whether the engine gets on, or hangs: in a driver that never answers, for one. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HUNG_S = 600.0
"""A call of the engine, a step and what belongs to it, that takes longer may hang."""

FIRST_HUNG_S = 1_800.0
"""Likewise of the first one, in which kernels are compiled."""

HUNG_FACTOR = 20.0
"""How many times longer than the longest so far a call takes that hangs."""

MAX_LOOK_GAP_S = 60.0
"""After a longer gap between two looks the time counts anew: the process was frozen, or its disk was."""


def hung_line(seconds: float, so: str = "others may take over what this worker holds") -> str:
    """What a user is told of an engine that hangs, and what comes of it."""
    return f"no step has ended for {seconds / 60:.0f} min: {so}"


class Pulse:
    """Judges the calls of the engine by their time. To read, to claim and to wait for a disk or a storage are
    no such calls: they may take as long as they like.

    `at_work` belongs to the engine's thread, `gets_on` to one other.

    Args:
        on_hung: Called once with the seconds of a call that hangs, by the other thread.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, on_hung: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_hung, self._clock = on_hung, clock
        self._num_calls = 0
        self._is_at_work = False
        self._seen_call = 0  # what follows is of that one
        self._seconds = self._looked_at = self._longest_s = 0.0
        self._is_told = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, the engine is called."""
        self._num_calls += 1
        self._is_at_work = True
        try:
            yield
        finally:
            self._is_at_work = False

    def gets_on(self) -> bool:
        """Looks once more, to be called every few seconds; False while the engine hangs."""
        call, now = self._num_calls, self._clock()
        gap, self._looked_at = now - self._looked_at, now
        if call != self._seen_call:
            self._longest_s = max(self._longest_s, self._seconds)
            self._seen_call, self._seconds, self._is_told = call, 0.0, False
        elif self._is_at_work:
            self._seconds = self._seconds + gap if gap <= MAX_LOOK_GAP_S else 0.0
        if not self._is_at_work or self._seconds <= self._limit_s:
            return True
        if not self._is_told:
            self._is_told = True
            self._on_hung(self._seconds)
        return False

    @property
    def _limit_s(self) -> float:
        least = FIRST_HUNG_S if self._seen_call == 1 else HUNG_S
        return max(least, HUNG_FACTOR * self._longest_s)
