"""A whole job under Slurm: tasks cancelled, requeued and out of time, another array, and nothing lost or twice."""

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
NUM_ROWS = 160
OPTIONS = {"shard_size": 5, "max_num_seqs": 2, "height": 48, "width": 48, "num_inference_steps": 300}

# Tasks of the first array, by what they meet.
UNDISTURBED, CANCELLED, REQUEUED, OUT_OF_TIME = range(4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a job file, its manifest and ``offdiff`` of this checkout."""
    write_jsonl(tmp_path / "m.jsonl", make_rows(NUM_ROWS))
    options = "".join(f"{name}: {value}\n" for name, value in OPTIONS.items())
    (tmp_path / "job.yaml").write_text(f"manifests: m.jsonl\nout: out\n{options}")
    program = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m offline_diffusion.cli.main "$@"\n'
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "offdiff").write_text(program)
    (tmp_path / "bin" / "offdiff").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_an_array_with_every_mishap_then_another_one(folder: Path, cluster: Cluster) -> None:
    first = submit(cluster, 4)

    def log(task: int) -> str:
        path = folder / "out/_state/logs" / f"{first}_{task}.log"
        return path.read_text() if path.exists() else ""

    def logs() -> str:
        return "\n".join(log(task) for task in range(4)) + cluster.run("squeue")

    wait_until(lambda: all("running: " in log(task) for task in range(4)), 90, logs)
    cluster.run("scancel", f"{first}_{CANCELLED}")
    cluster.run("scontrol", "requeue", f"{first}_{REQUEUED}")
    cluster.run("scontrol", "update", f"JobId={first}_{OUT_OF_TIME}", "TimeLimit=1")
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
    # 3 while tasks own fixed shares, since nobody takes those of the cancelled one; 0 with one queue for all.
    assert offdiff(cluster, "verify", "out")[0] in (0, 3)

    second = submit(cluster, 2)
    cluster.wait_for_end(second, 150)
    assert {cluster.task(second, task) for task in range(2)} == {Task("COMPLETED", 0, 0)}
    assert offdiff(cluster, "verify", "out")[0] == 0
    assert len(pixels_by_key(Path("out"))) == NUM_ROWS
    Runner().run(folder / "m.jsonl", folder / "whole", **OPTIONS)
    assert contents(folder / "out") == contents(folder / "whole")
