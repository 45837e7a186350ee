"""What a run reached is remembered and found again."""

from __future__ import annotations

import json
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
    assert meter.measured() == (pytest.approx(2e15 / 10), 20, 10.0)


@pytest.mark.parametrize(
    ("seconds", "num_images", "is_enough"),
    [
        (9.9, 49, False), (10.0, 1, True), (1.0, 50, True), (0.9, 5_000, False), (2.0, 2, False),
        (3_600.0, 49, True),
    ],
)  # fmt: skip
def test_ten_seconds_or_fifty_images_are_enough(seconds: float, num_images: int, is_enough: bool) -> None:
    meter = ThroughputMeter()
    meter.observe(progress("running", 7, 1e12), 3.0)
    meter.observe(progress("finishing", 7 + num_images, 3e12), 3.0 + seconds)
    assert (meter.measured() is not None) is is_enough


@pytest.mark.parametrize("reports", [[], [(0.0, 1.0)], [(0.0, 1.0), (99.0, 1.0)]])
def test_no_work_is_no_measurement(reports: list[tuple[float, float]]) -> None:
    meter = ThroughputMeter()
    for now, work in reports:
        meter.observe(progress("running", 0, work), now)
    assert meter.measured() is None


def test_the_newest_record_of_the_model_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter((5.0, 9.0, 10.0, 11.0))
    monkeypatch.setattr("time.time", lambda: next(clock))
    for model, device, rate in (("m", "A", 1.0), ("m", "B", 2.0), ("n", "A", 3.0)):
        remember(model, device, rate, 1, 20.0, folder=tmp_path)
    assert recall("m", tmp_path) == ThroughputRecord("m", "B", 2.0, 1, 20.0, 9.0)
    remember("m", "A", 4.0, 1, 20.0, folder=tmp_path)
    assert recall("m", tmp_path) == ThroughputRecord("m", "A", 4.0, 1, 20.0, 11.0)
    assert recall("other", tmp_path) is None
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("device", ["A", "B"])
@pytest.mark.parametrize(("seconds", "rate"), [(24.0, 1.0), (25.0, 2.0), (1_000.0, 2.0)])
def test_a_much_shorter_run_does_not_take_a_records_place(
    tmp_path: Path, device: str, seconds: float, rate: float
) -> None:
    remember("m", "A", 1.0, 500, 100.0, folder=tmp_path)
    remember("m", device, 2.0, 50, seconds, folder=tmp_path)
    record = recall("m", tmp_path)
    assert record is not None
    assert record.flops_per_s == rate


def test_a_record_of_an_earlier_version_is_passed_over(tmp_path: Path) -> None:
    remember("m", "A", 1.0, 1, 20.0, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    old = {name: value for name, value in json.loads(path.read_text()).items() if name != "seconds"}
    path.write_text(json.dumps(old))
    assert recall("m", tmp_path) is None
    remember("m", "A", 2.0, 1, 20.0, folder=tmp_path)
    assert recall("m", tmp_path) is not None


def test_damage_is_no_fault_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"model": "m"}')
    assert recall("m", tmp_path) is None
    remember("m", "A", 1.0, 1, 20.0, folder=tmp_path / "a.json" / "no folder")
    assert recall("m", tmp_path / "none") is None


def test_a_user_without_a_home_has_no_records_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    remember("m", "A", 4.0, 1, 20.0)
    assert recall("m") is None
