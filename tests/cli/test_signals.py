"""Signals reach the job's stop flag."""

from __future__ import annotations

import os
import signal

import pytest

from offline_diffusion.cli.signals import STOP_SIGNALS, stop_on_signals
from offline_diffusion.progress import StopFlag


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_each_stop_signal_is_a_request(number: signal.Signals) -> None:
    stop = StopFlag()
    with stop_on_signals(stop):
        os.kill(os.getpid(), number)
        assert (stop.requests, stop.why) == (1, number.name)
        os.kill(os.getpid(), number)
        assert stop.requests == 2


def test_sigcont_is_ignored_and_handlers_are_put_back() -> None:
    watched = (*STOP_SIGNALS, signal.SIGCONT)
    before = [signal.getsignal(number) for number in watched]
    stop = StopFlag()
    with stop_on_signals(stop):
        os.kill(os.getpid(), signal.SIGCONT)
    assert stop.requests == 0
    assert [signal.getsignal(number) for number in watched] == before


def test_a_third_interrupt_ends_a_job_that_hangs() -> None:
    with stop_on_signals(StopFlag()):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
