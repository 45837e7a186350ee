"""Made-up arrival times: Poisson, bursty and diurnal. Free of torch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import islice
from typing import Literal, get_args

ArrivalKind = Literal["poisson", "bursty", "diurnal"]
ARRIVAL_KINDS: tuple[ArrivalKind, ...] = get_args(ArrivalKind)

DEFAULT_BURSTINESS = 0.25
"""Shape of the Gamma distribution of gaps: 1 is Poisson, less is burstier. Gaps vary by 1/√shape of their
mean, here twice."""

DAY_S = 86_400.0
DIURNAL_SWING = 0.8
"""How far the rate of a diurnal trace goes above and below its mean, as a share of it."""


def arrival_times(
    kind: ArrivalKind,
    count: int,
    rate: float,
    *,
    seed: int = 0,
    burstiness: float = DEFAULT_BURSTINESS,
    day_s: float = DAY_S,
) -> list[float]:
    """``count`` arrivals in seconds, ascending, the first at 0.

    Args:
        kind: ``poisson``: exponential gaps. ``bursty``: Gamma gaps. ``diurnal``: a Poisson process whose
            rate follows a cosine with its low at the start, drawn by thinning.
        count: How many.
        rate: Mean arrivals a second, above 0; of a diurnal trace over whole days.
        seed: Equal seeds give equal times.
        burstiness: Shape of the Gamma distribution, above 0.
        day_s: Period of a diurnal trace.
    """
    rng = random.Random(f"arrivals:{seed}")
    if kind == "diurnal":
        times = list(islice(_thinned(rng, rate, day_s), count))
        return [time - times[0] for time in times]
    shape = 1.0 if kind == "poisson" else burstiness
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(shape, 1 / (rate * shape))
    return times


def _thinned(rng: random.Random, rate: float, day_s: float) -> Iterator[float]:
    """Candidates at the highest rate, each kept with the probability that its time's rate has of it."""
    highest, now = 1 + DIURNAL_SWING, 0.0
    while True:
        now += rng.expovariate(rate * highest)
        share = 1 - DIURNAL_SWING * math.cos(2 * math.pi * now / day_s)
        if rng.random() * highest < share:
            yield now
