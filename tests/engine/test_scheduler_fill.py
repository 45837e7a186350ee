"""How full steps are on whole jobs, by simulation, which is exact in steps and tokens."""

from __future__ import annotations

from functools import cache

import pytest
from bench_scheduler import MAX_NUM_SEQS, Simulation, make_requests, simulate

from offline_diffusion.engine.policies import MAX_OVERTAKEN
from offline_diffusion.engine.scheduler import LOOK_AHEAD, Scheduler

NUM_IMAGES = 600
UNIFORM = ("uniform by 16", "uniform by 64", "uniform, 10-50 steps")
FULL = [  # what the sizes allow is 97 % or more
    *((mix, budget) for mix in UNIFORM for budget in (16_384, 26_400, 32_768, 50_000)),
    *(("mixed 16", budget) for budget in (17_000, 26_400, 32_768, 50_000)),
    *(("small ones longest", budget) for budget in (17_000, 26_400, 32_768, 50_000)),
    ("dataset C", 17_000),
    ("dataset C", 50_000),
    ("512", 17_000),
    ("512", 50_000),
    ("1024", 17_000),
    ("1024", 50_000),
]


@cache
def packed(mix: str, budget: int) -> Simulation:
    return simulate(Scheduler(MAX_NUM_SEQS, budget, "pack"), make_requests(mix, NUM_IMAGES))


@pytest.mark.parametrize(("mix", "budget"), FULL)
def test_steps_are_full(mix: str, budget: int) -> None:
    result = packed(mix, budget)
    assert result.fill_before_tail >= 0.95
    assert result.fill >= 0.94
    assert result.num_thin <= 10
    assert result.max_overtaken < MAX_OVERTAKEN + MAX_NUM_SEQS + LOOK_AHEAD


IMAGE_TOKENS = {512: 2_048, 768: 4_608, 1024: 8_192, 1536: 18_432}
"""Of both branches, by side in pixels; every request has at least 6 text tokens besides."""

CEILINGS = {
    # Where sizes do not add up to the budget no policy can fill it. Weights of the sizes such that no
    # step can hold more than 1 bound the number of steps from below: the sum of all weights x steps.
    ("mixed 16", 16_384): {512: 1 / 7, 768: 2 / 7, 1024: 4 / 7},
    ("dataset C", 16_384): {512: 0, 768: 0, 1024: 1, 1536: 1},
    ("dataset C", 26_400): {512: 0, 768: 0, 1024: 1 / 3, 1536: 1},
    ("dataset C", 32_768): {512: 0, 768: 0, 1024: 1 / 3, 1536: 2 / 3},
    ("512", 16_384): {512: 1 / 7},
    ("1024", 16_384): {1024: 1},
    ("1024", 32_768): {1024: 1 / 3},
}


def most_weight(weights: dict[int, float], room: int) -> float:
    """Of any requests that fit together."""
    fitting = [side for side in weights if IMAGE_TOKENS[side] + 6 <= room]
    return max(
        (
            weights[side] + most_weight({s: weights[s] for s in fitting if s <= side}, room - tokens)
            for side in fitting
            if (tokens := IMAGE_TOKENS[side] + 6)
        ),
        default=0.0,
    )


@pytest.mark.parametrize(("mix", "budget"), CEILINGS)
def test_where_sizes_do_not_fill_the_budget_steps_are_nearly_as_few_as_can_be(mix: str, budget: int) -> None:
    weights = CEILINGS[mix, budget]
    alone = [side for side in weights if IMAGE_TOKENS[side] > budget]
    assert all(weights[side] <= 1 for side in alone)
    assert most_weight(weights, budget) <= 1 + 1e-9
    least_steps = 0.0
    for request in make_requests(mix, NUM_IMAGES):
        side = max(side for side, tokens in IMAGE_TOKENS.items() if tokens <= request.num_tokens)
        least_steps += weights[side] * request.num_steps
    assert least_steps <= packed(mix, budget).num_steps <= 1.05 * least_steps


def test_a_short_job_of_unlike_chains_ends_full() -> None:
    """All tail: 100 images of 10 to 50 steps. Short chains first would leave the long ones alone."""
    fills = []
    for seed in range(4):
        requests = make_requests("uniform, 10-50 steps", 100, seed)
        fills.append(simulate(Scheduler(MAX_NUM_SEQS, 50_000, "pack"), requests).fill)
    assert sum(fills) / len(fills) >= 0.95
