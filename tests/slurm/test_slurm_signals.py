"""The batch script under Slurm, with a stand-in for ``offdiff run``: who is told what, and who comes back."""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from slurm_cluster import Cluster, Task, wait_until

from offline_diffusion.cli.main import main

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

# One array for everything, since Slurm takes its time: the index of a task says what it meets.
CANCELLED, OUT_OF_TIME, WARNED, REQUEUED, FAILS, STOPS_ITSELF, NO_COMMANDS = range(7)
NAME = "a \"b\" 'c' \\d $(id) #"
ONE_START = {FAILS, CANCELLED, NO_COMMANDS}

# Writes what it meets to a file a task: a line for its start, and one for each signal.
STAND_IN = f"""#!{sys.executable}
import json, os, signal, sys, time
task, restarts = int(os.environ["SLURM_ARRAY_TASK_ID"]), int(os.environ.get("SLURM_RESTART_COUNT", 0))
def tell(**what):
    with open(f"events-{{task}}", "a") as stream:
        print(json.dumps(what), file=stream)
def hear(number, frame):
    tell(signal=signal.Signals(number).name)
    time.sleep(1)  # as one who saves what it has in hand
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, hear)
tell(restarts=restarts, end=os.environ.get("SLURM_JOB_END_TIME"), argv=sys.argv[1:])
print("start", restarts, flush=True)
if restarts:
    sys.exit(0)
if task in ({STOPS_ITSELF}, {NO_COMMANDS}):
    sys.exit(75)
if task == {FAILS}:
    sys.exit(3)
time.sleep(150)
"""


class Array:
    """An array of stand-ins, submitted from a folder with a name that is no word."""

    def __init__(self, folder: Path, cluster: Cluster, *flags: str) -> None:
        self.folder, self.cluster = folder, cluster
        self.end_time = ""  # of the task OUT_OF_TIME, as squeue shows it before it is changed
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "offdiff").write_text(STAND_IN)
        (folder / "bin" / "offdiff").chmod(0o755)
        (folder / "a 'job'.yaml").write_text("manifests: m.jsonl\nout: out 'x' %A $(touch pwned)\n")
        command = [
            *("submit", "slurm", "a 'job'.yaml", "--submit", "--time=20", "--setup", 'PATH="$PWD/bin:$PATH"'),
            *("--setup", f'[ "$SLURM_ARRAY_TASK_ID" -ne {NO_COMMANDS} ] || PATH="$PWD/bin"'),
            *flags,
        ]
        with contextlib.chdir(folder):
            result = CliRunner(env=cluster.environ).invoke(main, command)
        assert result.exit_code == 0, result.stderr
        self.id = result.stdout.strip()

    def wait_for_starts(self, count: int) -> None:
        wait_until(lambda: all(map(self.events, range(count))), 30, lambda: self.cluster.run("squeue"))

    def task(self, index: int) -> Task:
        return self.cluster.task(self.id, index)

    def events(self, index: int) -> list[dict[str, Any]]:
        path = self.folder / f"events-{index}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def signals(self, index: int) -> list[str]:
        return [event["signal"] for event in self.events(index) if "signal" in event]

    def log(self, index: int) -> str:
        return (self.folder / "out 'x' %A $(touch pwned)/_state/logs" / f"{self.id}_{index}.log").read_text()


@pytest.fixture(scope="module")
def array(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Array:
    """An array to whose tasks everything has happened, at its end."""
    folder = tmp_path_factory.mktemp("slurm") / "it's $(touch pwned) here"
    array = Array(folder, cluster, "--array=7", "--job-name", NAME)
    array.wait_for_starts(7)
    array.end_time = cluster.run("squeue", "--noheader", "--format=%e", f"--jobs={array.id}_{OUT_OF_TIME}")
    cluster.run("scancel", f"{array.id}_{CANCELLED}")
    cluster.run("scontrol", "update", f"JobId={array.id}_{OUT_OF_TIME}", "TimeLimit=1")
    cluster.run("scancel", "--full", "--signal=TERM", f"{array.id}_{WARNED}")  # as before a preemption
    cluster.run("scontrol", "requeue", f"{array.id}_{REQUEUED}")
    cluster.wait_for_end(array.id, 120)
    return array


def test_the_exit_code_of_the_worker_is_the_tasks(array: Array) -> None:
    assert array.task(FAILS) == Task("FAILED", 0, 3)


@pytest.mark.parametrize(
    ("index", "signals"),
    [(STOPS_ITSELF, []), (OUT_OF_TIME, ["SIGUSR1"]), (WARNED, ["SIGTERM"]), (REQUEUED, ["SIGTERM"])],
)
def test_a_task_that_stopped_in_good_order_comes_back_once(
    array: Array, index: int, signals: list[str]
) -> None:
    assert array.task(index) == Task("COMPLETED", 1, 0)
    assert array.signals(index) == signals
    assert [event["restarts"] for event in array.events(index) if "restarts" in event] == [0, 1]


def test_a_cancelled_task_stays_away(array: Array) -> None:
    state, restarts, _ = array.task(CANCELLED)
    assert (state, restarts) == ("CANCELLED", 0)
    assert array.signals(CANCELLED) == ["SIGTERM"]
    assert "work is left" in array.log(CANCELLED)


def test_without_slurms_commands_the_task_ends_and_says_so(array: Array) -> None:
    assert array.task(NO_COMMANDS) == Task("FAILED", 0, 75)
    assert "submit again" in array.log(NO_COMMANDS)


def test_nobody_else_is_requeued(array: Array) -> None:
    assert {index for index in range(7) if array.task(index).restarts == 0} == ONE_START


def test_a_task_knows_when_its_time_is_up(array: Array) -> None:
    told = float(array.events(OUT_OF_TIME)[0]["end"])
    assert abs(told - datetime.fromisoformat(array.end_time).timestamp()) <= 1


def test_names_are_taken_as_they_are(array: Array, cluster: Cluster) -> None:
    assert array.events(FAILS)[0]["argv"] == ["run", "--job", "a 'job'.yaml"]
    shown = cluster.run("squeue", "--states=all", "--noheader", "--format=%j", f"--jobs={array.id}_{FAILS}")
    assert shown == NAME
    assert list(array.folder.glob("**/pwned")) == []


def test_logs_of_all_starts_are_kept(array: Array) -> None:
    assert "start 0\n" in array.log(STOPS_ITSELF)
    assert array.log(STOPS_ITSELF).endswith("start 1\n")


def test_a_preempted_task_comes_back_once(cluster: Cluster, tmp_path: Path) -> None:
    array = Array(tmp_path / "job", cluster, "--array=1", "--cpus-per-task=8")
    array.wait_for_starts(1)
    cluster.run("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_until(lambda: array.task(0).restarts, 60, lambda: cluster.run("squeue"))
    cluster.wait_for_end(array.id, 60)
    assert array.task(0) == Task("COMPLETED", 1, 0)
    assert array.signals(0) == ["SIGTERM"]
