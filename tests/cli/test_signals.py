"""Signals reach the job's stop flag."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from offline_diffusion.cli.signals import LATE_SIGNALS, STOP_SIGNALS, stop_on_signals
from offline_diffusion.progress import StopFlag


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("number", "echo_s"),
    [(signal.SIGTERM, 1.9), (signal.SIGINT, 0.15), (signal.SIGUSR1, 1.9), (signal.SIGUSR2, 1.9)],
)
def test_each_stop_signal_is_a_request_but_for_its_echo(number: signal.Signals, echo_s: float) -> None:
    """Catches a second delivery of the same signal that ends a job without a checkpoint."""
    clock = Clock()
    stop = StopFlag(clock=clock)
    with stop_on_signals(stop):
        os.kill(os.getpid(), number)
        assert (stop.requests, stop.why) == (1, number.name)
        clock.now += echo_s
        os.kill(os.getpid(), number)
        assert stop.requests == 1
        clock.now += 0.15
        os.kill(os.getpid(), number)
        assert stop.requests == 2


@pytest.mark.parametrize("first", [signal.SIGINT, None])
def test_a_signal_that_says_what_was_just_asked_for_does_not_count(first: signal.Signals | None) -> None:
    """Slurm's own SIGTERM comes with the time limit's request, or with a signal that a script sends on."""
    clock = Clock()
    stop = StopFlag(clock=clock)
    with stop_on_signals(stop):
        if first is None:
            stop.request("time limit")
        else:
            os.kill(os.getpid(), first)
        clock.now += 1.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requests == 1
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requests == 2, "a person does not wait two seconds"


def test_sigcont_is_ignored_and_handlers_are_put_back() -> None:
    watched = (*STOP_SIGNALS, signal.SIGCONT)
    before = [signal.getsignal(number) for number in watched]
    stop = StopFlag()
    with stop_on_signals(stop):
        os.kill(os.getpid(), signal.SIGCONT)
    assert stop.requests == 0
    assert [signal.getsignal(number) for number in watched] == before


def test_a_third_interrupt_ends_a_job_that_hangs() -> None:
    clock = Clock()
    with stop_on_signals(StopFlag(clock=clock)):
        for _ in range(2):
            clock.now += 0.3
            for _ in range(2):  # each delivered twice
                os.kill(os.getpid(), signal.SIGINT)
        clock.now += 0.3
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", LATE_SIGNALS)
@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("no-such-command", 2)])
def test_a_signal_after_the_end_changes_no_exit_code(
    number: signal.Signals, argument: str, code: int
) -> None:
    """A job that was done ended with -15 once, by a signal that met it while it unloaded torch."""
    late = (
        "import atexit, os, sys\n"
        "from offline_diffusion.cli.main import run_and_exit\n"
        f"atexit.register(os.kill, os.getpid(), {int(number)})\n"
        f"sys.argv = ['offdiff', {argument!r}]\n"
        "run_and_exit()\n"
    )
    done = subprocess.run([sys.executable, "-c", late], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
