"""A kill loses the steps since the last checkpoint, a signal none; no image is another one for that."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from job_fakes import Runner, contents, read_table, write_jsonl
from processes import Forked, Process, offdiff
from safetensors import safe_open
from step_log import Step, read_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

INTERVAL_S = 0.3
SLACK_S = 1.0
"""A checkpoint is whole on disk so long after it was begun, on a machine that does other things too."""
LIFE_S = (2 * (INTERVAL_S + SLACK_S), 3 * (INTERVAL_S + SLACK_S))
"""Of drawing, before a kill: at least half of what was done is in checkpoints, or lost without them."""

NUM_KILLS = 4
FLAGS = ("--model=tiny", "--shard-size=5", "--max-num-seqs=3")
OPTIONS = {"shard_size": 5, "max_num_seqs": 3}


def make_manifest(path: Path, num_steps: int) -> tuple[Path, dict[str, int]]:
    """12 rows of unlike size and guidance, one with two images; the steps of each image."""
    rows: list[dict[str, Any]] = []
    for n in range(12):
        row = {"id": f"r{n:03d}", "prompt": f"a red cup, view {n}", "seed": n}
        row |= {"height": 32 + 16 * (n % 3), "width": 48, "num_inference_steps": num_steps + n}
        rows.append(row | {"negative_prompt": "grey"} if n % 2 else row)
    rows[7]["num_images_per_prompt"] = 2
    steps = {f"{n}-0": row["num_inference_steps"] for n, row in enumerate(rows)}
    return write_jsonl(path, rows), steps | {"7-1": steps["7-0"]}


def start(manifest: Path, out: Path, *flags: str, log: Path) -> Process:
    return Forked(log, "run", manifest, "--out", out, *flags, program="step_log")


def saved_steps(out: Path) -> dict[str, int]:
    """Of each image the furthest step on disk, read without our own code."""
    steps: dict[str, int] = {}
    for path in (out / "_state" / "steps").glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            for name, entry in json.loads(file.metadata()["images"]).items():
                steps[name] = max(entry["step_index"], steps.get(name, 0))
    return steps


def lost_steps(log: list[Step], out: Path, needed: dict[str, int]) -> list[Step]:
    """Steps that were done and are nowhere on disk, but for those of images past their last step."""
    done = {step.request_id for step in log if step.step_index == needed[step.request_id]}
    saved = saved_steps(out)
    return [
        own for own in log if own.request_id not in done and own.step_index > saved.get(own.request_id, 0)
    ]


def check_whole(out: Path, manifest: Path, needed: dict[str, int], tmp_path: Path) -> None:
    assert offdiff("verify", out).returncode == 0
    metrics = read_table(out, "metrics")
    assert {f"{row['row']}-{row['image_index']}": row["steps_run"] for row in metrics} == needed
    assert list((out / "_state" / "steps").iterdir()) == []
    Runner().run(manifest, tmp_path / "whole", **OPTIONS)
    assert contents(out) == contents(tmp_path / "whole")  # sha256 of every image among it


def test_kills_lose_the_steps_since_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_PAUSE_S", "0.02")
    manifest, needed = make_manifest(tmp_path / "m.jsonl", num_steps=200)
    out, moments = tmp_path / "out", random.Random(4)
    log, num_done, num_lost, num_resumed = tmp_path / "steps.log", 0, 0, 0
    for _ in range(NUM_KILLS):
        flags = (*FLAGS, f"--checkpoint-interval={INTERVAL_S}")
        process = start(manifest, out, *flags, log=log)
        assert process.wait_for_line("running:")
        size = log.stat().st_size if log.exists() else 0
        process.wait_until(lambda size=size: log.exists() and log.stat().st_size > size)
        time.sleep(moments.uniform(*LIFE_S))
        killed_at = time.monotonic()
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "too fast: the job was over before it could be killed"
        num_resumed += any(line.endswith("resumed at their step") for line in process.lines)
        steps = read_steps(log)
        done = steps[num_done:]
        assert killed_at - done[0].at > 2 * (INTERVAL_S + SLACK_S), "or this would hold without checkpoints"
        lost = lost_steps(done, out, needed)
        assert all(killed_at - step.at <= INTERVAL_S + SLACK_S for step in lost)
        num_done, num_lost = len(steps), num_lost + len(lost)
    monkeypatch.delenv("STEP_PAUSE_S")
    process = start(manifest, out, *FLAGS, log=log)
    assert process.wait() == 0, process.stderr
    assert num_resumed > 0, "no kill came in mid-denoise"
    total, whole = len(read_steps(log)), sum(needed.values())
    # Done again is what was lost, and images that were past their last step but not yet written.
    assert total - whole <= num_lost + NUM_KILLS * 3 * max(needed.values())
    assert total - whole >= num_lost
    check_whole(out, manifest, needed, tmp_path)


def test_signals_lose_no_step_at_all(tmp_path: Path) -> None:
    manifest, needed = make_manifest(tmp_path / "m.jsonl", num_steps=200)
    out, log, code, num_runs = tmp_path / "out", tmp_path / "steps.log", 75, 0
    moments = random.Random(15)
    while code == 75:
        number = (signal.SIGTERM, signal.SIGUSR1)[num_runs % 2]
        process = start(manifest, out, *FLAGS, log=log)
        if process.wait_for_line("running:"):
            time.sleep(moments.uniform(0.3, 1.2))
        sent_at = time.monotonic()
        process.send(number)
        code = process.wait()
        assert code in (0, 75, -number), process.stderr  # a signal may come when all is done
        if code == 75:
            assert time.monotonic() - sent_at < 20
            assert any(line.startswith(f"{number.name}: saving ") for line in process.lines)
            assert "Traceback" not in process.stderr
        num_runs += 1
        assert num_runs < 100
    assert any(line.startswith("done: 13 of 13 images") for line in process.lines)
    assert num_runs > 2, "too fast: the job was over before it could be stopped"
    times = Counter((step.request_id, step.step_index) for step in read_steps(log))
    every = {(name, step): 1 for name, count in needed.items() for step in range(1, count + 1)}
    assert times == every, "each step of each image is done once"
    check_whole(out, manifest, needed, tmp_path)
