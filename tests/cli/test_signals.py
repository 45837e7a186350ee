"""Signals reach the job, also those that come before there is one."""

from __future__ import annotations

import os
import signal

import pytest

from offline_diffusion.cli.signals import STOP_SIGNALS, stop_on_signals


class Recorder:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def request(self, why: str) -> None:
        self.reasons.append(why)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_each_stop_signal_is_passed_on(number: signal.Signals) -> None:
    recorder = Recorder()
    with stop_on_signals() as relay:
        relay.connect(recorder)
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert recorder.reasons == [number.name, number.name]


def test_signals_before_the_job_is_there_are_kept() -> None:
    recorder = Recorder()
    with stop_on_signals() as relay:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        relay.connect(recorder)
    assert recorder.reasons == ["SIGUSR1", "SIGTERM"]


def test_sigcont_is_ignored_and_handlers_are_put_back() -> None:
    watched = (*STOP_SIGNALS, signal.SIGCONT)
    before = [signal.getsignal(number) for number in watched]
    recorder = Recorder()
    with stop_on_signals() as relay:
        relay.connect(recorder)
        os.kill(os.getpid(), signal.SIGCONT)
    assert recorder.reasons == []
    assert [signal.getsignal(number) for number in watched] == before


def test_a_third_interrupt_ends_a_job_that_hangs() -> None:
    with stop_on_signals() as relay:
        relay.connect(Recorder())
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
