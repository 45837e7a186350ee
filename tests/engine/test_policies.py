"""Each scheduling policy's own promise, where the right order is known without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.config import EngineConfig, SchedulingPolicy
from offline_diffusion.engine.policies import LOOK_AHEAD, MAX_OVERTAKEN, POLICIES
from offline_diffusion.engine.scheduler import ScheduledRequest, Scheduler

AGING: tuple[SchedulingPolicy, ...] = ("pack", "shortest", "deadline")


def one_at_a_time(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    """Order of admission where a step holds one, each of one step; time stands still."""
    names = []
    while scheduler.waiting or scheduler.running:
        names += [entry.request_id for entry in scheduler.schedule(now).admitted]
        scheduler.advance()
    return names


def test_every_policy_of_the_options_has_a_class() -> None:
    assert set(POLICIES) == set(EngineConfig.model_fields["scheduling_policy"].annotation.__args__)  # type: ignore[union-attr]


# --- shortest -------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_of_those_that_came_together_the_shortest_goes_first(tokens: list[int]) -> None:
    scheduler = Scheduler(1, 100, "shortest")
    for index, count in enumerate(tokens):
        scheduler.add(ScheduledRequest(str(index), count, 1, arrival=3.0))
    expected = sorted(range(len(tokens)), key=lambda index: (tokens[index], index))
    assert one_at_a_time(scheduler, now=9.0) == [*map(str, expected)]


def test_work_is_tokens_times_steps() -> None:
    scheduler = Scheduler(1, 100, "shortest")
    for name, tokens, steps in [("wide", 40, 1), ("long", 10, 5), ("short", 13, 3)]:
        scheduler.add(ScheduledRequest(name, tokens, steps))
    assert one_at_a_time(scheduler) == ["short", "wide", "long"]


def test_waiting_makes_up_for_work_in_proportion() -> None:
    """Ten times the work is let pass by a newcomer until it has waited ten times as long."""
    for waited, expected in [(99.0, "new"), (101.0, "large")]:
        scheduler = Scheduler(1, 1000, "shortest")
        scheduler.add(ScheduledRequest("large", 100, 1, arrival=200.0 - waited))
        scheduler.add(ScheduledRequest("new", 10, 1, arrival=190.0))
        assert [entry.request_id for entry in scheduler.schedule(200.0).admitted] == [expected]


def test_a_mean_response_is_shorter_than_in_order() -> None:
    """A long one first, then many short ones: a step of time each, by hand 1,000 against 20 + ... ."""
    ends = {}
    for policy in ("fifo", "shortest"):
        scheduler = Scheduler(1, 100, policy)  # type: ignore[arg-type]
        scheduler.add(ScheduledRequest("long", 10, 100))
        for index in range(10):
            scheduler.add(ScheduledRequest(str(index), 10, 1))
        now, finished = 0.0, []
        while scheduler.waiting or scheduler.running:
            scheduler.schedule(now)
            now += 1
            finished += [now for _ in scheduler.advance()]
        ends[policy] = sum(finished) / len(finished)
    assert ends == {
        "fifo": (100 + sum(range(101, 111))) / 11,
        "shortest": (sum(range(1, 11)) + 110) / 11,
    }


# --- deadline -------------------------------------------------------------------------------------


@given(st.lists(st.integers(5, 50), min_size=1, max_size=20))
def test_the_earliest_deadline_goes_first(deadlines: list[int]) -> None:
    scheduler = Scheduler(1, 100, "deadline")
    for index, deadline in enumerate(deadlines):
        scheduler.add(ScheduledRequest(str(index), 10, 1, deadline=float(deadline)))
    expected = sorted(range(len(deadlines)), key=lambda index: (deadlines[index], index))
    assert one_at_a_time(scheduler, now=5.0) == [*map(str, expected)]


@pytest.mark.parametrize("policy", ["shortest", "deadline"])
def test_urgency_is_seen_at_the_end_of_a_long_queue(policy: SchedulingPolicy) -> None:
    scheduler = Scheduler(1, 100, policy)
    for index in range(2 * LOOK_AHEAD):
        scheduler.add(ScheduledRequest(str(index), 10, 5))
    scheduler.add(ScheduledRequest("urgent", 1, 1, deadline=9.0))
    assert [entry.request_id for entry in scheduler.schedule(0.0).admitted] == ["urgent"]


def test_a_lost_deadline_yields_to_one_that_can_be_kept() -> None:
    scheduler = Scheduler(1, 100, "deadline")
    for name, deadline in [("none", math.inf), ("lost", 9.0), ("late", 30.0), ("soon", 10.0)]:
        scheduler.add(ScheduledRequest(name, 10, 1, deadline=deadline))
    assert one_at_a_time(scheduler, now=10.0) == ["soon", "late", "none", "lost"]


def test_a_deadline_is_kept_that_order_of_arrival_would_miss() -> None:
    for policy, expected in [("fifo", 6), ("deadline", 1)]:
        scheduler = Scheduler(1, 100, policy)  # type: ignore[arg-type]
        scheduler.add(ScheduledRequest("batch", 10, 5))
        scheduler.add(ScheduledRequest("urgent", 10, 1, deadline=2.0))
        now, ends = 0, {}
        while scheduler.waiting or scheduler.running:
            scheduler.schedule(float(now))
            now += 1
            ends |= {entry.request_id: now for entry in scheduler.advance()}
        assert ends["urgent"] == expected


# --- nobody starves -------------------------------------------------------------------------------


PREFERRED: dict[SchedulingPolicy, Callable[[str, float], ScheduledRequest]] = {
    "pack": lambda name, now: ScheduledRequest(name, 60, 2, wave_key="w", arrival=now),
    "shortest": lambda name, now: ScheduledRequest(name, 1, 1, wave_key="w", arrival=now - 1e6),
    "deadline": lambda name, now: ScheduledRequest(name, 10, 2, wave_key="w", arrival=now, deadline=now + 9),
}
"""Newcomers that a policy would always rather take than a wide, long, late one without a deadline.

