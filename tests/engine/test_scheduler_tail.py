"""The tail of a job: all that is left is in sight, and no step shall be thin that need not be."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.engine.scheduler import LOOK_AHEAD, ScheduledRequest, Scheduler


def run_to_end(scheduler: Scheduler, arrivals: Sequence[int] = ()) -> list[list[str]]:
    """Names in each step. ``arrivals``: steps at which one more of 10 tokens and 7 steps arrives."""
    steps, left = [], sorted(arrivals)
    while left or scheduler.waiting or scheduler.running:
        while left and left[0] <= len(steps):
            scheduler.add(ScheduledRequest(f"late {len(left)}", 10, 7))
            left.pop(0)
        scheduler.no_more_requests = not left
        steps.append([entry.request_id for entry in scheduler.schedule().running])
        scheduler.advance()
    return steps


def waves(count: int, *, max_num_seqs: int = 64, max_num_text_tokens: int | None = None) -> list[int]:
    """Sizes of the packs that ``count`` equal requests run in; 3 of them and a bit fit the budget."""
    scheduler = Scheduler(max_num_seqs, 35, "pack", max_num_text_tokens=max_num_text_tokens)
    for index in range(count):
        scheduler.add(ScheduledRequest(str(index), 10, 4, num_text_tokens=2))
    steps = run_to_end(scheduler)
    assert all(step == steps[index - index % 4] for index, step in enumerate(steps)), "a wave changed"
    return [len(step) for step in steps[::4]]


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(1, [1]), (3, [3]), (4, [2, 2]), (5, [3, 2]), (6, [3, 3]), (7, [3, 2, 2]), (8, [3, 3, 2])],
)
def test_equal_requests_leave_no_thin_last_wave(count: int, sizes: list[int]) -> None:
    assert waves(count) == sizes


def test_a_wave_may_be_limited_by_requests_or_by_text() -> None:
    assert waves(4, max_num_seqs=3) == [2, 2]
    assert waves(3, max_num_seqs=2) == [2, 1]
    assert waves(4, max_num_text_tokens=6) == [2, 2]


@given(st.integers(1, 60), st.integers(10, 200), st.integers(1, 9))
def test_even_waves_take_no_more_steps_than_full_ones(count: int, budget: int, num_steps: int) -> None:
    scheduler = Scheduler(64, budget, "pack")
    for index in range(count):
        scheduler.add(ScheduledRequest(str(index), 10, num_steps))
    assert len(run_to_end(scheduler)) == ceil(count / (budget // 10)) * num_steps


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 5))
def test_equal_requests_that_came_one_by_one_end_as_soon_as_in_order(
    arrivals: list[int], num_fitting: int
) -> None:
    """Holding some back for an even end costs no step, whoever is running."""
    ends = [len(run_to_end(Scheduler(64, 10 * num_fitting, policy), arrivals)) for policy in ("fifo", "pack")]
    assert ends[1] == ends[0]


def test_nobody_is_held_back_for_a_longer_chain() -> None:
    """Two run for 49 steps more; of two that wait, one fits now and the other when that one ends."""
    scheduler = Scheduler(64, 35, "pack")
    for index, num_steps in enumerate([50, 50, 30, 30]):
        if index == 2:
            scheduler.schedule()
            scheduler.advance()
        scheduler.add(ScheduledRequest(str(index), 10, num_steps))
    assert len(run_to_end(scheduler)) == 30 + 30


def test_many_small_ones_are_not_held_back_where_two_steps_cannot_hold_the_rest() -> None:
    """Half the tokens are in two requests, but 6 of the small ones need 2 steps after them."""
    scheduler = Scheduler(4, 100, "pack")
    for index, num_tokens in enumerate([30, 30, 10, 10, 10, 10, 10, 10]):
        scheduler.add(ScheduledRequest(str(index), num_tokens, 5))
    assert [len(step) for step in run_to_end(scheduler)[::5]] == [4, 4]


def test_unequal_sizes_are_halved_too() -> None:
    """110 of 100 tokens: not 90 and 20, nor 60 + 30 + 10."""
    scheduler = Scheduler(64, 100, "pack")
    for index, num_tokens in enumerate([10, 60, 10, 30]):
        scheduler.add(ScheduledRequest(str(index), num_tokens, 5))
    assert [sorted(step) for step in run_to_end(scheduler)[::5]] == [["1"], ["0", "2", "3"]]


def test_a_chain_that_would_outlast_the_rest_starts_first() -> None:
    """Largest first, it would start when others end, and be alone for most of its 50 steps."""
    scheduler = Scheduler(64, 100, "pack")
    for index in range(8):
        scheduler.add(ScheduledRequest(str(index), 50, 10))
    scheduler.add(ScheduledRequest("long", 10, 50))
    steps = run_to_end(scheduler)
    assert "long" in steps[0]
    # One request of 50 tokens fits beside it: five of them in its 50 steps, then the other three.
    assert len(steps) == 50 + 20


def test_a_chain_that_does_not_outlast_the_rest_fills_gaps() -> None:
    scheduler = Scheduler(64, 100, "pack")
    for index in range(20):
        scheduler.add(ScheduledRequest(str(index), 45, 10))
    scheduler.add(ScheduledRequest("long", 10, 50))
    steps = run_to_end(scheduler)
    assert steps[0] == ["0", "1", "long"]
    assert len(steps) == 100


def test_order_is_kept_until_the_rest_is_in_sight() -> None:
    """With one more than `LOOK_AHEAD` waiting, an overdue head is next; then the long chain is."""
    for num_others, first in [(LOOK_AHEAD, "head"), (LOOK_AHEAD - 1, "long")]:
        scheduler = Scheduler(1, 100, "pack", no_more_requests=True)
        scheduler.add(ScheduledRequest("head", 10, 1, num_overtaken=10**6))
        scheduler.add(ScheduledRequest("long", 20, 10**6))
        for index in range(num_others - 1):
            scheduler.add(ScheduledRequest(str(index), 10, 1))
        assert scheduler.schedule().running[0].request_id == first
