"""Stage times add up to the time that was spent, in every thread for itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from offline_diffusion.stages import NO_STAGES, StageClock, Stages, in_stage


class FakeTime:
    """A clock that goes on only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def seconds(clock: StageClock) -> dict[str, tuple[int, float]]:
    return {name: (time.count, time.seconds) for name, time in clock.times.items()}


def test_a_stage_leaves_out_those_inside_it() -> None:
    """Catches double counting: the stages would add up to more than the 15 s that passed."""
    time = FakeTime()
    clock = StageClock(time)
    with clock.stage("other"):
        time.now += 1
        for wait in (2.0, 3.0):
            with clock.stage("engine"):
                time.now += wait
                with clock.stage("denoise"):
                    time.now += 4
        time.now += 1
    assert seconds(clock) == {"other": (1, 2.0), "engine": (2, 5.0), "denoise": (2, 8.0)}


def test_a_stage_that_raises_is_timed_and_closed() -> None:
    """Catches a stage left open: what follows would count as inside it."""
    time = FakeTime()
    clock = StageClock(time)

    def fail() -> None:
        with clock.stage("engine"), clock.stage("denoise"):
            time.now += 2
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    with clock.stage("copy"):
        time.now += 1
    assert seconds(clock) == {"denoise": (1, 2.0), "engine": (1, 0.0), "copy": (1, 1.0)}


def test_threads_do_not_nest_in_each_other() -> None:
    """Catches one stack for all threads: the writer's 5 s would be taken from the engine's."""
    time = FakeTime()
    clock = StageClock(time)

    def write() -> None:
        with clock.stage("write"):
            time.now += 5

    with clock.stage("engine"):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert seconds(clock) == {"write": (1, 5.0), "engine": (1, 5.0)}


class Worker:
    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    @in_stage("decode")
    def work(self, value: int, *, fail: bool = False) -> int:
        """Doubles."""
        if fail:
            raise ValueError(value)
        return 2 * value


@pytest.mark.parametrize("stages", [NO_STAGES, StageClock()])
def test_a_method_as_a_stage_behaves_as_before(stages: Any) -> None:
    worker = Worker(stages)
    assert worker.work(4) == 8
    with pytest.raises(ValueError, match="3"):
        worker.work(3, fail=True)
    assert (Worker.work.__name__, Worker.work.__doc__) == ("work", "Doubles.")
    if isinstance(stages, StageClock):
        assert stages.times["decode"].count == 2
