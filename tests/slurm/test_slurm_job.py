"""Whole jobs under Slurm: cancelled, requeued, out of time, as another array; nothing lost or twice."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from job_fakes import Runner, contents, make_rows, pixels_by_key, write_jsonl
from slurm_cluster import Cluster, Task, wait_until

from offline_diffusion.cli.main import main

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 120
OPTIONS = {"shard_size": 5, "max_num_seqs": 1, "height": 48, "width": 48}
TASK_S = 40.0
"""How long a task should take if nothing happened to it: Slurm looks at time limits twice a minute."""

# Tasks of the first array, by what they meet.
UNDISTURBED, CANCELLED, REQUEUED, OUT_OF_TIME = range(4)


def num_steps(folder: Path) -> int:
    """How many steps keep four tasks busy for ``TASK_S``, two at a time, on this machine as it is now."""
    manifest, tried = write_jsonl(folder / "few.jsonl", make_rows(4)), 100
    summary = Runner().run(manifest, folder / "few", num_inference_steps=tried, **OPTIONS)
    s_per_step = summary.seconds / (summary.num_ok * tried)
    return min(2_000, max(50, round(2 * TASK_S / (NUM_ROWS * s_per_step))))


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Those of the job file in the working directory; ``bin`` there has ``offdiff`` of this checkout."""
    options = OPTIONS | {"num_inference_steps": num_steps(tmp_path)}
    write_jsonl(tmp_path / "m.jsonl", make_rows(NUM_ROWS))
    lines = "".join(f"{name}: {value}\n" for name, value in options.items())
    (tmp_path / "job.yaml").write_text(f"model: tiny\nmanifests: m.jsonl\nout: out\n{lines}")
    program = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m offline_diffusion.cli.main "$@"\n'
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "offdiff").write_text(program)
    (tmp_path / "bin" / "offdiff").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return options


def offdiff(cluster: Cluster, *args: str) -> tuple[int, str]:
    """Exit code and standard output of a command."""
    result = CliRunner(env=cluster.environ).invoke(main, args)
    return result.exit_code, result.stdout.strip()


def submit(cluster: Cluster, num_tasks: int) -> str:
    setup = f"export OMP_NUM_THREADS=1 PATH={os.getcwd()}/bin:$PATH"
    flags = (f"--array={num_tasks}", "--time=20", "--cpus-per-task=1", f"--setup={setup}", "--submit")
    code, job_id = offdiff(cluster, "submit", "slurm", "job.yaml", *flags)
    assert code == 0
    return job_id


def test_an_array_with_every_mishap(options: dict[str, int], cluster: Cluster) -> None:
    first = submit(cluster, 4)

    def log(task: int) -> str:
        path = Path("out/_state/logs") / f"{first}_{task}.log"
        return path.read_text() if path.exists() else ""

    def logs() -> str:
        return "\n".join(log(task) for task in range(4)) + cluster.run("squeue")

    wait_until(lambda: "task 4 of 4" in log(OUT_OF_TIME), 90, logs)
    cluster.run("scontrol", "update", f"JobId={first}_{OUT_OF_TIME}", "TimeLimit=1")
    wait_until(lambda: all("running: " in log(task) for task in range(OUT_OF_TIME)), 90, logs)
    cluster.run("scancel", f"{first}_{CANCELLED}")
    cluster.run("scontrol", "requeue", f"{first}_{REQUEUED}")
    wait_until(lambda: cluster.task(first, OUT_OF_TIME).restarts == 1, 60, logs)
    cluster.run("scontrol", "update", f"JobId={first}_{OUT_OF_TIME}", "TimeLimit=20")
    cluster.wait_for_end(first, 150)

    assert cluster.task(first, UNDISTURBED) == Task("COMPLETED", 0, 0)
    assert cluster.task(first, CANCELLED)[:2] == ("CANCELLED", 0)
    assert cluster.task(first, REQUEUED) == Task("COMPLETED", 1, 0)
    assert cluster.task(first, OUT_OF_TIME) == Task("COMPLETED", 1, 0)
    assert "SIGTERM: " in log(CANCELLED)
    assert "SIGTERM: " in log(REQUEUED)
    assert "SIGUSR1: " in log(OUT_OF_TIME)
    # One queue: what the cancelled task had left was drawn by the others.
    assert offdiff(cluster, "verify", "out")[0] == 0
    check_whole(options)


def test_an_array_that_is_cancelled_goes_on_as_one_of_another_size(
    options: dict[str, int], cluster: Cluster
) -> None:
    """Catches shards that stay with the tasks that had them, or images that another size draws otherwise."""
    first = submit(cluster, 3)

    def log(task: int) -> str:
        path = Path("out/_state/logs") / f"{first}_{task}.log"
        return path.read_text() if path.exists() else ""

    def is_in_mid_run() -> bool:
        return all("running: " in log(task) for task in range(3)) and any(Path("out/images").iterdir())

    wait_until(is_in_mid_run, 90, lambda: "\n".join(map(log, range(3))) + cluster.run("squeue"))
    cluster.run("scancel", first)
    cluster.wait_for_end(first, 60)
    assert {cluster.task(first, task).state for task in range(3)} == {"CANCELLED"}
    assert all("SIGTERM: saving " in log(task) for task in range(3))
    assert offdiff(cluster, "verify", "out")[0] == 3, "sound, but unfinished"

    second = submit(cluster, 2)
    cluster.wait_for_end(second, 150)
    assert {cluster.task(second, task) for task in range(2)} == {Task("COMPLETED", 0, 0)}
    assert offdiff(cluster, "verify", "out")[0] == 0
    check_whole(options)


def check_whole(options: dict[str, int]) -> None:
    """The dataset, SHA-256 of every image included, is that of one run that nobody disturbed."""
    assert len(pixels_by_key(Path("out"))) == NUM_ROWS
    together = options | {"max_num_seqs": 32}  # quicker, and the pixels are the same
    Runner().run(Path("m.jsonl"), Path("whole"), **together)
    assert contents(Path("out")) == contents(Path("whole"))
