"""A job that must end by a certain time: when it stops, what it does not begin any more. Free of torch."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offline_diffusion.progress import StopFlag
from offline_diffusion.request import RequestMetrics

MARGIN_S, MARGIN_SHARE = 60.0, 0.1
"""How long before its end a job stops, at most, and at most of its time: what saving, closing files and
starting libraries may take."""

NUM_KNOWN = 32
"""Finished images from which the time of a step is told."""

REASON = "time limit"


class TimeLimit:
    """Counts on the monotonic clock, so that the computer's time may be set meanwhile.

    Args:
        limit_s: Seconds from now until the process is ended; None is no limit.
        clock: Seconds; replaced in tests.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf
        if limit_s is not None:
            self._end = clock() + limit_s - min(MARGIN_S, MARGIN_SHARE * limit_s)
        self._step_s: deque[float] = deque(maxlen=NUM_KNOWN)

    @property
    def is_known(self) -> bool:
        """Whether there is one."""
        return self._end < math.inf

    @property
    def seconds_left(self) -> float:
        """Until the job stops."""
        return self._end - self._clock()

    @contextmanager
    def stopping(self, stop: StopFlag) -> Iterator[None]:
        """Inside, a request to ``stop`` comes in time, whatever the job is at, unless there was one."""
        if not self.is_known:
            yield
            return
        timer = threading.Timer(min(max(0.0, self.seconds_left), threading.TIMEOUT_MAX), self._ask, (stop,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _ask(self, stop: StopFlag) -> None:
        if not stop.requests:
            stop.request(REASON)

    def learn(self, metrics: RequestMetrics) -> None:
        """Of an image that was drawn."""
        if metrics.steps_run:
            self._step_s.append(metrics.denoise_s / metrics.steps_run)

    def is_too_late_for(self, num_steps: int) -> bool:
        """Whether so many steps take longer than is left, as far as finished images tell.

        Until one is finished it is never too late: images longer than any time limit come on by their step
        checkpoints.
        """
        if not self._step_s:
            return False
        return num_steps * sum(self._step_s) / len(self._step_s) > self.seconds_left
