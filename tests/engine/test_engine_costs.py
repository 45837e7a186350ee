"""What the engine tells its cost model, with a clock that the fake model moves by known terms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_fakes import Clock, FakeModel, make_engine, make_request, random_requests

from offline_diffusion.engine import stats
from offline_diffusion.engine.stats import NUM_WARM_UP_STEPS, EngineStats, StepShare, StepTimer, WorkCounts
from offline_diffusion.models.base import PackedInput
from offline_diffusion.request import RequestMetrics
from offline_diffusion.stages import NO_STAGES

FIXED, TOKEN, SQUARE, IMAGE, PIXEL, PROMPT = 5.0, 0.7, 0.02, 3.0, 0.004, 11.0
"""Seconds; so large that what is believed beforehand weighs nothing."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=clock))
    return clock


def timed_model(clock: Clock) -> FakeModel:
    def on_denoise(batch: PackedInput) -> None:
        lengths = batch.img_attention.keys.cu_seqlens.diff()
        clock.now += FIXED + TOKEN * int(lengths.sum()) + SQUARE * int((lengths**2).sum())

    def on_decode(height: int, width: int) -> None:
        clock.now += IMAGE + PIXEL * height * width

    def on_encode(text: str) -> None:
        clock.now += PROMPT

    model = FakeModel()
    model.on_denoise, model.on_decode, model.on_encode = on_denoise, on_decode, on_encode
    return model


def test_the_terms_of_a_run_are_found_again(clock: Clock) -> None:
    engine = make_engine(timed_model(clock), max_num_seqs=4)
    list(engine.generate(random_requests(2, count=150)))
    fitted = engine.costs().fit()
    assert fitted is not None
    found = (fitted.fixed_s, fitted.token_s, fitted.square_s, fitted.image_s, fitted.pixel_s, fitted.prompt_s)
    assert found == pytest.approx((FIXED, TOKEN, SQUARE, IMAGE, PIXEL, PROMPT), rel=0.01)


def test_the_terms_are_found_again_where_the_engine_idles_between_requests(clock: Clock) -> None:
    engine = make_engine(timed_model(clock), max_num_seqs=4)
    requests = random_requests(2, count=150)
    for start in range(0, len(requests), 2):
        list(engine.generate(requests[start : start + 2]))
        clock.now += 1000
    fitted = engine.costs().fit()
    assert fitted is not None
    found = (fitted.fixed_s, fitted.token_s, fitted.square_s, fitted.image_s, fitted.pixel_s, fitted.prompt_s)
    assert found == pytest.approx((FIXED, TOKEN, SQUARE, IMAGE, PIXEL, PROMPT), rel=0.01)


def test_all_time_after_the_first_steps_is_told_once(clock: Clock) -> None:
    """Whoever comes and goes: laps, pauses and steps leave no gap and do not overlap."""
    engine = make_engine(timed_model(clock), max_num_seqs=4)
    for request in random_requests(3, count=40):
        engine.add_request(request)
    while engine.stats.num_steps < NUM_WARM_UP_STEPS:
        engine.step()
    start, told = clock.now, engine.costs().seconds
    while engine.has_unfinished:
        engine.step()
        clock.now += 0.125  # spent by the caller
    assert engine.costs().seconds - told == pytest.approx(clock.now - 0.125 - start)


def test_time_in_which_nothing_runs_is_not_told(clock: Clock) -> None:
    engine = make_engine(timed_model(clock))
    for name in "ab":
        engine.add_request(make_request(name, name, num_inference_steps=20))
        while engine.has_unfinished:
            engine.step()
        clock.now += 1e6
        engine.step()
    assert engine.costs().seconds < 1e5
    assert engine.costs().num_steps == 40 - NUM_WARM_UP_STEPS


class FakeEvent:
    """A CUDA event whose device is ``clock``; ``when`` None until it is recorded."""

    clock: Clock

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.when: float | None = None

    def record(self) -> None:
        self.when = self.clock()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        assert self.when is not None
        return float(other.when - self.when) * 1000


def test_on_a_gpu_decodes_are_told_with_the_steps_they_run_beside(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "clock", clock, raising=False)
    counts, totals, metrics = WorkCounts(), EngineStats(), RequestMetrics()
    runner = SimpleNamespace(counts=counts, stages=NO_STAGES)
    timer = StepTimer(torch.device("cuda"), totals, runner)
    for number in range(NUM_WARM_UP_STEPS + 40):
        clock.now += 0.5  # the host prepares, the device waits
        if number % 4 == 3:
            counts.num_images += 1
            counts.num_pixels += 100
            timer.lap()  # where stages overlap it tells nothing
        start = timer.begin()
        clock.now += 1.0 + (number % 2) + (10.0 if number % 4 == 3 else 0.0)
        timer.end(start, [StepShare(metrics, 100 + 100 * (number % 2), 0)])
    timer.settle_all()
    fitted = timer.costs.fit()
    assert fitted is not None
    assert fitted.fixed_s == pytest.approx(0.5, rel=0.2)
    assert fitted.token_s == pytest.approx(0.01, rel=0.1)
    assert fitted.pixel_s * 100 + fitted.image_s == pytest.approx(10.0, rel=0.05)
    assert timer.costs.seconds == pytest.approx(40 * 2.0 + 10 * 10.0)
    assert totals.device_s == metrics.device_s == pytest.approx(43 * 1.0 + 21 + 10 * 10.0)
    counts.num_images += 1  # a last decode that no step follows
    clock.now += 7.0
    timer.pause()
    clock.now += 1e6
    timer.pause()
    timer.settle_all()
    assert timer.costs.seconds == pytest.approx(40 * 2.0 + 10 * 10.0 + 7.0)
    assert totals.device_s == pytest.approx(43 * 1.0 + 21 + 10 * 10.0)
