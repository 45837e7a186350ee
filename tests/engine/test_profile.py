"""Idle shares of hand-made traces, device times from made-up events, and a trace of the fake engine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fakes import make_engine, make_request

from offline_diffusion.engine import profile as profile_module
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.profile import Profiler, _DeviceClock, device_idle_share

Event = dict[str, Any]


def event(start: float, end: float, cat: str = "kernel", stream: int = 7) -> Event:
    return {"ph": "X", "cat": cat, "name": "k", "ts": start, "dur": end - start, "pid": 0, "tid": stream}


@pytest.mark.parametrize(
    ("events", "share"),
    [
        ([event(10, 20)], 0.0),
        ([event(0, 10), event(10, 20)], 0.0),
        ([event(0, 40), event(60, 100)], 0.2),
        ([event(60, 100), event(0, 40)], 0.2),  # a trace is not in order
        ([event(0, 100), event(10, 20, stream=8)], 0.0),  # beside a longer one
        ([event(0, 100), event(10, 20, stream=8), event(150, 200)], 0.25),  # the longer one still counts
        ([event(0, 50), event(40, 80, "gpu_memcpy", 8), event(90, 100, "gpu_memset", 9)], 0.1),
        ([event(0, 10), event(0, 1000, "cpu_op"), event(0, 1000, "gpu_user_annotation"), event(30, 40)], 0.5),
        ([event(5, 5)], 0.0),
    ],
)
def test_idle_is_what_no_stream_fills(events: list[Event], share: float) -> None:
    """Catches sums in place of unions, streams taken one by one, and host events taken for work."""
    assert device_idle_share(events) == pytest.approx(share)


def test_a_trace_without_a_device_has_no_idle_share() -> None:
    meta = {"ph": "M", "name": "process_name", "pid": 1}
    assert device_idle_share([meta, event(0, 10, "cpu_op"), event(0, 10, "user_annotation")]) is None
    assert device_idle_share([]) is None


class FakeEvent:
    """``torch.cuda.Event``: done once the device's time, in milliseconds, has passed it."""

    device_ms = 0.0  # where the device is
    queued_ms = 0.0  # when it will be through with what it was given

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = float("inf")

    def record(self) -> None:
        self.at = FakeEvent.queued_ms

    def query(self) -> bool:
        return FakeEvent.device_ms >= self.at

    def synchronize(self) -> None:
        FakeEvent.device_ms = max(FakeEvent.device_ms, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query(), "the time of an event that has not passed is an error"
        return end.at - self.at


def test_device_seconds_are_booked_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock = _DeviceClock()
    for milliseconds in (100, 300):
        with clock.timed("denoise"):
            FakeEvent.queued_ms += milliseconds
        with clock.timed("solver"):
            FakeEvent.queued_ms += 10
    clock.settle_finished()
    assert (clock.seconds, FakeEvent.device_ms) == ({}, 0.0)
    FakeEvent.device_ms = 105
    clock.settle_finished()
    assert (clock.seconds, FakeEvent.device_ms) == ({"denoise": pytest.approx(0.1)}, 105)
    clock.settle()
    assert clock.seconds == {"denoise": pytest.approx(0.4), "solver": pytest.approx(0.02)}


@pytest.fixture
def short_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "WARM_UP_STEPS", 3)
    monkeypatch.setattr(profile_module, "TRACED_STEPS", 4)


def run(engine: Engine, profiler: Profiler, num_steps: int) -> None:
    """Steps a fake request ``num_steps`` times, as a job does."""
    profiler.attach(engine)
    engine.add_request(make_request("a", num_inference_steps=num_steps))
    with profiler.stage("engine"):
        while engine.has_unfinished:
            engine.step()
            profiler.next_step()


def read_trace(folder: Path) -> list[Event]:
    (path,) = folder.glob("*.trace.json.gz")
    events: list[Event] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.usefixtures("short_trace")
@pytest.mark.parametrize(("num_steps", "num_traced"), [(20, 4), (5, 2), (2, 0)])
def test_the_trace_is_of_some_steps_after_the_first(num_steps: int, num_traced: int, tmp_path: Path) -> None:
    """Catches a trace that never ends or never begins, and one that a short run does not write."""
    profiler = Profiler(tmp_path, task=3)
    run(make_engine(), profiler, num_steps)
    summary = profiler.finish(interrupted=False)
    assert summary is not None
    assert (summary["num_steps"], summary["num_traced_steps"]) == (num_steps, num_traced)
    assert profiler.warnings == []
    assert (summary["trace"] is not None) == (num_traced > 0)
    assert json.loads((tmp_path / "task-00003.json").read_text()) == summary
    if num_traced:
        events = read_trace(tmp_path)
        assert sum(event["name"] == "denoise" for event in events) == num_traced


@pytest.mark.usefixtures("short_trace")
def test_operators_lie_in_the_ranges_of_their_stage(tmp_path: Path) -> None:
    """Catches ranges that are opened elsewhere than around the work."""
    profiler = Profiler(tmp_path, task=0)
    run(make_engine(), profiler, 7)
    profiler.finish(interrupted=False)
    events = read_trace(tmp_path)
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    assert len(steps) == 4
    for step in steps:
        inside = [event["name"] for event in events if within(event, step)]
        assert inside.index("pack") < inside.index("denoise") < inside.index("solver")
    (products, *_) = [event for event in events if event["name"] == "aten::searchsorted"]
    names = {event["name"] for event in events if within(products, event)}
    assert "denoise" in names
    assert not names & {"pack", "solver"}


def within(inner: Event, outer: Event) -> bool:
    return (
        inner["tid"] == outer["tid"]
        and outer["ts"] <= inner["ts"]
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    )


def test_before_drawing_there_is_nothing_to_write(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "profile", task=0)
    with profiler.stage("scan"):
        pass
    assert profiler.finish(interrupted=True) is None
    assert not (tmp_path / "profile").exists()


@pytest.mark.usefixtures("short_trace")
def test_a_fault_of_the_profiling_library_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches errors that pass: the run would end with them."""

    def broken(_: Any) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr(profile_module, "chrome_trace", broken)
    profiler = Profiler(tmp_path, task=0)
    run(make_engine(), profiler, 12)
    summary = profiler.finish(interrupted=False)
    assert summary is not None
    assert summary["trace"] is None
    assert profiler.warnings == ["profile: RuntimeError: made up"]


def test_without_a_profile_an_engine_has_no_stages_to_time() -> None:
    """Catches hooks that cost something when nobody asked: the null context is one object."""
    runner = make_engine().runner
    assert runner.stages.stage("denoise") is runner.stages.stage("solver")
