"""Signals ask a running job to stop in good order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from offline_diffusion.progress import StopFlag

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Sites differ in which one comes first, so all mean the same."""

STOP_KEY = "offline_diffusion.stop"
"""Where a command that can be stopped finds its ``StopFlag`` in click's ``meta``."""

_PATIENCE = 2
"""Interrupts after which the next one ends a job that hangs."""


@contextmanager
def stop_on_signals(stop: StopFlag) -> Iterator[None]:
    """Inside, every stop signal is a request to ``stop`` and SIGCONT is ignored.

    The first request saves unfinished images at their step, the second stops without. A third SIGINT
    raises KeyboardInterrupt, for the person in front of a job that hangs.
    """
    num_interrupts = 0

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal num_interrupts
        num_interrupts += number == signal.SIGINT
        if num_interrupts > _PATIENCE:
            raise KeyboardInterrupt
        stop.request(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    before[signal.SIGCONT] = signal.signal(signal.SIGCONT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
