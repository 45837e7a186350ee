"""The loop of a replay: open and closed, limits, several images, failures, and an early end."""

from __future__ import annotations

import math
import time

import pytest
from bench_fakes import CAPABILITIES, asked, engine_of, trace_of
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.bench.replay import MAX_QUEUED, Replay, WallClock, resolve_trace
from offline_diffusion.bench.trace import TraceRequest
from offline_diffusion.data.rows import ManifestRow, RowDefaults
from offline_diffusion.engine.cost import CostModel
from offline_diffusion.request import RequestMetrics, RequestOutput, SamplingParams

A_SECOND_A_STEP = CostModel(1.0, 0.0, 0.0)


def test_an_open_loop_honours_the_times_whatever_the_engine_does() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP, seqs=1)
    records = Replay(engine, clock).run(trace_of([0, 1, 1, 20], steps=3)).records
    assert [record.arrival for record in records] == [0, 1, 1, 20]
    assert [record.finished for record in records] == [3, 6, 9, 23]
    assert [record.queue for record in records] == [0, 2, 5, 0]


def test_a_closed_loop_ignores_the_times() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP)
    replay = Replay(engine, clock, closed_loop=True, max_concurrency=2)
    records = replay.run(trace_of([0, 1000, 2000, 3000], steps=3)).records
    assert [record.arrival for record in records] == [0, 0, 3, 3]
    assert [record.latency for record in records] == [3, 3, 3, 3]


def test_without_a_limit_a_closed_loop_has_all_at_once() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP)
    replayed = Replay(engine, clock, closed_loop=True).run(trace_of([0, 5, 9], steps=3))
    assert replayed.duration == 3


def test_in_an_open_loop_the_wait_for_a_place_counts() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP)
    records = Replay(engine, clock, max_concurrency=1).run(trace_of([0, 1], steps=3)).records
    assert [record.queue for record in records] == [0, 2]
    assert [record.latency for record in records] == [3, 5]


def test_a_request_is_done_with_its_last_image_and_began_with_its_first() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP, seqs=2)
    seen: list[int] = []
    replayed = Replay(engine, clock, observer=seen.append).run([asked(0, 0, steps=3, count=5)])
    [record] = replayed.records
    assert (record.started, record.finished, record.num_images) == (0, 9, 5)
    assert seen == [1]


def test_a_long_queue_waits_before_the_engine_and_its_wait_counts() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP, seqs=1)
    longest = 0

    def stopped() -> bool:
        nonlocal longest
        longest = max(longest, engine.num_waiting)
        return False

    count = MAX_QUEUED + 50
    replayed = Replay(engine, clock, stopped=stopped).run(trace_of([0] * count))
    assert longest == MAX_QUEUED - 1  # one of them has joined the step
    assert [record.queue for record in replayed.records] == list(range(count))
    assert replayed.spans[0].num_waiting == count - 1


def test_an_early_end_keeps_what_is_done() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP, seqs=1)
    replay = Replay(engine, clock, stopped=lambda: clock.now >= 5)
    replayed = replay.run(trace_of([0, 1, 4, 100], steps=3))
    assert replayed.stopped
    assert replayed.num_unfinished == 2
    assert [record.id for record in replayed.records] == ["r0", "r1"]


def test_the_engine_must_not_begin_at_zero() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP)
    clock.now = 1234.5
    records = Replay(engine, clock).run(trace_of([0, 2], steps=1)).records
    assert [(record.started, record.finished) for record in records] == [(0, 1), (2, 3)]


@given(st.floats(0, 1e6), st.lists(st.floats(0, 1e4), min_size=1, max_size=5))
def test_no_rounding_of_times_keeps_it_waiting(start: float, arrivals: list[float]) -> None:
    engine, clock = engine_of(A_SECOND_A_STEP)
    clock.now = start
    num_asked = 0

    def stopped() -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked > 1000

    assert not Replay(engine, clock, stopped=stopped).run(trace_of(sorted(arrivals))).stopped


class FailingEngine:
    """Hands back everything as failed, but for the first of a request."""

    def __init__(self) -> None:
        self.inner, self.clock = engine_of(A_SECOND_A_STEP)
        self.stats, self.has_unfinished, self.num_waiting = self.inner.stats, True, 0
        self._added: list[RequestOutput] = []

    def add_request(self, request: object, *, arrival: float) -> None:
        ok = request.request_id.endswith("-0")  # type: ignore[attr-defined]
        metrics = RequestMetrics(steps_run=1 if ok else 0)
        status = "ok" if ok else "failed"
        self._added.append(RequestOutput(request, status, None, metrics, "nan", "is broken"))  # type: ignore[arg-type]

    def step(self) -> list[RequestOutput]:
        self.clock.now += 1
        outputs, self._added = self._added, []
        return outputs


def test_a_request_of_which_an_image_fails_has_failed() -> None:
    engine = FailingEngine()
    records = Replay(engine, engine.clock).run([asked(0, 0, count=2), asked(1, 0, count=1)]).records
    assert records[0].error == "nan: is broken"
    assert not records[0].is_ok
    assert records[1].is_ok


def test_what_the_model_cannot_draw_is_a_fault() -> None:
    def row(number: int, height: int) -> ManifestRow:
        params = SamplingParams(height=height, width=32, num_images_per_prompt=2)
        return ManifestRow(number, f"id-{number}", "trace.jsonl", number + 1, "", "a fox", params, {})

    requests = [TraceRequest(row(0, 32), 0.0, 500.0), TraceRequest(row(1, 33), 1.0)]
    [found], [fault] = resolve_trace(requests, CAPABILITIES, RowDefaults())
    assert (found.id, found.slo_ms, len(found.images)) == ("id-0", 500.0, 2)
    assert str(fault) == "trace.jsonl:2: height=33: height must be a multiple of 16, got 33"
    rounded, faults = resolve_trace(requests, CAPABILITIES, RowDefaults(on_bad_size="round"))
    assert not faults
    assert rounded[1].record().height == 32


def test_the_wall_clock_sleeps_and_never_backwards() -> None:
    clock = WallClock()
    then = clock() + 0.01
    clock.wait_until(then)
    assert clock() >= then
    start = time.perf_counter()
    clock.wait_until(-math.inf)
    assert clock() >= start


@pytest.mark.parametrize("closed_loop", [False, True])
def test_an_empty_trace_takes_no_time(closed_loop: bool) -> None:
    engine, clock = engine_of(A_SECOND_A_STEP)
    replayed = Replay(engine, clock, closed_loop=closed_loop).run([])
    assert (replayed.duration, list(replayed.records)) == (0, [])
