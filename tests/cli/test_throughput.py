"""What a run reached is remembered and found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from offline_diffusion.cli.throughput import ThroughputMeter, ThroughputRecord, recall, remember
from offline_diffusion.progress import Phase, Progress


def progress(phase: Phase, num_done: int, work_done: float) -> Progress:
    return Progress(phase=phase, num_done=num_done, work_done=work_done)


def test_the_rate_leaves_out_loading_and_resumed_work() -> None:
    meter = ThroughputMeter()
    meter.observe(progress("loading", 0, 0.0), 0.0)
    meter.observe(progress("running", 100, 1e15), 50.0)
    meter.observe(progress("running", 110, 2e15), 58.0)
    meter.observe(progress("finishing", 120, 3e15), 60.0)
    assert meter.measured() == (pytest.approx(2e15 / 10), 20)


@pytest.mark.parametrize("reports", [[], [(0.0, 1.0)], [(0.0, 1.0), (0.5, 2.0)], [(0.0, 1.0), (9.0, 1.0)]])
def test_too_little_is_no_measurement(reports: list[tuple[float, float]]) -> None:
    meter = ThroughputMeter()
    for now, work in reports:
        meter.observe(progress("running", 0, work), now)
    assert meter.measured() is None


def test_the_newest_record_of_the_model_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter((5.0, 9.0, 10.0, 11.0))
    monkeypatch.setattr("time.time", lambda: next(clock))
    for model, device, rate in (("m", "A", 1.0), ("m", "B", 2.0), ("n", "A", 3.0)):
        remember(model, device, rate, 1, folder=tmp_path)
    assert recall("m", tmp_path) == ThroughputRecord("m", "B", 2.0, 1, 9.0)
    remember("m", "A", 4.0, 1, folder=tmp_path)
    assert recall("m", tmp_path) == ThroughputRecord("m", "A", 4.0, 1, 11.0)
    assert recall("other", tmp_path) is None
    assert len(list(tmp_path.iterdir())) == 3


def test_damage_is_no_fault_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"model": "m"}')
    assert recall("m", tmp_path) is None
    remember("m", "A", 1.0, 1, folder=tmp_path / "a.json" / "no folder")
    assert recall("m", tmp_path / "none") is None
