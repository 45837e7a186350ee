"""What steps cost is remembered and found again, by those whom it serves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offline_diffusion
from offline_diffusion.cli import cost_record
from offline_diffusion.cli.cost_record import CostRecord, recall, remember
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.cost import CostModel, MeasuredCost

TERMS = CostModel(0.01, 2e-5, 3e-9, 0.004, 5e-8, 0.02)
COST = MeasuredCost(
    model=TERMS, num_steps=300, seconds=100.0, num_images=500, max_num_batched_tokens=8_192, dtype="float32"
)


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"model": "m", "device": "cpu"} | options)


def rate_found(folder: Path, **options: Any) -> float | None:
    record = recall(config(**options), folder=folder)
    return None if record is None else record.fixed_s


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_record, "device_name", lambda device: "CPU" if device == "cpu" else "H200")


def keep(
    folder: Path, fixed_s: float, *, seconds: float = 100.0, dtype: str = "float32", **options: Any
) -> None:
    cost = replace(COST, model=replace(TERMS, fixed_s=fixed_s), seconds=seconds, dtype=dtype)
    remember(cost, config(**options), folder=folder)


def test_a_record_has_everything_that_was_measured(tmp_path: Path) -> None:
    remember(COST, config(max_num_batched_tokens=9_000), folder=tmp_path)
    record = recall(config(), folder=tmp_path)
    assert record is not None
    assert record.cost_model() == TERMS
    found = record.model_dump()
    assert found.pop("measured_at") > 1.7e9
    assert found == {
        "model": "m", "device": "CPU", "dtype": "float32", "quantization": "none",
        "fixed_s": 0.01, "token_s": 2e-5, "square_s": 3e-9,
        "image_s": 0.004, "pixel_s": 5e-8, "prompt_s": 0.02,
        "max_num_batched_tokens": 8_192, "budget_was_given": True, "num_steps": 300, "num_images": 500,
        "seconds": 100.0, "version": offline_diffusion.__version__,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "num_images", "is_enough"),
    [
        (9.9, 49, False), (10.0, 1, True), (1.0, 50, True), (0.9, 5_000, False), (2.0, 2, False),
        (3_600.0, 49, True),
    ],
)  # fmt: skip
def test_ten_seconds_or_fifty_images_are_enough(
    tmp_path: Path, seconds: float, num_images: int, is_enough: bool
) -> None:
    remember(replace(COST, seconds=seconds, num_images=num_images), config(), folder=tmp_path)
    assert (recall(config(), folder=tmp_path) is not None) is is_enough


@pytest.mark.usefixtures("as_gpu")
def test_the_newest_record_of_the_model_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter((5.0, 9.0, 10.0, 11.0))
    monkeypatch.setattr("time.time", lambda: next(clock))
    keep(tmp_path, 1.0)
    keep(tmp_path, 2.0, dtype="bfloat16", device="cuda")
    keep(tmp_path, 3.0, model="n")
    assert rate_found(tmp_path, device="auto") == 2.0
    keep(tmp_path, 4.0)
    assert rate_found(tmp_path, device="auto") == 4.0
    assert rate_found(tmp_path, model="other") is None
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("as_gpu")
def test_a_record_serves_only_runs_like_its_own(tmp_path: Path) -> None:
    keep(tmp_path, 1.0)
    keep(tmp_path, 2.0, device="cuda", dtype="bfloat16")
    keep(tmp_path, 3.0, device="cuda", dtype="bfloat16", quantization="fp8")
    keep(tmp_path, 4.0, device="cuda", dtype="float32")
    assert rate_found(tmp_path, device="cpu") == 1.0
    assert rate_found(tmp_path, device="cpu", dtype="bfloat16") is None
    assert rate_found(tmp_path, device="cuda") == 2.0  # auto is bfloat16 there
    assert rate_found(tmp_path, device="cuda:1", dtype="bfloat16") == 2.0
    assert rate_found(tmp_path, device="cuda", dtype="float32") == 4.0
    assert rate_found(tmp_path, device="auto", quantization="fp8") == 3.0
    assert rate_found(tmp_path, device="cpu", quantization="fp8") is None


@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize("other", [{}, {"device": "cuda", "dtype": "bfloat16"}])
@pytest.mark.parametrize(("seconds", "rate"), [(24.0, 1.0), (25.0, 2.0), (1_000.0, 2.0)])
def test_a_much_shorter_run_does_not_take_a_records_place(
    tmp_path: Path, other: dict[str, Any], seconds: float, rate: float
) -> None:
    keep(tmp_path, 1.0)
    keep(tmp_path, 2.0, seconds=seconds, **other)
    assert rate_found(tmp_path, device="auto") == rate


def test_a_short_run_takes_the_place_of_another_versions_record(tmp_path: Path) -> None:
    keep(tmp_path, 1.0, seconds=1e6)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": "0.0.1"}))
    assert rate_found(tmp_path) == 1.0
    keep(tmp_path, 2.0, seconds=20.0)
    assert rate_found(tmp_path) == 2.0


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"model": "m"}',
        '{"model": "m", "device": "CPU", "flops_per_s": 1e9, "num_images": 9, "seconds": 9.0}',
    ],
)
def test_files_that_are_no_records_are_passed_over(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert recall(config(), folder=tmp_path) is None
    keep(tmp_path, 1.0)
    assert rate_found(tmp_path) == 1.0


@pytest.mark.parametrize(
    "damage", [{"fixed_s": -1.0}, {"token_s": "NaN"}, {"seconds": 0.0}, {"num_steps": 1.5}, {"more": 1}]
)
def test_a_damaged_record_is_passed_over_and_replaced(tmp_path: Path, damage: dict[str, Any]) -> None:
    keep(tmp_path, 1.0)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    assert recall(config(), folder=tmp_path) is None
    keep(tmp_path, 2.0, seconds=12.0)
    assert rate_found(tmp_path) == 2.0


def test_a_folder_that_cannot_be_written_is_no_fault_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remember(COST, config(), folder=tmp_path / "file" / "no folder")
    assert recall(config(), folder=tmp_path / "none") is None


def test_the_users_own_records_lie_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remember(COST, config())
    (path,) = (tmp_path / "offline_diffusion" / "costs").iterdir()
    assert CostRecord.model_validate_json(path.read_text()) == recall(config())


def test_a_user_without_a_home_has_no_records_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    remember(COST, config())
    assert recall(config()) is None
