"""A row whose step loses the GPU for the process: two times, and it is set aside; the others are drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from offline_diffusion.data.verify import verify

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

SCRIPT = Path(__file__).parents[1] / "e2e" / "poison_worker.py"
FLAGS = (
    *("--model=tiny", "--shard-size=8", "--max-num-seqs=4"),
    *("--height=64", "--width=64", "--num-inference-steps=3"),
)


def _manifest(path: Path, poison: str) -> Path:
    rows = [{"id": f"r{n}", "prompt": poison if n == 10 else f"a cup, number {n}"} for n in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _run(manifest: Path, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "run", str(manifest), "--out", str(out), *FLAGS, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


def _pixels(out: Path) -> dict[str, str]:
    table = pq.ParquetDataset(out / "images").read(["id", "sha256"])
    return dict(zip(table["id"].to_pylist(), table["sha256"].to_pylist(), strict=True))


def test_a_row_that_loses_the_gpu_twice_is_set_aside(tmp_path: Path) -> None:
    poisoned = _manifest(tmp_path / "poisoned.jsonl", "DEVICE")
    out, whole = tmp_path / "out", tmp_path / "whole"
    runs = [_run(poisoned, out, "--device=cuda") for _ in range(3)]
    assert [run.returncode for run in runs] == [1, 1, 3], runs[0].stderr + runs[-1].stderr
    assert "it draws these images one at a time" in runs[0].stderr.replace("\n", " ")
    (failure,) = pq.ParquetDataset(out / "failures").read().to_pylist()
    assert (failure["row"], failure["error_type"]) == (10, "crash")
    assert verify(out).num_problems == 0
    assert _run(_manifest(tmp_path / "good.jsonl", "a cup"), whole, "--device=cuda").returncode == 0
    others = _pixels(whole)
    del others["r10"]
    assert _pixels(out) == others
