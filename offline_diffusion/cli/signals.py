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

ECHO_S = {signal.SIGINT: 0.2}
"""Seconds after a request for which another signal is the same request: launchers of containers and clusters
signal both the process group and its leader. A person who presses Ctrl-C twice means it."""

DEFAULT_ECHO_S = 2.0

LATE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ignored once a command is over: its exit code says what became of the job, not that somebody wanted it to
stop while the interpreter was still unloading libraries. SIGINT still ends what hangs there."""

_PATIENCE = 2
"""Interrupts after which the next one ends a job that hangs."""


@contextmanager
def stop_on_signals(stop: StopFlag) -> Iterator[None]:
    """Inside, every stop signal is a request to ``stop`` and SIGCONT is ignored.

    The first request saves unfinished images at their step, the second stops without. A third SIGINT
    raises KeyboardInterrupt, for the person in front of a job that hangs. A signal that comes at once after
    another request, see `ECHO_S`, does not count.
    """
    num_interrupts = 0

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal num_interrupts
        name = signal.Signals(number)
        if not stop.request(name.name, echo_s=ECHO_S.get(name, DEFAULT_ECHO_S)):
            return
        num_interrupts += number == signal.SIGINT
        if num_interrupts > _PATIENCE:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    before[signal.SIGCONT] = signal.signal(signal.SIGCONT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_late_signals() -> None:
    """For the rest of the process."""
    for number in LATE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
