"""The batch script under Slurm itself, with a stand-in for ``offdiff run``: who is told what, and who comes back."""

from __future__ import annotations

import json
import os
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
FAILS, STOPS_ITSELF, CANCELLED, OUT_OF_TIME, WARNED, REQUEUED, NO_COMMANDS = range(7)
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
    """The array of this module, in a folder whose name is no word."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.end_time = ""  # of the task OUT_OF_TIME, as squeue shows it before it is changed
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "offdiff").write_text(STAND_IN)
        (folder / "bin" / "offdiff").chmod(0o755)
        (folder / "a 'job'.yaml").write_text("manifests: m.jsonl\nout: out 'x' %A $(touch pwned)\n")
        command = [
            "submit", "slurm", "a 'job'.yaml", "--array=7", "--time=20", "--job-name", "a \"b\" 'c' \\d $(id) #",
            "--setup", 'PATH="$PWD/bin:$PATH"',
            "--setup", f'[ "$SLURM_ARRAY_TASK_ID" -ne {NO_COMMANDS} ] || PATH="$PWD/bin"',
            "--submit",
        ]  # fmt: skip
        result = CliRunner(env=cluster.environ).invoke(main, command)
        assert result.exit_code == 0, result.stderr
        self.id = result.stdout.strip()

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
    folder.mkdir()
    before = Path.cwd()
    os.chdir(folder)
    try:
        array = Array(folder, cluster)
    finally:
        os.chdir(before)
    wait_until(lambda: all(array.events(i) for i in range(7)), 30, lambda: cluster.run("squeue"))
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
def test_a_task_that_stopped_in_good_order_comes_back_once(array: Array, index: int, signals: list[str]) -> None:
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
    assert shown == "a \"b\" 'c' \\d $(id) #"
    assert list(array.folder.glob("**/pwned")) == []


def test_logs_of_all_starts_are_kept(array: Array) -> None:
    assert "start 0\n" in array.log(STOPS_ITSELF)
    assert array.log(STOPS_ITSELF).endswith("start 1\n")
