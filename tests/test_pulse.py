"""Whether an engine hangs, by a clock that the test moves."""

from __future__ import annotations

from offline_diffusion.pulse import FIRST_HUNG_S, HUNG_FACTOR, HUNG_S, Pulse

LOOK_S = 2.0


class Bench:
    """A pulse that is looked at every few seconds."""

    def __init__(self) -> None:
        self.now = 1e6
        self.told: list[float] = []
        self.pulse = Pulse(self.told.append, lambda: self.now)

    def look_for(self, seconds: float) -> bool:
        """Looks so long; whether it got on all the time."""
        looks = []
        for _ in range(round(seconds / LOOK_S)):
            looks.append(self.pulse.gets_on())
            self.now += LOOK_S
        return all(looks)

    def call(self, seconds: float) -> bool:
        with self.pulse.at_work():
            return self.look_for(seconds)


def test_a_call_that_takes_too_long_hangs_until_it_ends() -> None:
    bench = Bench()
    assert bench.call(10)
    with bench.pulse.at_work():
        assert bench.look_for(HUNG_S)
        assert bench.told == []
        assert not bench.look_for(3 * LOOK_S)
        assert len(bench.told) == 1, "once, not at every look"
        assert HUNG_S < bench.told[0] < HUNG_S + 3 * LOOK_S
    assert bench.pulse.gets_on(), "it has come back"


def test_many_short_calls_are_no_hang_however_long_all_take() -> None:
    bench = Bench()
    for _ in range(round(3 * FIRST_HUNG_S / 10)):
        assert bench.call(10)


def test_what_is_no_call_may_take_as_long_as_it_likes() -> None:
    """Loading comes before the first, claims and full disks between two."""
    bench = Bench()
    assert bench.look_for(5 * FIRST_HUNG_S)
    assert bench.call(10)
    assert bench.look_for(5 * FIRST_HUNG_S)


def test_the_first_call_may_compile_kernels() -> None:
    bench = Bench()
    with bench.pulse.at_work():
        assert bench.look_for(FIRST_HUNG_S)
        assert not bench.look_for(3 * LOOK_S)


def test_where_steps_are_slow_more_is_waited_for() -> None:
    bench = Bench()
    assert bench.call(100)
    assert bench.call(10)
    with bench.pulse.at_work():
        assert bench.look_for(HUNG_FACTOR * (100 - 3 * LOOK_S))
        assert not bench.look_for(HUNG_FACTOR * 4 * LOOK_S)


def test_who_was_frozen_itself_has_seen_no_hang() -> None:
    """Ctrl-Z for a night: the time that nobody looked is no call's, nor is it a measure for later ones."""
    bench = Bench()
    assert bench.call(10)
    with bench.pulse.at_work():
        assert bench.look_for(10)
        bench.now += 30_000
        assert bench.look_for(10)
    with bench.pulse.at_work():
        assert not bench.look_for(HUNG_S + 4 * LOOK_S)
