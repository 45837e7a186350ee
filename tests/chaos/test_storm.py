"""A storm of kills, stops and freezes over a job with two workers: the dataset is the undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from job_fakes import Runner, contents, pixels_by_key, write_jsonl

from offline_diffusion.data.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_500)]

SEED = 4
NUM_KILLS = int(os.environ.get("OFFDIFF_STORM_KILLS", "50"))
NUM_STOPS = NUM_KILLS * 2 // 5
INTERVAL_S = 0.5
WRITING_S = 1.0
"""A checkpoint may take this long to be on disk, with two processes on two cores."""
OPTIONS = {"shard_size": 10, "max_num_seqs": 4}
FLAGS = ("--shard-size=10", "--max-num-seqs=4", f"--checkpoint-interval={INTERVAL_S}", "--num-tasks=2")
PAUSE_S = 0.05
STEPS_A_KILL = 8
"""Enough that the job outlasts the storm."""
WORKER = Path(__file__).parent / "storm_worker.py"
PATIENCE_S = 120.0


def make_manifest(path: Path, num_rows: int, num_steps: int) -> tuple[Path, int]:
    """Rows of unlike size, steps, guidance and number of images, a few faulty; and the steps they need."""
    rows: list[dict[str, Any]] = []
    for n in range(num_rows):
        row = {"id": f"r{n:03d}", "prompt": f"a red cup, view {n}", "seed": n, "tag": f"t{n}"}
        row |= {"height": 32 + 16 * (n % 3), "width": 48, "num_inference_steps": num_steps + n % 7}
        rows.append(row | {"negative_prompt": "grey"} if n % 2 else row)
    rows[12]["num_images_per_prompt"] = 3
    rows[9]["prompt"] = " "
    good = [row for row in rows if row["prompt"].strip()]
    needed = sum(row["num_inference_steps"] * row.get("num_images_per_prompt", 1) for row in good)
    return write_jsonl(path, rows), needed


@dataclass
class Life:
    """One process of a task, from start to death."""

    task: int
    log: Path
    command: list[str]
    lines: list[str] = field(default_factory=list)
    drawing_since: float | None = None

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line.rstrip())
                if line.startswith("running:") and self.drawing_since is None:
                    self.drawing_since = time.monotonic()

    def wait_until_drawing(self) -> bool:
        """False when it ends before."""
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and self.drawing_since is None:
            assert time.monotonic() < end, "\n".join(self.lines)
            time.sleep(0.01)
        return self.process.poll() is None

    def steps(self, last_s: float = float("inf")) -> int:
        """Steps of images that it made, all or those of its last seconds."""
        made = [line.split() for line in self.log.read_text().splitlines()]
        times = [float(at) for at, _ in made]
        return sum(int(count) for at, (_, count) in zip(times, made, strict=True) if at > times[-1] - last_s)


class Storm:
    """Two tasks of one job, each started again as soon as it is dead."""

    def __init__(self, manifest: Path, folder: Path) -> None:
        self.manifest, self.folder, self.out = manifest, folder, folder / "out"
        self.lives: list[Life] = []

    def start(self, task: int, pause_s: float = PAUSE_S) -> Life:
        log = self.folder / f"steps-{len(self.lives):04d}"
        log.touch()
        command = [sys.executable, str(WORKER), str(log), str(pause_s)]
        command += ["run", str(self.manifest), "--out", str(self.out)]
        life = Life(task, log, [*command, *FLAGS, f"--task-index={task}"])
        self.lives.append(life)
        return life


def test_a_storm_costs_nothing_but_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    moments = random.Random(SEED)
    manifest, needed = make_manifest(tmp_path / "m.jsonl", num_rows=90, num_steps=STEPS_A_KILL * NUM_KILLS)
    storm = Storm(manifest, tmp_path)
    signals = [signal.SIGKILL] * NUM_KILLS + [signal.SIGTERM] * NUM_STOPS
    moments.shuffle(signals)
    running = [storm.start(0), storm.start(1)]
    landed: Counter[int] = Counter()
    at_risk = 0  # steps of killed lives since their last checkpoint, at most
    for number in signals:
        victim = moments.randrange(2)
        life = running[victim]
        if life.wait_until_drawing():
            time.sleep(moments.uniform(0.0, 1.5))
        if moments.random() < 0.1:
            life.process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            life.process.send_signal(signal.SIGCONT)
        life.process.send_signal(number)
        code = life.process.wait(PATIENCE_S)
        assert code in (-signal.SIGKILL, 75, 0, 3), "\n".join(life.lines)
        landed[number] += code in (-signal.SIGKILL, 75)
        if code == -signal.SIGKILL:
            at_risk += life.steps(last_s=INTERVAL_S + WRITING_S)
        running[victim] = storm.start(life.task)
    assert landed[signal.SIGKILL] >= NUM_KILLS * 0.9, "too fast: the job was over before the storm was"
    assert landed[signal.SIGTERM] >= NUM_STOPS * 0.9
    for life in running:
        life.wait_until_drawing()
        life.process.send_signal(signal.SIGTERM)
    assert {life.process.wait(PATIENCE_S) for life in running} <= {0, 3, 75}
    last = [storm.start(task, pause_s=0.0) for task in range(2)]
    assert {life.process.wait(600) for life in last} <= {0, 3}
    assert not any("Traceback" in line for life in storm.lives for line in life.lines)

    report = verify(storm.out)
    assert (report.problems, report.pending) == ([], [])
    Runner().run(manifest, tmp_path / "whole", **OPTIONS)
    for ours, theirs in zip(contents(storm.out), contents(tmp_path / "whole"), strict=True):
        assert ours == theirs
    pixels_by_key(storm.out)  # none twice
    lost = sum(life.steps() for life in storm.lives) - needed
    print(
        f"storm: {landed[signal.SIGKILL]} kills, {landed[signal.SIGTERM]} stops; {needed:,} steps needed, "
        f"{lost:,} made again ({lost / needed:.1%}), {at_risk:,} since the last checkpoints"
    )
    assert 0 <= lost <= at_risk
