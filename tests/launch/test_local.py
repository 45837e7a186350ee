"""The supervisor, with workers that are small scripts."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offline_diffusion.config import JobConfig, make_job_config
from offline_diffusion.errors import JobError, JobInterrupted
from offline_diffusion.launch.local import MAX_RESTARTS, Supervisor, joined
from offline_diffusion.progress import Progress, StopFlag

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
options = json.loads(sys.stdin.readline())
def send(**event): print(json.dumps(event), flush=True)
def progress(**counts): send(progress={"phase": "running", **counts})
lives = Path(options["out"]) / (options["device"] + ".lives")
with lives.open("a") as file: file.write("x")
life = len(lives.read_text())
exec(Path(sys.argv[1]).read_text())
"""


class Bench:
    """Runs workers whose behaviour is a piece of Python, and keeps what the supervisor tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.seen: list[Progress] = []
        self.stop = StopFlag()

    def run(self, behaviour: str, devices: Sequence[str] = ("cpu",)) -> list[dict[str, Any]]:
        script = self.folder / "behaviour.py"
        script.write_text(behaviour)
        configs = [self.config(device) for device in devices]
        supervisor = Supervisor(
            configs,
            observer=self.seen.append,
            say=self.said.append,
            stop=self.stop,
            command=lambda: [sys.executable, "-c", SCRIPT, str(script)],
        )
        self.supervisor = supervisor
        return supervisor.run()

    def config(self, device: str) -> JobConfig:
        return make_job_config({"manifests": ["m.jsonl"], "out": self.folder, "device": device})

    def num_lives(self, device: str = "cpu") -> int:
        return len((self.folder / f"{device}.lives").read_text())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_workers_get_their_options_and_hand_in_summaries(bench: Bench) -> None:
    found = bench.run("send(summary={'device': options['device']})", devices=["cuda:0", "cuda:1"])
    assert sorted(summary["device"] for summary in found) == ["cuda:0", "cuda:1"]
    assert [bench.num_lives(device) for device in ("cuda:0", "cuda:1")] == [1, 1]


def test_a_dead_worker_is_started_again_and_the_other_goes_on(bench: Bench) -> None:
    behaviour = """
if options["device"] == "cuda:0" and life == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if options["device"] == "cuda:1":
    time.sleep(0.3)
send(summary={"device": options["device"], "life": life})
"""
    found = bench.run(behaviour, devices=["cuda:0", "cuda:1"])
    assert {summary["device"]: summary["life"] for summary in found} == {"cuda:0": 2, "cuda:1": 1}
    assert any("worker 0 on cuda:0 died of SIGKILL: started again" in line for line in bench.said)


def test_a_worker_that_only_dies_is_given_up(bench: Bench) -> None:
    with pytest.raises(JobError, match="every worker died"):
        bench.run("os.abort()")
    assert bench.num_lives() == 1 + MAX_RESTARTS
    assert "given up" in bench.said[-1]


def test_a_worker_that_draws_between_its_deaths_is_not_given_up(bench: Bench) -> None:
    behaviour = f"""
if life <= 3 * {MAX_RESTARTS}:
    progress(num_done=life)
    os.abort()
send(summary={{"life": life}})
"""
    assert bench.run(behaviour) == [{"life": 3 * MAX_RESTARTS + 1}]


def test_an_error_is_the_jobs_when_no_worker_is_left(bench: Bench) -> None:
    with pytest.raises(JobError, match="no room") as caught:
        bench.run("send(error={'exit_code': 1, 'message': 'no room', 'hint': 'make some'})")
    assert caught.value.hint == "make some"
    assert bench.num_lives() == 1


def test_an_error_of_one_worker_is_said_and_the_others_finish(bench: Bench) -> None:
    behaviour = """
if options["device"] == "cuda:0":
    send(error={"exit_code": 1, "message": "no such device", "hint": None})
else:
    send(summary={"ok": 1})
"""
    assert bench.run(behaviour, devices=["cuda:0", "cuda:1"]) == [{"ok": 1}]
    assert bench.said == ["worker 0 on cuda:0 cannot go on: no such device"]


def test_stops_are_passed_on_once_each(bench: Bench) -> None:
    behaviour = """
progress()
first = sys.stdin.readline().strip()
progress(num_done=1)
send(summary={"stops": [first, sys.stdin.readline().strip()]})
"""

    def stop_twice() -> None:
        while not bench.seen:
            time.sleep(0.01)
        bench.stop.request("SIGTERM")
        while bench.seen[-1].num_done == 0:
            time.sleep(0.01)
        bench.stop.request("SIGTERM")

    thread = threading.Thread(target=stop_twice)
    thread.start()
    assert bench.run(behaviour) == [{"stops": ["SIGTERM", "SIGTERM"]}]
    thread.join()


def test_a_stop_before_anything_began_is_an_interruption(bench: Bench) -> None:
    bench.stop.request("SIGINT")
    with pytest.raises(JobInterrupted, match="stopped while scanning"):
        bench.run("send(error={'exit_code': 75, 'message': 'stopped while scanning', 'hint': None})")


def test_a_worker_that_dies_while_stopping_stays_dead(bench: Bench) -> None:
    bench.stop.request("SIGTERM")
    with pytest.raises(JobError):
        bench.run("os.abort()")
    assert bench.num_lives() == 1


def test_garbage_on_standard_output_is_no_event(bench: Bench) -> None:
    assert bench.run("print('hello'); print('{'); send(summary={'ok': 1})") == [{"ok": 1}]


def test_progress_adds_up() -> None:
    parts = [
        Progress(phase="loading"),
        Progress(phase="running", num_images=10, num_done=4, work_done=4, work_total=10, eta_s=6.0),
        Progress(phase="running", num_images=20, num_done=4, work_done=4, work_total=20, eta_s=8.0),
    ]
    whole = joined(parts)
    assert (whole.phase, whole.num_images, whole.num_done) == ("running", 30, 8)
    assert whole.eta_s == pytest.approx(22 / (6 / 6 + 16 / 8))


def test_the_real_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed, so nobody can pass a signal on; the worker sees the pipe close."""
    script = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c",
     "import sys; from offline_diffusion.launch.worker import _listen; "
     "from offline_diffusion.progress import StopFlag; stop = StopFlag(); _listen(sys.stdin, stop); "
     "open(sys.argv[1], 'w').write(stop.why)", sys.argv[1]], stdin=subprocess.PIPE)
os.kill(os.getpid(), 9)
"""
    told = tmp_path / "told"
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", script, str(told)])
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    end = time.monotonic() + 30
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert told.read_text() == "the parent process is gone"


def test_the_real_worker_says_what_is_wrong(tmp_path: Path) -> None:
    config = make_job_config({"manifests": [str(tmp_path / "missing.jsonl")], "out": tmp_path / "out"})
    said: list[str] = []
    with pytest.raises(JobError, match="missing"):
        Supervisor([config], observer=lambda _: None, say=said.append, stop=StopFlag()).run()
    assert json.loads(config.model_dump_json())["device"] == "auto"
