"""A storm of kills, stops and freezes over a job with two workers: the dataset is the undisturbed one."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import storm_worker
from job_fakes import Runner, contents, pixels_by_key, write_jsonl

from offline_diffusion.data.verify import verify

NUM_KILLS = int(os.environ.get("OFFDIFF_STORM_KILLS", "50"))
NUM_STOPS = NUM_KILLS * 2 // 5
SEED = int(os.environ.get("OFFDIFF_STORM_SEED", "4"))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300 + 12 * NUM_KILLS)]

INTERVAL_S = 0.3
WRITING_S = 0.7
"""A checkpoint may take this long to be on disk, with two processes on two cores."""
FLAGS = (
    *("--model=tiny", "--shard-size=4", "--max-num-seqs=4"),
    *(f"--checkpoint-interval={INTERVAL_S}", "--num-tasks=2"),
)
LIFE_S = (0.0, 0.8)
"""Of drawing, before a signal comes."""
LONG_LIFE_S = (4.0, 6.0)
LONG_EVERY = 6
"""So manieth kill comes after a long life: most of its steps are in checkpoints, or lost without them."""
PAUSE_S = 0.1
STEPS_A_KILL = 2
"""Enough that the job outlasts the storm, and that hardly an image is finished in the life it began in."""
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


class Life:
    """One process of a task, from start to death."""

    def __init__(self, task: int, folder: Path, pause_s: float, arguments: list[str]) -> None:
        self.task, self._log, self._errors = task, folder / "steps", folder / "errors"
        folder.mkdir()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([storm_worker.__name__])
        self.process = context.Process(
            target=storm_worker.live, args=(self._log, self._errors, pause_s, arguments)
        )
        self.process.start()

    @property
    def lines(self) -> list[str]:
        return self._errors.read_text().splitlines() if self._errors.exists() else []

    def wait_until_drawing(self) -> bool:
        """Until it has made a step; False when it ends before."""
        end = time.monotonic() + PATIENCE_S
        while self.process.is_alive() and not self.steps():
            assert time.monotonic() < end, "\n".join(self.lines)
            time.sleep(0.01)
        return self.process.is_alive()

    def tell(self, number: int) -> None:
        assert self.process.pid is not None
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, or less than 0 the signal it died of."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, "\n".join(self.lines)
        return self.process.exitcode

    def steps(self, last_s: float = float("inf")) -> int:
        """Steps of images that it made, all or those of its last seconds."""
        text = self._log.read_text() if self._log.exists() else ""
        made = [line.split() for line in text.splitlines()]
        times = [float(at) for at, _ in made]
        return sum(int(count) for at, (_, count) in zip(times, made, strict=True) if at > times[-1] - last_s)


class Storm:
    """Two tasks of one job, each started again as soon as it is dead."""

    def __init__(self, manifest: Path, folder: Path) -> None:
        self.manifest, self.folder, self.out = manifest, folder, folder / "out"
        self.lives: list[Life] = []

    def start(self, task: int, pause_s: float = PAUSE_S) -> Life:
        arguments = ["run", str(self.manifest), "--out", str(self.out), *FLAGS, f"--task-index={task}"]
        arguments.append(f"--scheduling-policy={('fifo', 'pack')[task]}")  # shards are done early, or late
        life = Life(task, self.folder / f"life-{len(self.lives):04d}", pause_s, arguments)
        self.lives.append(life)
        return life


def test_a_storm_costs_nothing_but_the_steps_since_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before Python 3.13 the process that lives are forked from does not look where this one does.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    moments = random.Random(SEED)
    manifest, needed = make_manifest(tmp_path / "m.jsonl", num_rows=90, num_steps=STEPS_A_KILL * NUM_KILLS)
    storm = Storm(manifest, tmp_path)
    signals = [signal.SIGKILL] * NUM_KILLS + [signal.SIGTERM] * NUM_STOPS
    moments.shuffle(signals)
    running = [storm.start(0), storm.start(1)]
    landed: Counter[int] = Counter()
    at_risk = 0  # steps of killed lives since their last checkpoint, at most
    killed_steps = 0  # all of theirs
    for number in signals:
        victim = moments.randrange(2)
        life = running[victim]
        is_drawing = life.wait_until_drawing()
        if is_drawing:
            is_long = number == signal.SIGKILL and landed[number] % LONG_EVERY == 0
            time.sleep(moments.uniform(*(LONG_LIFE_S if is_long else LIFE_S)))
        if moments.random() < 0.1:
            life.tell(signal.SIGSTOP)
            time.sleep(0.3)
            life.tell(signal.SIGCONT)
        life.tell(number)
        code = life.wait()
        assert code in (-signal.SIGKILL, 75, 0, 3), "\n".join(life.lines)
        landed[number] += is_drawing and code in (-signal.SIGKILL, 75)
        if code == -signal.SIGKILL:
            at_risk += life.steps(last_s=INTERVAL_S + WRITING_S)
            killed_steps += life.steps()
        running[victim] = storm.start(life.task)
    assert landed[signal.SIGKILL] == NUM_KILLS, "too fast: the job was over before the storm was"
    assert landed[signal.SIGTERM] == NUM_STOPS
    for life in running:
        life.wait_until_drawing()
        life.tell(signal.SIGTERM)
    assert {life.wait() for life in running} <= {0, 3, 75}
    num_published = len(list((storm.out / "images").iterdir()))
    assert num_published > 1
    last = [storm.start(task, pause_s=0.0) for task in range(2)]
    assert {life.wait(600) for life in last} <= {0, 3}
    assert not any("Traceback" in line for life in storm.lives for line in life.lines)

    report = verify(storm.out)
    assert (report.problems, report.pending) == ([], [])
    lost = sum(life.steps() for life in storm.lives) - needed
    print(
        f"storm: {landed[signal.SIGKILL]} kills, {landed[signal.SIGTERM]} stops; "
        f"{num_published} shards published in it; {needed:,} steps needed, "
        f"{lost:,} made again ({lost / needed:.1%}); of {killed_steps:,} in lives that were killed "
        f"{at_risk:,} since the last checkpoints, at most"
    )
    assert 0 <= lost <= at_risk < killed_steps / 2, "or it would hold without checkpoints, too"
    # Other company, the same pixels; and fewer steps, so less time.
    Runner().run(manifest, tmp_path / "whole", shard_size=4, max_num_seqs=16)
    for ours, theirs in zip(contents(storm.out), contents(tmp_path / "whole"), strict=True):
        assert ours == theirs
    pixels_by_key(storm.out)  # none twice
