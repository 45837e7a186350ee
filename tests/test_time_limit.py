"""A job that must end by a certain time stops before, and begins nothing that it could not finish."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from job_fakes import SMALL, CountingEngine, Runner, make_rows, write_jsonl

from offline_diffusion.job import StopFlag
from offline_diffusion.request import RequestMetrics
from offline_diffusion.time_limit import TimeLimit

OPTIONS = SMALL | {"device": "cpu", "max_num_seqs": 2, "scheduling_policy": "fifo"}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("limit_s", "left"), [(3600, 3540), (600, 540), (100, 90), (1, 0.9)])
def test_it_ends_a_minute_before_and_short_ones_a_tenth(limit_s: float, left: float) -> None:
    clock = Clock()
    limit = TimeLimit(limit_s, clock)
    assert limit.seconds_left == pytest.approx(left)
    clock.now += 30
    assert limit.seconds_left == pytest.approx(left - 30)


def test_what_is_too_late_is_told_by_finished_images() -> None:
    clock = Clock()
    limit = TimeLimit(600, clock)  # 540 s
    assert not limit.is_too_late_for(10**9), "nothing is known yet"
    limit.learn(RequestMetrics(steps_run=10, denoise_s=10.0))
    limit.learn(RequestMetrics(steps_run=50, denoise_s=150.0))
    limit.learn(RequestMetrics())  # without steps it tells nothing
    assert not limit.is_too_late_for(269)
    assert limit.is_too_late_for(271)
    clock.now += 500
    assert limit.is_too_late_for(21)
    assert not limit.is_too_late_for(19)


def test_without_a_limit_it_is_never_too_late() -> None:
    limit, stop = TimeLimit(None), StopFlag()
    limit.learn(RequestMetrics(steps_run=1, denoise_s=1e9))
    assert not limit.is_too_late_for(10**9)
    num_threads = threading.active_count()
    with limit.stopping(stop):
        assert threading.active_count() == num_threads


def test_the_request_comes_in_time_once_and_not_after_the_end() -> None:
    stop = StopFlag()
    with TimeLimit(0.1).stopping(stop):
        time.sleep(0.5)
    assert (stop.requests, stop.why) == (1, "time limit")
    with TimeLimit(0.1).stopping(stop):
        time.sleep(0.5)
    assert stop.requests == 1, "a second request would stop without saving"
    other = StopFlag()
    with TimeLimit(0.3).stopping(other):
        pass
    time.sleep(0.5)
    assert other.requests == 0


def test_a_job_out_of_time_saves_its_images_and_goes_on_later(tmp_path: Path) -> None:
    manifest, lines = write_jsonl(tmp_path / "m.jsonl", make_rows(3)), []
    steps = {"num_inference_steps": 400}
    first = Runner()
    first.on_step = lambda engine: time.sleep(0.005)
    summary = first.run(manifest, tmp_path / "out", time_limit=1.5, say=lines.append, **OPTIONS | steps)
    assert summary.interrupted
    assert any(line.startswith("time limit: saving 2 unfinished images") for line in lines)
    assert first.engine is not None
    assert 0 < first.engine.num_image_steps < 800
    second = Runner()
    assert second.run(manifest, tmp_path / "out", **OPTIONS | steps).num_ok == 3
    assert second.engine is not None
    assert first.engine.num_image_steps + second.engine.num_image_steps == 3 * 400


def test_nothing_is_begun_that_would_be_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short images tell how long a step takes: the long ones that wait are left to the next run, unread."""
    rows = make_rows(30)
    monkeypatch.setattr("offline_diffusion.draw_loop.LOOK_AHEAD", 4)
    add_request, added = CountingEngine.add_request, []

    def add(self: CountingEngine, request: Any, *others: Any) -> None:
        added.append(request)
        add_request(self, request, *others)

    monkeypatch.setattr(CountingEngine, "add_request", add)
    rows[1]["num_inference_steps"] = 30  # goes on while others are left
    for row in rows[2:]:
        row["num_inference_steps"] = 2_000
    manifest, lines = write_jsonl(tmp_path / "m.jsonl", rows), []
    first = Runner()

    def on_step(engine: CountingEngine) -> None:
        time.sleep(0.05)

    first.on_step = on_step
    started = time.monotonic()
    summary = first.run(manifest, tmp_path / "out", time_limit=60, say=lines.append, **OPTIONS)
    assert summary.interrupted
    assert (summary.num_ok, sum(first.finished.values())) == (2, 2)
    assert "time limit: too little time is left to begin more images" in lines
    assert time.monotonic() - started < 40, "it must not wait for the end with nothing to do"
    assert first.engine is not None
    assert first.engine.num_image_steps == 2 + 30
    assert len(added) < 10, "the rest of the manifest must not be read only to be dropped"


def test_an_image_longer_than_every_limit_is_finished_in_the_end(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(1))
    steps = {"num_inference_steps": 60}
    num_runs = 0
    while True:
        runner = Runner()
        runner.on_step = lambda engine: time.sleep(0.02)
        num_runs += 1
        summary = runner.run(manifest, tmp_path / "out", time_limit=0.9, **OPTIONS | steps)
        if not summary.interrupted:
            break
        assert num_runs < 30
    assert num_runs > 1
    assert summary.num_ok == 1
