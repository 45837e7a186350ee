"""The simulation against queueing theory, queues worked out by hand, and a plain loop."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
from bench_fakes import CAPABILITIES, asked, engine_of, trace_of
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.bench.arrivals import arrival_times
from offline_diffusion.bench.replay import Replay
from offline_diffusion.bench.simulate import SimulatedClock, SimulatedEngine
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.cost import CostModel

A_SECOND_A_STEP = CostModel(1.0, 0.0, 0.0)


def test_poisson_arrivals_at_one_server_wait_as_long_as_theory_says() -> None:
    """M/D/1: the mean wait is rho·D / (2·(1 - rho)), after Pollaczek and Khinchine."""
    rate, service, num_steps = 0.7, 1.0, 4
    engine, clock = engine_of(CostModel(service / num_steps, 0, 0), seqs=1)
    trace = trace_of(arrival_times("poisson", 20_000, rate, seed=5), steps=num_steps)
    replayed = Replay(engine, clock).run(trace)
    rho = rate * service
    wait = statistics.fmean(record.queue for record in replayed.records)
    assert wait == pytest.approx(rho * service / (2 * (1 - rho)), rel=0.05)
    assert replayed.device_s / replayed.duration == pytest.approx(rho, rel=0.02)


def test_a_request_alone_takes_the_sum_of_its_costs() -> None:
    cost = CostModel(fixed_s=1, token_s=0.1, square_s=0.01, image_s=2, pixel_s=0.001, prompt_s=5)
    engine, clock = engine_of(cost)
    [record] = Replay(engine, clock).run([asked(0, 3.0, side=32, steps=6)]).records
    # 4 image tokens and 1 of text, 1024 px: 5 + 6 · (1 + 0.5 + 0.25) + 2 + 1.024
    assert record.latency == pytest.approx(5 + 6 * 1.75 + 3.024)
    assert record.queue == 0
    assert record.encode_s == 5
    assert record.decode_s == pytest.approx(3.024)


def test_a_prompt_is_encoded_once() -> None:
    engine, clock = engine_of(CostModel(1, 0, 0, prompt_s=10))
    records = Replay(engine, clock).run([asked(0, 0), asked(1, 50), asked(2, 100, prompt="else")]).records
    assert [record.latency for record in records] == [11, 1, 11]


def test_a_step_has_room_for_so_many() -> None:
    """Three requests of 5 tokens and 2 steps, a budget of 10: two run, then the third."""
    engine, clock = engine_of(A_SECOND_A_STEP, budget=10)
    replayed = Replay(engine, clock).run(trace_of([0, 0, 0.5], side=32, steps=2))
    assert [record.finished for record in replayed.records] == [2, 2, 4]
    assert [record.started for record in replayed.records] == [0, 0, 2]
    assert sum(span.num_images for span in replayed.spans) == 6
    assert sum(span.num_tokens for span in replayed.spans) == 30


def test_who_comes_between_steps_joins_at_the_next() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP)
    records = Replay(engine, clock).run([asked(0, 0, steps=10), asked(1, 4.5, steps=3)]).records
    assert [(record.started, record.finished) for record in records] == [(0, 10), (5, 8)]


def test_in_request_mode_who_comes_late_waits_for_the_next_wave() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP, step_execution=False)
    records = Replay(engine, clock).run([asked(0, 0, steps=10), asked(1, 4.5, steps=10)]).records
    assert [(record.started, record.finished) for record in records] == [(0, 10), (10, 20)]


def test_a_wave_waits_for_company() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP, step_execution=False, request_batch_max_wait_ms=2000)
    records = Replay(engine, clock).run(trace_of([0, 1.5, 30], steps=10)).records
    assert [record.finished for record in records] == pytest.approx([12, 12, 42], abs=0.002)


def test_only_like_requests_share_a_step_where_they_must() -> None:
    trace = [asked(0, 0, steps=4), asked(1, 0, side=32, steps=4), asked(2, 0, steps=2)]
    finished = {}
    for batching in ("packed", "same_shape"):
        engine, clock = engine_of(A_SECOND_A_STEP, policy="pack", batching=batching)
        finished[batching] = [record.finished for record in Replay(engine, clock).run(trace).records]
    assert finished == {"packed": [4, 4, 2], "same_shape": [4, 8, 2]}


def test_the_earliest_deadline_goes_first_and_counts_from_the_arrival() -> None:
    trace = trace_of([0, 1, 2], steps=10)
    for request, slo_ms in zip(trace, (1e6, 40_000, 25_000), strict=True):
        request.slo_ms = slo_ms
    engine, clock = engine_of(A_SECOND_A_STEP, seqs=1, policy="deadline")
    records = Replay(engine, clock).run(trace).records
    assert [record.finished for record in records] == [10, 30, 20]
    assert all(record.met_slo for record in records)


def test_who_waits_before_the_engine_ages_all_the_same() -> None:
    """More than the engine looks at: each still counts from its own arrival."""
    trace = [*(asked(row, 0.0) for row in range(300)), asked(300, 5.0)]
    for request in trace:
        request.slo_ms = 400_000
    engine, clock = engine_of(A_SECOND_A_STEP, seqs=1, policy="shortest")
    seen = {}
    add = engine.scheduler.add

    def adding(entry: Any) -> None:
        seen[entry.request_id] = (entry.arrival, entry.deadline)
        add(entry)

    engine.scheduler.add = adding  # type: ignore[method-assign]
    Replay(engine, clock).run(trace)
    assert seen["299-0"] == (0.0, 400.0)
    assert seen["300-0"] == (5.0, 405.0)


def test_constants_are_those_of_the_engine() -> None:
    from offline_diffusion.bench import simulate
    from offline_diffusion.engine import engine, prompt_cache

    assert simulate.POLL_S == engine.WAVE_POLL_S
    assert simulate.PROMPT_CACHE_TOKENS == prompt_cache.PROMPT_CACHE_TOKENS


def brute_force(jobs: list[tuple[float, int, int]], budget: int) -> list[float]:
    """First in first out, a step after the other: arrival, tokens and steps of each; when each is done."""
    waiting, running, now = list(range(len(jobs))), {}, 0.0
    finished = [0.0] * len(jobs)
    while waiting or running:
        if not running and jobs[waiting[0]][0] > now:
            now = jobs[waiting[0]][0]
        while waiting and jobs[waiting[0]][0] <= now:
            tokens = sum(jobs[index][1] for index in running)
            if running and tokens + jobs[waiting[0]][1] > budget:
                break
            index = waiting.pop(0)
            running[index] = jobs[index][2]
        now += 1 + sum(jobs[index][1] for index in running)
        for index in list(running):
            running[index] -= 1
            if not running[index]:
                finished[index] = now
                del running[index]
    return finished


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(5, 40),
)
def test_taking_steps_at_once_changes_nothing(jobs: list[tuple[int, int, int]], budget: int) -> None:
    jobs.sort()
    engine, clock = engine_of(CostModel(1, 1, 0), budget=budget)
    trace = [asked(row, at, side=16 * side, steps=n) for row, (at, side, n) in enumerate(jobs)]
    replayed = Replay(engine, clock).run(trace)
    expected = brute_force([(float(at), side**2 + 1, n) for at, side, n in jobs], budget)
    assert [record.finished for record in replayed.records] == pytest.approx(expected)


class StepByStep(SimulatedEngine):
    """Takes no steps at once."""

    def _run(self, running: Any, *, may_repeat: bool) -> None:
        super()._run(running, may_repeat=False)


@given(
    st.lists(
        st.tuples(st.integers(0, 90), st.integers(1, 4), st.integers(1, 9), st.integers(1, 300)),
        min_size=1,
        max_size=15,
    ),
    st.integers(10, 60),
    st.sampled_from(["fifo", "pack", "shortest", "deadline"]),
    st.sampled_from(
        [
            {},
            {"batching": "same_shape"},
            {"step_execution": False},
            {"max_num_seqs": 1, "step_execution": False},
        ]
    ),
)
def test_under_no_policy_do_steps_taken_at_once_change_who_is_done_when(
    jobs: list[tuple[int, int, int, int]], budget: int, policy: Any, options: dict[str, Any]
) -> None:
    trace = [asked(row, at, side=16 * s, steps=n) for row, (at, s, n, _) in enumerate(sorted(jobs))]
    for request, (*_, slo_s) in zip(trace, sorted(jobs), strict=True):
        request.slo_ms = slo_s * 1000
    config = EngineConfig(max_num_batched_tokens=budget, scheduling_policy=policy, **options)
    finished = []
    for kind in (SimulatedEngine, StepByStep):
        clock = SimulatedClock()
        engine = kind(CAPABILITIES, config, CostModel(1, 1, 0), clock)  # whole seconds: sums are exact
        finished.append([record.finished for record in Replay(engine, clock).run(trace).records])
    assert finished[0] == finished[1]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_26_000_requests_at_a_time(rate: float) -> None:
    """As many as GenTD26 has, nearly idle and overloaded; the runner's own timeout is the limit."""
    rng, times = random.Random(0), arrival_times("bursty", 26_000, rate)
    sides = rng.choices((512, 768, 1024, 1536), (15, 25, 45, 15), k=len(times))
    cost = CostModel(0.004, 1e-5, 1.4e-10, 0.0, 6e-8, 0.002)
    engine, clock = engine_of(cost, budget=67_584, policy="pack")
    trace = [
        asked(row, at, side=side, steps=30) for row, (at, side) in enumerate(zip(times, sides, strict=True))
    ]
    replayed = Replay(engine, clock).run(trace)
    assert all(record.is_ok for record in replayed.records)
    assert sum(span.num_images for span in replayed.spans) == 26_000 * 30


@pytest.mark.parametrize("policy", ["fifo", "pack"])
def test_busy_time_and_steps_are_those_of_the_spans(policy: str) -> None:
    rng = random.Random(1)
    jobs = sorted((rng.uniform(0, 100), rng.randint(1, 4), rng.randint(1, 9)) for _ in range(200))
    engine, clock = engine_of(CostModel(0.01, 0.001, 0), budget=40, policy=policy)
    trace = [asked(row, at, side=16 * side, steps=n) for row, (at, side, n) in enumerate(jobs)]
    replayed = Replay(engine, clock).run(trace)
    assert sum(span.num_images for span in replayed.spans) == sum(steps for *_, steps in jobs)
    assert sum(span.num_tokens for span in replayed.spans) == sum((s * s + 1) * n for _, s, n in jobs)
    assert replayed.device_s == pytest.approx(sum(span.end - span.start for span in replayed.spans))
    assert all(record.is_ok for record in replayed.records)
