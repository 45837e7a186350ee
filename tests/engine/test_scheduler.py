"""Who runs when: properties over random traffic, and the cases that have a known answer."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.engine import policies
from offline_diffusion.engine.scheduler import (
    LOOK_AHEAD,
    ScheduledRequest,
    Scheduler,
    SchedulerOutput,
)

KEYS = ("x", "y")


@dataclass
class Run:
    """A scheduler driven to the end, and what it did."""

    packs: list[SchedulerOutput] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)
    finished: list[str] = field(default_factory=list)
    overtaken: Counter[str] = field(default_factory=Counter)

    @property
    def admissions(self) -> list[str]:
        return [entry.request_id for pack in self.packs for entry in pack.admitted]


def drive(
    scheduler: Scheduler, traffic: Sequence[tuple[int, ScheduledRequest]], *, closes: bool = False
) -> Run:
    """``traffic``: iteration of arrival and request, in order; time is the iteration.

    With ``closes`` the scheduler is told when the last has arrived.
    """
    run, arrivals, now = Run(), [(at, replace(entry)) for at, entry in traffic], 0
    while arrivals or scheduler.waiting or scheduler.running:
        while arrivals and arrivals[0][0] <= now:
            scheduler.add(arrivals.pop(0)[1])
        scheduler.no_more_requests = closes and not arrivals
        pack = scheduler.schedule(float(now))
        names = [int(entry.request_id) for entry in pack.admitted]  # numbered in order of arrival
        for entry in scheduler.waiting:
            run.overtaken[entry.request_id] += sum(name > int(entry.request_id) for name in names)
        run.packs.append(SchedulerOutput(tuple(map(replace, pack.running)), pack.admitted))
        run.steps.update(entry.request_id for entry in pack.running)
        run.finished += [entry.request_id for entry in scheduler.advance()]
        now += 1
        assert now < 20_000, "the scheduler is stuck"
    return run


@st.composite
def traffics(draw: st.DrawFn, *, num_keys: int = 1) -> list[tuple[int, ScheduledRequest]]:
    count = draw(st.integers(1, 25))
    arrivals = sorted(draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)))
    entries = []
    for index, at in enumerate(arrivals):
        tokens, steps = draw(st.integers(1, 60)), draw(st.integers(1, 6))
        text = draw(st.integers(0, tokens))
        key = draw(st.sampled_from(KEYS[:num_keys]))
        wave = (steps, draw(st.sampled_from((0, 1))))
        entry = ScheduledRequest(
            str(index),
            tokens,
            steps,
            num_text_tokens=text,
            batch_key=key,
            wave_key=wave,
            arrival=float(at),
            deadline=at + draw(st.sampled_from((1.0, 5.0, 20.0, math.inf))),
        )
        entries.append((at, entry))
    return entries


schedulers = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 120),
        "max_num_text_tokens": st.none() | st.integers(1, 60),
        "policy": st.sampled_from(("fifo", "pack", "shortest", "deadline")),
        "step_execution": st.booleans(),
        "max_wait_s": st.sampled_from((0.0, 3.0)),
    }
)


@given(schedulers, traffics(num_keys=2), st.booleans())
def test_every_limit_is_kept_and_every_request_runs_its_steps(
    options: dict[str, Any], traffic: list[tuple[int, ScheduledRequest]], closes: bool
) -> None:
    run = drive(Scheduler(**options), traffic, closes=closes)
    limits = (options["max_num_batched_tokens"], options["max_num_text_tokens"] or 10**9)
    for pack in run.packs:
        assert len(pack.running) <= options["max_num_seqs"]
        num_tokens = sum(entry.num_tokens for entry in pack.running)
        num_text_tokens = sum(entry.num_text_tokens for entry in pack.running)
        assert (num_tokens <= limits[0] and num_text_tokens <= limits[1]) or len(pack.running) == 1
        assert len({entry.batch_key for entry in pack.running}) <= 1
        assert len({entry.request_id for entry in pack.running}) == len(pack.running)
    assert run.steps == {entry.request_id: entry.num_steps for _, entry in traffic}
    assert Counter(run.finished) == Counter(entry.request_id for _, entry in traffic)


@given(schedulers, traffics(num_keys=2), st.booleans())
def test_the_same_traffic_gives_the_same_schedule(
    options: dict[str, Any], traffic: list[tuple[int, ScheduledRequest]], closes: bool
) -> None:
    runs = [drive(Scheduler(**options), traffic, closes=closes) for _ in range(2)]
    assert runs[0] == runs[1]


@given(schedulers, traffics(num_keys=2), st.booleans())
def test_a_step_is_never_empty_while_requests_wait(
    options: dict[str, Any], traffic: list[tuple[int, ScheduledRequest]], closes: bool
) -> None:
    """But for a wave's admission window."""
    options = options | {"max_wait_s": 0.0}
    run = drive(Scheduler(**options), traffic, closes=closes)
    for now, pack in enumerate(run.packs):
        arrived = sum(1 for at, _ in traffic if at <= now)
        done = sum(1 for name in run.steps if _finish_time(run, name) < now)
        assert bool(pack.running) == (arrived > done)


