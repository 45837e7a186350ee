"""Whom ``pack`` admits: largest first, without a gap, and nobody left behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.engine.policies import MAX_OVERTAKEN
from offline_diffusion.engine.scheduler import ScheduledRequest, Scheduler


@pytest.mark.parametrize("num_tokens", [1, 50, 100, 150], ids=["small", "half", "all", "oversize"])
def test_an_endless_stream_of_better_requests_cannot_starve_the_head(num_tokens: int) -> None:
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=100, policy="pack")
    scheduler.add(ScheduledRequest("poor", num_tokens, 1))
    longest, num_passed = 9, 0
    for iteration in range(longest * MAX_OVERTAKEN):
        for lane in range(3):  # each larger than most heads, more than can run, ending at odd moments
            steps = longest - (iteration + 2 * lane) % 3
            scheduler.add(ScheduledRequest(f"{iteration}-{lane}", 50, steps))
        pack = scheduler.schedule()
        if any(entry.request_id == "poor" for entry in pack.running):
            assert num_passed <= MAX_OVERTAKEN + 1
            return
        num_passed += len(pack.admitted)
        scheduler.advance()
    pytest.fail("the head never ran")


def test_the_head_is_next_once_it_was_overtaken_often_enough() -> None:
    """One slot: every schedule admits one, and the head is the smallest of all."""
    scheduler = Scheduler(max_num_seqs=1, max_num_batched_tokens=100, policy="pack")
    scheduler.add(ScheduledRequest("poor", 1, 1))
    for index in range(2 * MAX_OVERTAKEN):
        scheduler.add(ScheduledRequest(str(index), 50, 1))
    admitted = []
    for _ in range(MAX_OVERTAKEN + 1):
        admitted += [entry.request_id for entry in scheduler.schedule().admitted]
        scheduler.advance()
    assert admitted == [*map(str, range(MAX_OVERTAKEN)), "poor"]


def test_an_overdue_request_that_does_not_fit_keeps_the_room_that_there_is() -> None:
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=100, policy="pack")
    scheduler.add(ScheduledRequest("long", 60, 3))
    scheduler.schedule()
    scheduler.add(ScheduledRequest("overdue", 50, 1, num_overtaken=MAX_OVERTAKEN))
    scheduler.add(ScheduledRequest("would fit", 40, 1))
    running = []
    for _ in range(4):
        running.append([entry.request_id for entry in scheduler.schedule().running])
        scheduler.advance()
    assert running == [["long"], ["long"], ["long"], ["overdue", "would fit"]]


def _admitted(requests: Sequence[tuple[str, int, int]]) -> list[str]:
    """What joins an empty step of 96 tokens; eighths of it are 12. ``requests``: name, tokens, steps."""
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=96, policy="pack")
    for name, tokens, steps in requests:
        scheduler.add(ScheduledRequest(name, tokens, steps))
    return [entry.request_id for entry in scheduler.schedule().admitted]


def test_pack_takes_the_largest_that_fits_then_the_next() -> None:
    requests = [("a", 12, 9), ("b", 50, 9), ("c", 60, 9), ("d", 73, 1), ("e", 20, 1)]
    assert _admitted(requests) == ["d", "e"]


def test_of_about_equal_size_the_earlier_goes_first() -> None:
    assert _admitted([("a", 60, 1), ("b", 61, 9), ("c", 71, 9)]) == ["a"]  # all five eighths and a bit


def test_a_gap_is_avoided_where_others_fill_the_step() -> None:
    """After 50, 40 leaves a gap of 6 that nothing fills; 26 and 20 fill the step."""
    assert _admitted([("a", 50, 1), ("b", 40, 1), ("c", 26, 1), ("d", 20, 1)]) == ["a", "c", "d"]
    assert _admitted([("a", 50, 1), ("b", 40, 1), ("c", 26, 1), ("d", 19, 1)]) == ["a", "c", "d"]  # 95 > 90
    assert _admitted([("a", 50, 1), ("b", 45, 1), ("c", 26, 1), ("d", 20, 1)]) == ["a", "b"]  # 1 of 96 < 2 %


def test_a_step_that_is_more_than_half_full_takes_what_fits() -> None:
    """Else small ones would go into every gap and be missing where large ones leave one."""
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=96, policy="pack")
    scheduler.add(ScheduledRequest("running", 56, 9))
    scheduler.schedule()
    for name, tokens in [("a", 14), ("b", 16), ("c", 13), ("d", 13)]:
        scheduler.add(ScheduledRequest(name, tokens, 1))
    assert [entry.request_id for entry in scheduler.schedule().admitted] == ["a", "b"]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=10), st.integers(60, 200))
def test_a_new_pack_is_as_full_as_any_with_its_largest(sizes: list[int], budget: int) -> None:
    """All subsets are tried; sizes are told apart by eighths of the budget, 2 % may stay empty."""
    scheduler = Scheduler(max_num_seqs=64, max_num_batched_tokens=budget, policy="pack")
    for index, num_tokens in enumerate(sizes):
        scheduler.add(ScheduledRequest(str(index), num_tokens, 1))
    admitted = scheduler.schedule().admitted
    eighths = [num_tokens * 8 // budget for num_tokens in sizes]
    first = eighths.index(max(eighths))
    assert admitted[0].request_id == str(first)
    others = sizes[:first] + sizes[first + 1 :]
    sums = {0}
    for num_tokens in others:
        sums |= {total + num_tokens for total in sums}
    best = max(total for total in sums if sizes[first] + total <= budget) + sizes[first]
    assert sum(entry.num_tokens for entry in admitted) >= best - 0.02 * budget