``fifo`` has none, nor have ``pack``'s waves: both go by the order of arrival.
"""


@pytest.mark.parametrize(
    ("policy", "step_execution"),
    [("pack", True), *((policy, steps) for policy in ("shortest", "deadline") for steps in (True, False))],
)
def test_the_least_wanted_comes_to_its_turn_in_an_endless_stream(
    policy: SchedulingPolicy, step_execution: bool
) -> None:
    scheduler = Scheduler(4, 100, policy, step_execution=step_execution, max_wait_s=0.0)
    tokens = 41 if policy == "pack" else 99
    scheduler.add(ScheduledRequest("poor", tokens, 9, wave_key="v", batch_key=None))
    names = iter(range(10**9))
    for iteration in range(4 * MAX_OVERTAKEN):
        now = float(iteration)
        while len(scheduler.waiting) < LOOK_AHEAD // 2:
            scheduler.add(PREFERRED[policy](str(next(names)), now))
        if any(entry.request_id == "poor" for entry in scheduler.schedule(now).running):
            return
        scheduler.advance()
    pytest.fail("it never ran")


@pytest.mark.parametrize("policy", AGING)
def test_another_key_than_everyone_elses_is_no_reason_to_starve(policy: SchedulingPolicy) -> None:
    """Two shapes that cannot share a step: whoever runs is never joined for ever by its like."""
    scheduler = Scheduler(4, 1000, policy)
    scheduler.add(ScheduledRequest("first", 10, 5, batch_key="x"))
    scheduler.schedule(0.0)
    scheduler.add(ScheduledRequest("other", 10, 5, batch_key="y"))
    for iteration in range(4 * MAX_OVERTAKEN):
        while len(scheduler.waiting) < 8:
            scheduler.add(ScheduledRequest(f"{iteration}-{len(scheduler.waiting)}", 10, 5, batch_key="x"))
        running: tuple[Any, ...] = scheduler.schedule(0.0).running
        if any(entry.request_id == "other" for entry in running):
            return
        scheduler.advance()
    pytest.fail("it never ran")