def _finish_time(run: Run, name: str) -> int:
    return max(now for now, pack in enumerate(run.packs) if name in {e.request_id for e in pack.running})


@given(schedulers, traffics())
def test_fifo_never_overtakes(options: dict[str, Any], traffic: list[tuple[int, ScheduledRequest]]) -> None:
    run = drive(Scheduler(**options | {"policy": "fifo", "step_execution": True}), traffic)
    assert run.admissions == [entry.request_id for _, entry in traffic]


@pytest.mark.parametrize("policy", ["pack", "shortest", "deadline"])
@given(schedulers, traffics(num_keys=2), st.integers(0, 4), st.sampled_from((5, LOOK_AHEAD)))
def test_nobody_is_overtaken_by_many(
    policy: str,
    options: dict[str, Any],
    traffic: list[tuple[int, ScheduledRequest]],
    limit: int,
    look_ahead: int,
) -> None:
    with mock.patch.multiple(policies, MAX_OVERTAKEN=limit, LOOK_AHEAD=look_ahead):
        run = drive(Scheduler(**options | {"policy": policy, "step_execution": True}), traffic)
    assert max(run.overtaken.values(), default=0) < limit + options["max_num_seqs"]


@given(schedulers, traffics(num_keys=2), st.integers(0, 4))
def test_in_the_tail_nobody_is_overtaken_by_more_than_are_in_sight(
    options: dict[str, Any], traffic: list[tuple[int, ScheduledRequest]], limit: int
) -> None:
    with mock.patch.multiple(policies, MAX_OVERTAKEN=limit, LOOK_AHEAD=5):
        run = drive(Scheduler(**options | {"policy": "pack", "step_execution": True}), traffic, closes=True)
    assert max(run.overtaken.values(), default=0) < limit + options["max_num_seqs"] + 5


@given(schedulers, traffics(num_keys=2))
def test_waves_are_alike_and_run_to_their_end(
    options: dict[str, Any], traffic: list[tuple[int, ScheduledRequest]]
) -> None:
    run = drive(Scheduler(**options | {"step_execution": False}), traffic)
    wave: list[str] = []
    for before, pack in zip([None, *run.packs], run.packs, strict=False):
        names = [entry.request_id for entry in pack.running]
        if pack.admitted:
            left = before is not None and any(entry.num_steps > 1 for entry in before.running)
            assert not left, "a wave joined another"
            wave = names
        assert names == (wave if pack.running else [])
        assert len({(entry.batch_key, entry.wave_key) for entry in pack.running}) <= 1
        assert len({entry.num_steps for entry in pack.running}) <= 1


