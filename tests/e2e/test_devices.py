"""``offdiff run --devices``: two workers on one job, of which one is killed, and a supervisor that is."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import impatient
import pytest
from job_fakes import Runner, contents, make_rows, read_table, write_jsonl
from processes import Process, offdiff

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

STALE_S = 6.0
"""Of silence: 30 s for users."""

OPTIONS: dict[str, Any] = {"shard_size": 6, "max_num_seqs": 4, "height": 32, "width": 32}
FLAGS = (
    *("--model=tiny", "--shard-size=6", "--max-num-seqs=4"),
    *("--height=32", "--width=32", "--devices=cpu,cpu"),
)


def busy_workers(out: Path) -> dict[int, int]:
    """Images drawn by each worker that is at work, by pid, read without our own code."""
    found = {}
    for path in (out / "_state" / "tasks").glob("*.json"):
        try:
            beat = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if beat["state"] == "running" and beat["num_ok"]:
            found[int(beat["worker"].split(":")[1])] = beat["num_ok"]
    return found


def check_same(out: Path, manifest: Path, whole: Path, steps: int) -> None:
    assert offdiff("verify", out).returncode == 0
    Runner().run(manifest, whole, **OPTIONS, num_inference_steps=steps)
    for ours, theirs in zip(contents(out), contents(whole), strict=True):
        assert ours == theirs


def test_a_killed_worker_is_started_again_and_costs_nothing(tmp_path: Path) -> None:
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(72)), tmp_path / "out"
    process = Process("run", manifest, "--out", out, *FLAGS, "--num-inference-steps=150")
    assert process.wait_until(lambda: len(busy_workers(out)) == 2), process.stderr
    os.kill(next(iter(busy_workers(out))), signal.SIGKILL)
    assert process.wait() == 0, process.stderr
    assert process.stderr.count("died of SIGKILL: started again") == 1
    assert "done: 72 of 72 images" in process.stderr
    workers = {row["worker"] for row in read_table(out, "metrics")}
    assert len(workers) >= 2, "one worker drew everything"
    check_same(out, manifest, tmp_path / "whole", 150)


def test_a_frozen_worker_costs_time_but_nothing_else(tmp_path: Path) -> None:
    """It holds shards: the other one takes them over after a while, and it is killed as long after that."""
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(48)), tmp_path / "out"
    command = (str(STALE_S), "run", manifest, "--out", out, *FLAGS, "--num-inference-steps=200")
    process = Process(*command, script=Path(impatient.__file__))
    assert process.wait_until(lambda: len(busy_workers(out)) == 2), process.stderr
    frozen = next(iter(busy_workers(out)))
    os.kill(frozen, signal.SIGSTOP)
    assert process.wait() == 0, process.stderr
    assert process.stderr.count("does not end: killed") == 1
    assert "done: 48 of 48 images" in process.stderr
    assert not Path(f"/proc/{frozen}").exists()
    check_same(out, manifest, tmp_path / "whole", 200)


def test_workers_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(24)), tmp_path / "out"
    process = Process("run", manifest, "--out", out, *FLAGS, "--num-inference-steps=400")
    assert process.wait_until(lambda: len(busy_workers(out)) == 2), process.stderr
    pids = list(busy_workers(out))
    process.send(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "a worker goes on without its parent"
        time.sleep(0.1)
    assert list((out / "_state" / "steps").iterdir()), "they saved what they had"
    result = offdiff("run", manifest, "--out", out, *FLAGS, "--num-inference-steps=400")
    assert result.returncode == 0, result.stderr
    check_same(out, manifest, tmp_path / "whole", 400)


def test_a_signal_to_the_group_stops_all_in_good_order(tmp_path: Path) -> None:
    """As a terminal or Slurm sends it: to the parent and to every worker."""
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(24)), tmp_path / "out"
    process = Process("run", manifest, "--out", out, *FLAGS, "--num-inference-steps=400")
    assert process.wait_until(lambda: len(busy_workers(out)) == 2), process.stderr
    for pid in busy_workers(out):
        os.kill(pid, signal.SIGTERM)
    process.send(signal.SIGTERM)
    assert process.wait() == 75, process.stderr
    assert process.stderr.count("at their step") == 2
    assert "interrupted:" in process.stderr
    assert offdiff("run", manifest, "--out", out, *FLAGS, "--num-inference-steps=400").returncode == 0
    assert len({row["row"] for row in read_table(out, "images")}) == 24
