"""Many rows through the job with a stand-in engine: threads get along, memory stays flat."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from job_fakes import write_jsonl

from offline_diffusion.config import JobConfig, make_job_config
from offline_diffusion.data.shard_writer import ShardWriter
from offline_diffusion.data.verify import verify
from offline_diffusion.engine.cost import CostMeter
from offline_diffusion.job import Progress, run_task
from offline_diffusion.models.registry import Checkpoint
from offline_diffusion.request import Request, RequestMetrics, RequestOutput

IMAGES_A_STEP = 32


class StandInEngine:
    """Answers every request at once with a flat picture in the colour of its seed."""

    num_running = 0

    def __init__(self, config: JobConfig, checkpoint: Checkpoint) -> None:
        self.model = SimpleNamespace(capabilities=checkpoint.capabilities)
        self.stats = SimpleNamespace(step_fill=1.0)
        self.waiting: deque[Request] = deque()
        self.scheduler = SimpleNamespace(waiting=self.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting)

    def add_request(self, request: Request, resume: None) -> None:
        self.waiting.append(request)

    def close_source(self) -> None:
        pass

    def costs(self) -> CostMeter:
        return CostMeter()  # it takes no steps

    def snapshot(self) -> SimpleNamespace:
        return SimpleNamespace(states=dict)  # nothing is ever half done

    def step(self) -> list[RequestOutput]:
        taken = [self.waiting.popleft() for _ in range(min(IMAGES_A_STEP, len(self.waiting)))]
        return [RequestOutput(request, "ok", picture(request), RequestMetrics()) for request in taken]


def picture(request: Request) -> np.ndarray:
    return np.full((request.height, request.width, 3), request.seed % 256, np.uint8)


def run(folder: Path, num_rows: int, **options: Any) -> list[float]:
    """Runs a job; returns the memory of this process, in MB, at every report of progress."""
    rows = ({"prompt": f"a cup {n}", "seed": n, "height": 16, "width": 16} for n in range(num_rows))
    manifest = write_jsonl(folder / "m.jsonl", rows)
    process, memory = psutil.Process(), []

    def observe(_: Progress) -> None:
        memory.append(process.memory_info().rss / 1e6)

    config = make_job_config(
        {"model": "tiny", "manifests": [str(manifest)], "out": folder / "out", **options}
    )
    summary = run_task(config, observer=observe, make_engine=StandInEngine)  # type: ignore[arg-type]
    assert summary.num_ok == num_rows
    return memory


def test_shards_are_opened_while_others_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_sync(writer: ShardWriter) -> None:
        time.sleep(0.002)

    monkeypatch.setattr("offline_diffusion.data.sink.INTERVAL_S", 0.03)
    monkeypatch.setattr(ShardWriter, "sync", slow_sync)
    run(tmp_path, 60, shard_size=1)
    assert verify(tmp_path / "out").problems == []


def test_no_shard_lists_what_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing all markers or tables for each shard makes thousands of shards take the square of the time."""
    growing = {"shards", "images", "metrics", "failures"}
    listed: list[str] = []
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, noting(getattr(os, name), listed))
    started = time.monotonic()
    run(tmp_path, 12, shard_size=1)
    num_listings = sum(Path(path).name in growing for path in listed)
    once_a_second = time.monotonic() - started
    assert 3 < num_listings < 20 + once_a_second


def noting(read_folder: Callable[..., Any], listed: list[str]) -> Callable[..., Any]:
    def noted(path: Any = ".") -> Any:
        listed.append(str(path))
        return read_folder(path)

    return noted


@pytest.mark.slow
def test_memory_is_flat_in_rows(tmp_path: Path) -> None:
    memory = run(tmp_path, 60_000)
    first, last = memory[len(memory) // 4], memory[-1]
    assert last - first < 40, f"{first:.0f} MB after a quarter, {last:.0f} MB at the end"