@given(schedulers, traffics(num_keys=2), st.dictionaries(st.integers(0, 24), st.integers(0, 15)))
def test_who_is_taken_out_hurts_nobody(
    options: dict[str, Any], traffic: list[tuple[int, ScheduledRequest]], removals: dict[int, int]
) -> None:
    """Others run all their steps, and nobody takes a place in a wave that is on its way."""
    scheduler, arrivals = Scheduler(**options), [(at, replace(entry)) for at, entry in traffic]
    steps, gone, now = Counter[str](), set[str](), 0
    while arrivals or scheduler.waiting or scheduler.running:
        while arrivals and arrivals[0][0] <= now:
            scheduler.add(arrivals.pop(0)[1])
        before = {entry.request_id for entry in scheduler.running}
        for index, at in removals.items():
            if at == now and scheduler.remove(str(index)):
                gone.add(str(index))
        running = {entry.request_id for entry in scheduler.schedule(float(now)).running}
        assert not running & gone
        if not options["step_execution"] and before - gone:
            assert running == before - gone
        steps.update(running)
        scheduler.advance()
        now += 1
        assert now < 20_000, "the scheduler is stuck"
    for _, entry in traffic:
        if entry.request_id not in gone:
            assert steps[entry.request_id] == entry.num_steps


def test_text_has_a_budget_of_its_own() -> None:
    scheduler = Scheduler(8, max_num_batched_tokens=1000, max_num_text_tokens=100)
    for name, num_text_tokens in [("a", 60), ("b", 40), ("c", 1), ("huge", 101), ("d", 0)]:
        scheduler.add(ScheduledRequest(name, 110, 1, num_text_tokens=num_text_tokens))
    running = []
    while scheduler.waiting:
        running.append([entry.request_id for entry in scheduler.schedule().running])
        scheduler.advance()
    assert running == [["a", "b"], ["c"], ["huge"], ["d"]]


def test_fifo_waits_behind_a_head_that_does_not_fit() -> None:
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=100, policy="fifo")
    for name, tokens in [("a", 60), ("b", 60), ("c", 1)]:
        scheduler.add(ScheduledRequest(name, tokens, 2))
    assert [entry.request_id for entry in scheduler.schedule().running] == ["a"]
    scheduler.advance()
    assert [entry.request_id for entry in scheduler.schedule().running] == ["a"]
    scheduler.advance()
    assert [entry.request_id for entry in scheduler.schedule().running] == ["b", "c"]


def test_an_oversize_request_runs_alone_and_nobody_joins_it() -> None:
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=100, policy="pack")
    scheduler.add(ScheduledRequest("huge", 1000, 3))
    scheduler.add(ScheduledRequest("tiny", 1, 1))
    for _ in range(3):
        assert [entry.request_id for entry in scheduler.schedule().running] == ["huge"]
        scheduler.advance()
    assert [entry.request_id for entry in scheduler.schedule().running] == ["tiny"]


def test_pack_looks_no_further_than_its_window() -> None:
    scheduler = Scheduler(max_num_seqs=1, max_num_batched_tokens=100, policy="pack")
    for index in range(LOOK_AHEAD):
        scheduler.add(ScheduledRequest(str(index), 1, 1))
    scheduler.add(ScheduledRequest("beyond", 90, 90))
    assert [entry.request_id for entry in scheduler.schedule().admitted] == ["0"]


def _wave_scheduler(**options: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 1000,
        "policy": "fifo",
        "step_execution": False,
        "max_wait_s": 5.0,
    }
    return Scheduler(**(defaults | options))


def _add(scheduler: Scheduler, name: str, *, arrival: float, tokens: int = 10, wave: str = "w") -> None:
    scheduler.add(ScheduledRequest(name, tokens, 2, wave_key=wave, arrival=arrival))


def test_a_wave_waits_for_company_until_its_head_has_waited_enough() -> None:
    scheduler = _wave_scheduler()
    _add(scheduler, "a", arrival=100.0)
    assert scheduler.schedule(100.0).running == ()
    _add(scheduler, "b", arrival=104.0)
    assert scheduler.schedule(104.999).running == ()
    assert [entry.request_id for entry in scheduler.schedule(105.0).running] == ["a", "b"]


