"""``offdiff plan`` after ``offdiff run``: the estimate for one mix from a run of another."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from job_fakes import Runner, write_jsonl

from offline_diffusion.cli.main import main
from offline_diffusion.engine import stats

WORDS = (
    "a",
    "red",
    "cup",
    "on",
    "the",
    "wooden",
    "table",
    "near",
    "window",
    "light",
    "with",
    "blue",
    "shadows",
)


def mix(path: Path, count: int, sizes: list[int], steps: list[int], guided: float, seed: int) -> Path:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        row: dict[str, Any] = {"prompt": " ".join(rng.choices(WORDS, k=rng.randint(3, 30)))}
        row |= {
            "height": rng.choice(sizes),
            "width": rng.choice(sizes),
            "num_inference_steps": rng.choice(steps),
        }
        rows.append(row | ({"negative_prompt": " "} if rng.random() < guided else {}))
    return write_jsonl(path, rows)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine would count as work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_the_estimate_for_another_mix_is_near_the_measured_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    """In time of this process, which others on the machine do not stretch. Wrong amounts in the plan, time
    that is told to no sample, or a fit that splits stages wrongly would be off by more."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=time.process_time))
    model, runner = ("--model", str(tiny_model)), Runner()

    def run(manifest: Path) -> float:
        out = str(tmp_path / manifest.stem)
        args = ["run", str(manifest), *model, "--device=cpu", "--max-num-batched-tokens=4096", "--out", out]
        start = time.process_time()
        result = CliRunner().invoke(main, args, obj=runner.run_task)
        assert result.exit_code == 0, result.output
        return time.process_time() - start

    first = mix(tmp_path / "first.jsonl", 70, [96, 128, 160, 192, 224], [8, 12, 16], 0.8, seed=1)
    second = mix(tmp_path / "second.jsonl", 60, [96, 128, 160], [16, 24, 32], 0.5, seed=2)
    run(first)
    result = CliRunner().invoke(main, ["plan", str(second), *model, "--json"])
    estimate = json.loads(result.stdout)
    assert estimate["time_basis"].startswith("cost model measured on CPU")
    assert estimate["seconds"] == pytest.approx(run(second), rel=0.35)
