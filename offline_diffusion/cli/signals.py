"""Signals ask a running job to stop in good order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Sites differ in which one comes first, so all mean the same."""


class StopTarget(Protocol):
    """What is told of a signal: ``job.StopFlag``."""

    def request(self, why: str) -> None: ...


class StopRelay:
    """Passes signals to a target, and keeps those that come before there is one.

    The target counts them: the first drains, the second stops at once. A third SIGINT ends the
    process, for a person whose job hangs.
    """

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._target: StopTarget | None = None
        self._num_interrupts = 0

    def connect(self, target: StopTarget) -> None:
        """From now on signals go to ``target``, starting with the kept ones."""
        self._target = target
        while self._kept:
            target.request(self._kept.pop(0))

    def handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The signal handler."""
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 2:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        if self._target is None:
            self._kept.append(name)
        else:
            self._target.request(name)


@contextmanager
def stop_on_signals() -> Iterator[StopRelay]:
    """Hands the stop signals to a ``StopRelay`` while inside; SIGCONT is ignored."""
    relay = StopRelay()
    before = {number: signal.signal(number, relay.handle) for number in STOP_SIGNALS}
    before[signal.SIGCONT] = signal.signal(signal.SIGCONT, signal.SIG_IGN)
    try:
        yield relay
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