def test_a_full_wave_does_not_wait() -> None:
    scheduler = _wave_scheduler()
    for name in "abcd":
        _add(scheduler, name, arrival=100.0)
    assert [entry.request_id for entry in scheduler.schedule(100.0).running] == ["a", "b", "c"]


def test_a_wave_without_tokens_for_another_does_not_wait() -> None:
    scheduler = _wave_scheduler(max_num_batched_tokens=25)
    _add(scheduler, "a", arrival=100.0)
    _add(scheduler, "b", arrival=100.0)
    assert [entry.request_id for entry in scheduler.schedule(100.0).running] == ["a", "b"]


def test_a_wave_waits_for_nobody_when_nobody_can_come() -> None:
    scheduler = _wave_scheduler()
    _add(scheduler, "a", arrival=100.0)
    scheduler.no_more_requests = True
    assert [entry.request_id for entry in scheduler.schedule(100.0).running] == ["a"]


def test_a_wave_takes_those_like_its_head_and_leaves_the_others_in_order() -> None:
    scheduler = _wave_scheduler(max_wait_s=0.0, policy="pack")
    for name, wave in [("a", "w"), ("b", "v"), ("c", "w"), ("d", "v")]:
        _add(scheduler, name, arrival=0.0, wave=wave)
    assert [entry.request_id for entry in scheduler.schedule(0.0).running] == ["a", "c"]
    assert [entry.request_id for entry in scheduler.waiting] == ["b", "d"]


def test_under_fifo_an_unlike_request_ends_a_wave_and_its_waiting() -> None:
    scheduler = _wave_scheduler(max_wait_s=100.0)
    for name, wave in [("a", "w"), ("b", "w"), ("c", "v"), ("d", "w")]:
        _add(scheduler, name, arrival=0.0, wave=wave)
    assert [entry.request_id for entry in scheduler.schedule(0.0).running] == ["a", "b"]
    assert [entry.request_id for entry in scheduler.waiting] == ["c", "d"]


@given(schedulers, traffics(num_keys=2))
def test_waves_under_fifo_keep_the_order_of_arrival(
    options: dict[str, Any], traffic: list[tuple[int, ScheduledRequest]]
) -> None:
    run = drive(Scheduler(**options | {"policy": "fifo", "step_execution": False}), traffic)
    assert run.admissions == [entry.request_id for _, entry in traffic]


def test_newcomers_that_are_wanted_more_do_not_hold_up_a_window_for_ever() -> None:
    """None is like another, so that no wave grows; once a deadline has passed a newcomer is wanted more."""
    scheduler = Scheduler(4, 1000, "deadline", step_execution=False, max_wait_s=0.1)
    num_run = 0
    for index in range(125):
        now = 0.04 * index
        entry = ScheduledRequest(str(index), 10, 1, wave_key=index, arrival=now, deadline=now + 0.05)
        scheduler.add(entry)
        num_run += len(scheduler.schedule(now).running)
        scheduler.advance()
    assert num_run == 125 - 3  # one each time from the first that is older than the window


@given(schedulers, traffics(num_keys=2), st.floats(0, 10))
def test_no_wave_waits_longer_than_its_window(
    options: dict[str, Any], traffic: list[tuple[int, ScheduledRequest]], max_wait_s: float
) -> None:
    """When nothing runs, the oldest of those that wait has been there for less than the window."""
    options = options | {"step_execution": False, "max_wait_s": max_wait_s}
    run = drive(Scheduler(**options), traffic)
    for now, pack in enumerate(run.packs):
        waiting = [entry for at, entry in traffic if at <= now and _finish_time(run, entry.request_id) >= now]
        if not pack.running:
            assert all(now - entry.arrival < max_wait_s for entry in waiting)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(-5, 200))
