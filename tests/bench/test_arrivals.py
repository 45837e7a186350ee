"""Made-up arrivals against the closed forms of their processes."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from offline_diffusion.bench.arrivals import ARRIVAL_KINDS, DIURNAL_SWING, ArrivalKind, arrival_times

COUNT = 20_000


def gaps(kind: ArrivalKind, rate: float, **options: float) -> list[float]:
    times = arrival_times(kind, COUNT, rate, seed=3, **options)
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("kind", ARRIVAL_KINDS)
def test_times_ascend_from_zero_and_repeat_with_their_seed(kind: ArrivalKind) -> None:
    times = arrival_times(kind, 200, 3.0, seed=1)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(times) == 200
    assert times == arrival_times(kind, 200, 3.0, seed=1)
    assert times != arrival_times(kind, 200, 3.0, seed=2)


def test_poisson_gaps_are_exponential() -> None:
    found = gaps("poisson", 4.0)
    assert statistics.fmean(found) == pytest.approx(1 / 4, rel=0.03)
    assert statistics.pstdev(found) == pytest.approx(1 / 4, rel=0.03)  # the mean itself
    assert statistics.median(found) == pytest.approx(math.log(2) / 4, rel=0.03)


def test_bursty_gaps_vary_by_one_over_the_root_of_their_shape() -> None:
    found = gaps("bursty", 4.0, burstiness=0.25)
    assert statistics.fmean(found) == pytest.approx(1 / 4, rel=0.05)
    assert statistics.pstdev(found) / statistics.fmean(found) == pytest.approx(2.0, rel=0.05)


def test_the_rate_of_a_day_follows_its_cosine() -> None:
    day = 1000.0
    times = arrival_times("diurnal", COUNT, 10.0, day_s=day)
    days = int(times[-1] // day)
    assert days >= 1
    whole = [time % day for time in times if time < days * day]
    assert len(whole) == pytest.approx(10.0 * days * day, rel=0.03)
    # The share within a quarter of a day on both sides of noon: 1/2 + swing/pi, the cosine's integral.
    at_day = sum(day / 4 <= time < 3 * day / 4 for time in whole) / len(whole)
    assert at_day == pytest.approx(0.5 + DIURNAL_SWING / math.pi, abs=0.02)