def test_shrink_sends_the_latest_back_to_the_head_in_order(tokens: list[int], budget: int) -> None:
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=1000)
    for index, count in enumerate(tokens):
        scheduler.add(ScheduledRequest(str(index), count, 2))
    scheduler.schedule()
    scheduler.add(ScheduledRequest("newcomer", 1, 1))
    evicted = scheduler.shrink(budget)
    running = [entry.request_id for entry in scheduler.running]
    waiting = [entry.request_id for entry in scheduler.waiting]
    assert running + waiting == [*map(str, range(len(tokens))), "newcomer"]
    assert scheduler.max_num_batched_tokens == max(1, budget)
    kept = sum(tokens[: len(running)])
    assert running
    assert kept <= max(1, budget) or len(running) == 1
    assert len(evicted) == len(tokens) - len(running)
    if evicted:  # no more were sent back than needed
        assert kept + tokens[len(running)] > max(1, budget)


def test_remove_takes_out_waiting_and_running() -> None:
    scheduler = Scheduler(max_num_seqs=1, max_num_batched_tokens=10)
    scheduler.add(ScheduledRequest("a", 1, 2))
    scheduler.add(ScheduledRequest("b", 1, 2))
    scheduler.schedule()
    assert scheduler.remove("a")
    assert scheduler.remove("b")
    assert not scheduler.remove("a")
    assert not scheduler.running
    assert not scheduler.waiting


def test_upcoming_names_those_that_the_policy_would_take() -> None:
    for policy, expected in [("fifo", ["a", "b"]), ("pack", ["c", "b"])]:
        scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=100, policy=policy)  # type: ignore[arg-type]
        for name, tokens in [("a", 1), ("b", 25), ("c", 45)]:
            scheduler.add(ScheduledRequest(name, tokens, 1))
        assert [entry.request_id for entry in scheduler.upcoming(2)] == expected


@given(schedulers, traffics())
def test_upcoming_begins_with_those_that_come_next(
    options: dict[str, Any], traffic: list[tuple[int, ScheduledRequest]]
) -> None:
    scheduler = Scheduler(**options | {"step_execution": True})
    for _, entry in traffic:
        scheduler.add(replace(entry))
    expected: list[ScheduledRequest] = []
    while scheduler.waiting or scheduler.running:
        before = len(scheduler.running)
        admitted = list(scheduler.schedule().admitted)
        if before < scheduler.max_num_seqs and admitted:
            assert not expected or admitted == expected[: len(admitted)]
        expected = scheduler.upcoming(len(traffic))
        assert {entry.request_id for entry in expected} == {e.request_id for e in scheduler.waiting}
        scheduler.advance()


def test_it_needs_no_torch() -> None:
    code = "import sys, offline_diffusion.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- memory ---------------------------------------------------------------------------------------


def _with_decode(name: str, num_tokens: int, decode_tokens: int) -> ScheduledRequest:
    return ScheduledRequest(name, num_tokens, 3, decode_tokens=decode_tokens)


@pytest.mark.parametrize("policy", ["fifo", "pack"])
def test_a_step_leaves_memory_for_the_largest_decode_to_come(policy: Literal["fifo", "pack"]) -> None:
    scheduler = Scheduler(8, 100, policy, memory_tokens=90)
    for name, decode_tokens in (("a", 10), ("b", 30), ("c", 5)):
        scheduler.add(_with_decode(name, 30, decode_tokens))
    # a and b take 60 and the larger decode 30; c would make it 120
    assert [entry.request_id for entry in scheduler.schedule().running] == ["a", "b"]


def test_a_decode_in_flight_takes_its_memory_too() -> None:
    scheduler = Scheduler(8, 100, memory_tokens=100, decoding_tokens=50)
    for name in "abc":
        scheduler.add(_with_decode(name, 25, 10))
    assert [entry.request_id for entry in scheduler.schedule().running] == ["a", "b"]
    scheduler.decoding_tokens = 0
    assert [entry.request_id for entry in scheduler.schedule().running] == ["a", "b", "c"]


def test_a_request_whose_decode_is_large_runs_alone() -> None:
    scheduler = Scheduler(8, 100, memory_tokens=100)
    scheduler.add(_with_decode("a", 20, 500))
    scheduler.add(_with_decode("b", 20, 1))
    assert [entry.request_id for entry in scheduler.schedule().running] == ["a"]
