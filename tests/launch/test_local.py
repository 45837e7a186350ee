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
from job_fakes import SMALL, Runner, make_rows, write_jsonl

from offline_diffusion.config import JobConfig, make_job_config
from offline_diffusion.errors import CrashError, JobError, JobInterrupted, TooManyFailuresError, UsageError
from offline_diffusion.launch import local, outcome
from offline_diffusion.launch.local import Supervisor, joined, run_on_devices
from offline_diffusion.launch.memory_kills import MemoryKills
from offline_diffusion.launch.outcome import MAX_CONVICTED, MAX_RESTARTS, error_of, folder_is_finished
from offline_diffusion.progress import Progress, StopFlag

SCRIPT = r"""
import json, os, signal, socket, sys, time
from pathlib import Path
options = json.loads(sys.stdin.readline())
def send(**event): print(json.dumps(event), flush=True)
def end(interrupted=False, **summary): send(summary=summary | {"interrupted": interrupted})
def fail(code, message, kind="JobError", hint=None):
    send(error={"kind": kind, "exit_code": code, "message": message, "hint": hint})
def die_over(*rows, cause="Fatal Python error: Aborted", drawn=()):
    # As a process that crashes: its log of flights and its traceback stay.
    folder = Path(options["out"]) / "_state" / "flights"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{socket.gethostname()}_{os.getpid()}_ab12.log"
    done = "".join(f"+{row}:0 abc 0 0\n-{row}:0\n" for row in drawn)
    log.write_text(done + "".join(f"+{row}:0 abc 0 0\n" for row in rows))
    log.with_suffix(".crash").write_text(cause + "\n")
    os.abort()
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
        self.is_finished = False
        self.num_memory_kills = [0]
        self.started = time.monotonic()

    def run(
        self, behaviour: str, devices: Sequence[str] = ("cpu",), time_limit: float | None = None
    ) -> list[dict[str, Any]]:
        (self.folder / "_state" / "tmp").mkdir(parents=True, exist_ok=True)
        script = self.folder / "behaviour.py"
        script.write_text(behaviour)
        configs = [self.config(device).model_copy(update={"time_limit": time_limit}) for device in devices]
        supervisor = Supervisor(
            configs,
            observer=self.seen.append,
            say=self.said.append,
            stop=self.stop,
            started=self.started,
            is_finished=lambda: self.is_finished,
            command=lambda: [sys.executable, "-c", SCRIPT, str(script)],
            memory_kills=MemoryKills(lambda: self.num_memory_kills[-1]),
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
    found = bench.run("end(device=options['device'])", devices=["cuda:0", "cuda:1"])
    assert sorted(summary["device"] for summary in found) == ["cuda:0", "cuda:1"]
    assert [bench.num_lives(device) for device in ("cuda:0", "cuda:1")] == [1, 1]


def test_a_dead_worker_is_started_again_and_the_other_goes_on(bench: Bench) -> None:
    behaviour = """
if options["device"] == "cuda:0" and life == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if options["device"] == "cuda:1":
    time.sleep(0.3)
end(device=options["device"], life=life)
"""
    found = bench.run(behaviour, devices=["cuda:0", "cuda:1"])
    assert {summary["device"]: summary["life"] for summary in found} == {"cuda:0": 2, "cuda:1": 1}
    assert any("worker 0 on cuda:0 died of SIGKILL: started again" in line for line in bench.said)


def test_a_worker_that_only_dies_is_given_up(bench: Bench) -> None:
    with pytest.raises(JobError, match="worker 0 on cpu died of SIGABRT, 4 times without an image"):
        bench.run("os.abort()")
    assert bench.num_lives() == 1 + MAX_RESTARTS
    assert "given up" in bench.said[-1]


def test_a_worker_that_draws_between_its_deaths_is_not_given_up(bench: Bench) -> None:
    behaviour = f"""
if life <= 3 * {MAX_RESTARTS}:
    progress(num_done=life)
    os.abort()
end(life=life)
"""
    assert bench.run(behaviour) == [{"life": 3 * MAX_RESTARTS + 1, "interrupted": False}]


@pytest.mark.parametrize("death", ["progress(num_done=life); os.abort()", "die_over(1, 2, drawn=[life])"])
def test_deaths_have_a_bound_whatever_was_drawn_between(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    """Catches a worker that dies after every image and is started again for ever."""
    monkeypatch.setattr(outcome, "MAX_DEATHS", 6)
    with pytest.raises(JobError, match="worker 0 on cpu died of SIGABRT, 6 times in this run: given up"):
        bench.run(death)
    assert bench.num_lives() == 6
    assert bench.said[-1] == "worker 0 on cpu died of SIGABRT, 6 times in this run: given up"


def test_convicted_images_do_not_use_up_the_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "MAX_DEATHS", 2)
    assert bench.run("if life <= 6: die_over(life)\nend(life=life)") == [{"life": 7, "interrupted": False}]


def test_a_worker_that_hangs_is_killed_and_started_again(bench: Bench) -> None:
    behaviour = """
if life == 1:
    send(hung_s=725.0)
    time.sleep(600)
end(life=life)
"""
    assert bench.run(behaviour) == [{"life": 2, "interrupted": False}]
    assert bench.said == ["worker 0 on cpu died of a hang, 12 min in a step: started again"]


def test_a_worker_that_only_hangs_is_given_up(bench: Bench) -> None:
    with pytest.raises(JobError, match="worker 0 on cpu died of a hang, 12 min in a step, 4 times without"):
        bench.run("send(hung_s=725.0); time.sleep(600)")
    assert bench.num_lives() == 1 + MAX_RESTARTS


def test_a_crash_ends_the_process_of_a_worker() -> None:
    """As a signal would: an error that is only told would keep it from being started again."""
    with pytest.raises(SystemExit, match="the engine broke"):
        error_of(CrashError("the engine broke", hint="go on"))
    assert error_of(JobError("no room"))["kind"] == "JobError"


def test_an_error_is_the_jobs_when_no_worker_is_left(bench: Bench) -> None:
    with pytest.raises(JobError, match="no room") as caught:
        bench.run("fail(1, 'no room', hint='make some')")
    assert caught.value.hint == "make some"
    assert bench.num_lives() == 1


ONE_FAILS = """
if options["device"] == "cuda:0":
    fail(CODE, "disk full")
else:
    end(ok=1)
"""


@pytest.mark.parametrize(("code", "kind"), [(1, JobError), (75, JobInterrupted)])
def test_an_error_is_the_jobs_when_shards_are_left(bench: Bench, code: int, kind: type[Exception]) -> None:
    """Though another worker ended in good order: the exit code must not be 0."""
    with pytest.raises(kind, match="disk full"):
        bench.run(ONE_FAILS.replace("CODE", str(code)), devices=["cuda:0", "cuda:1"])


def test_an_error_is_only_said_when_the_others_finish(bench: Bench) -> None:
    bench.is_finished = True
    found = bench.run(ONE_FAILS.replace("CODE", "1"), devices=["cuda:0", "cuda:1"])
    assert [summary["ok"] for summary in found] == [1]
    assert bench.said == ["worker 0 on cuda:0 cannot go on: disk full"]


def test_an_error_for_good_goes_before_one_that_passes(bench: Bench) -> None:
    behaviour = """
if options["device"] == "cuda:0":
    fail(75, "disk full")
else:
    fail(1, "no such model")
"""
    with pytest.raises(JobError, match="no such model"):
        bench.run(behaviour, devices=["cuda:0", "cuda:1"])


def test_too_many_failures_of_one_worker_end_the_job(bench: Bench) -> None:
    bench.is_finished = True
    behaviour = """
if options["device"] == "cuda:0":
    fail(1, "9 images failed", kind="TooManyFailuresError")
else:
    end(interrupted=True, why=sys.stdin.readline())
"""
    with pytest.raises(TooManyFailuresError, match="9 images failed"):
        bench.run(behaviour, devices=["cuda:0", "cuda:1"])
    assert [worker.summaries for worker in bench.supervisor.workers] == [
        [],
        [{"interrupted": True, "why": "--max-failures\n"}],
    ]


HELPER = """
if options["device"] == "cuda:0":
    os.abort()
if life == 2:
    HELP
end(life=life)
"""


def test_a_finished_worker_does_what_one_that_was_given_up_left(bench: Bench) -> None:
    found = bench.run(HELPER.replace("HELP", "pass"), devices=["cuda:0", "cuda:1"])
    assert [summary["life"] for summary in found] == [1, 2]
    assert (bench.num_lives("cuda:0"), bench.num_lives("cuda:1")) == (1 + MAX_RESTARTS, 2)


def test_what_nobody_could_do_is_an_error(bench: Bench) -> None:
    with pytest.raises(JobError, match="worker 0 on cuda:0 died of SIGABRT"):
        bench.run(HELPER.replace("HELP", "fail(1, 'no'); sys.exit()"), devices=["cuda:0", "cuda:1"])
    assert bench.num_lives("cuda:1") == 2


def test_rows_that_crash_one_after_the_other_do_not_use_up_the_restarts(bench: Bench) -> None:
    """Lives that draw nothing and last too short to tell anything; each leaves one image convicted."""
    num_rows = 3 * MAX_RESTARTS
    found = bench.run(f"if life <= {num_rows}: die_over(life)\nend(life=life)")
    assert found == [{"life": num_rows + 1, "interrupted": False}]
    assert len(list((bench.folder / "_state" / "deaths").iterdir())) == num_rows


def test_a_life_that_drew_counts_though_it_had_no_time_to_say_so(bench: Bench) -> None:
    num_lives = 3 * MAX_RESTARTS
    found = bench.run(f"if life <= {num_lives}: die_over(1, 2, cause='', drawn=[life])\nend(life=life)")
    assert found == [{"life": num_lives + 1, "interrupted": False}]


def test_a_device_that_crashes_over_every_image_is_given_up(bench: Bench) -> None:
    with pytest.raises(JobError, match="given up"):
        bench.run("die_over(life)")
    assert bench.num_lives() == 1 + MAX_CONVICTED


@pytest.mark.parametrize("has_grown", [True, False])
def test_a_kill_for_want_of_memory_is_a_crash(bench: Bench, has_grown: bool) -> None:
    """And any other SIGKILL is none: it would be a preemption."""
    behaviour = """
if life == 1:
    progress()
    time.sleep(0.3)
    os.abort = lambda: os.kill(os.getpid(), signal.SIGKILL)
    die_over(7, cause="")
end()
"""
    bench.seen = _OnFirst(lambda: bench.num_memory_kills.append(int(has_grown)))
    assert bench.run(behaviour) == [{"interrupted": False}]
    (record,) = (json.loads(path.read_bytes()) for path in (bench.folder / "_state" / "deaths").iterdir())
    assert record["crash"] == ("killed by the system for want of memory" if has_grown else "")
    assert bench.said[-1].endswith("died of SIGKILL" + " for want of memory" * has_grown + ": started again")
    assert bench.supervisor.workers[0].num_convicted == has_grown


class _OnFirst(list[Any]):
    """Calls something at the first append."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def append(self, item: Any) -> None:
        super().append(item)
        if len(self) == 1:
            self._call()


def test_crashes_in_company_are_deaths_like_others(bench: Bench) -> None:
    with pytest.raises(JobError, match="given up"):
        bench.run("die_over(1, 2)")
    assert bench.num_lives() == 1 + MAX_RESTARTS


FREEZING = ["cuda:0", "cuda:1"]
FREEZE = """
if options["device"] == "cuda:0":
    progress()
    os.kill(os.getpid(), signal.SIGSTOP)
end(interrupted=STOPPED)
"""


def test_a_frozen_worker_is_killed_once_all_is_done(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PATIENCE_S", 0.2)
    monkeypatch.setattr(local, "SILENCE_S", 0.2)
    bench.is_finished = True
    found = bench.run(FREEZE.replace("STOPPED", "False"), devices=["cuda:0", "cuda:1"])
    assert found == [{"interrupted": False}]
    assert bench.said == ["worker 0 on cuda:0 does not end: killed"]


def test_a_frozen_worker_is_killed_after_a_second_stop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PATIENCE_S", 0.2)
    bench.stop.request("SIGTERM")
    bench.stop.request("SIGTERM")
    found = bench.run(FREEZE.replace("STOPPED", "True"), devices=["cuda:0", "cuda:1"])
    assert found == [{"interrupted": True}]
    assert bench.num_lives("cuda:0") == 1


def test_a_frozen_worker_that_holds_the_last_shards_is_started_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others had left them to it. Catches a supervisor that waits for it without end."""
    monkeypatch.setattr(local, "PATIENCE_S", 0.2)
    found = bench.run(
        FREEZE.replace('"cuda:0"', '"cuda:0" and life == 1').replace("STOPPED", "False"), FREEZING
    )
    assert found == [{"interrupted": False}] * 2
    assert bench.num_lives("cuda:0") == 2


def test_one_stop_is_enough_to_end_a_job_with_a_frozen_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PATIENCE_S", 0.2)
    bench.stop.request("SIGTERM")
    assert bench.run(FREEZE.replace("STOPPED", "True"), FREEZING) == [{"interrupted": True}]
    assert bench.num_lives("cuda:0") == 1


def test_a_frozen_worker_is_left_alone_while_another_one_works(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one takes over what it holds; and it may thaw."""
    monkeypatch.setattr(local, "PATIENCE_S", 0.1)
    behaviour = """
if options["device"] == "cuda:0":
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    import re
    time.sleep(1.0)
    # Wakes the other one: its pid is in no file, so it is looked for among the children of our parent.
    for status in Path("/proc").glob("[0-9]*/stat"):
        pid, state, parent = re.fullmatch(r"(\\d+) .*\\) (\\w) (\\d+) .*", status.read_text(), re.S).groups()
        if int(parent) == os.getppid() and state == "T":
            os.kill(int(pid), signal.SIGCONT)
end(life=life)
"""
    assert bench.run(behaviour, FREEZING) == [{"life": 1, "interrupted": False}] * 2


def test_who_was_frozen_with_its_workers_kills_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-Z freezes the whole group: time has passed when it wakes, the others wake a little later."""
    monkeypatch.setattr(local, "is_stopped", lambda pid: True)
    bench.run("time.sleep(0.1); end()")
    supervisor, killed = bench.supervisor, []
    worker = supervisor.workers[0]
    assert worker.process is not None
    monkeypatch.setattr(worker.process, "kill", lambda: killed.append(worker))
    supervisor._alive.add(worker)
    for now in (1e6, 1e6 + 5.0, 1e6 + 3_600.0, 1e6 + 3_605.0):
        supervisor._end_the_useless(now)
    assert not killed
    for seconds in range(5, 40, 5):
        supervisor._end_the_useless(1e6 + 3_605.0 + seconds)
    assert killed == [worker]


def test_a_silent_worker_is_left_alone_while_there_is_work(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PATIENCE_S", 0.0)
    monkeypatch.setattr(local, "SILENCE_S", 0.0)
    assert bench.run("time.sleep(0.8); end(ok=1)") == [{"ok": 1, "interrupted": False}]


def test_the_time_limit_counts_from_the_start_of_the_job(bench: Bench) -> None:
    """What preparing took is gone for the workers."""
    bench.started = time.monotonic() - 600
    (summary,) = bench.run("end(limit=options['time_limit'])", time_limit=1000.0)
    assert 380 < summary["limit"] <= 400


def test_the_time_limit_ends_the_scan(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(60_000))
    config = make_job_config(
        {"manifests": [str(manifest)], "out": tmp_path / "out", "devices": "cpu,cpu", "time_limit": 0.05}
    )
    with pytest.raises(JobInterrupted, match="time limit: stopped while scanning"):
        run_on_devices(config, observer=lambda _: None, say=print, stop=StopFlag())


def test_standard_input_is_refused(tmp_path: Path) -> None:
    config = make_job_config({"manifests": ["-"], "out": tmp_path / "out", "devices": "cpu,cpu"})
    with pytest.raises(UsageError, match="--devices: the manifest cannot be '-'"):
        run_on_devices(config, observer=lambda _: None, say=print, stop=StopFlag())
    assert not (tmp_path / "out").exists()


def test_stops_are_passed_on_once_each(bench: Bench) -> None:
    behaviour = """
progress()
first = sys.stdin.readline().strip()
progress(num_done=1)
end(stops=[first, sys.stdin.readline().strip()])
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
    assert bench.run(behaviour) == [{"stops": ["SIGTERM", "SIGTERM"], "interrupted": False}]
    thread.join()


def test_a_stop_before_anything_began_is_an_interruption(bench: Bench) -> None:
    bench.stop.request("SIGINT")
    with pytest.raises(JobInterrupted, match="stopped while scanning"):
        bench.run("fail(75, 'stopped while scanning')")


def test_a_worker_that_dies_while_stopping_stays_dead(bench: Bench) -> None:
    bench.stop.request("SIGTERM")
    with pytest.raises(JobInterrupted, match="SIGTERM"):
        bench.run("os.abort()")
    assert bench.num_lives() == 1


def test_garbage_on_standard_output_is_no_event(bench: Bench) -> None:
    assert bench.run("print('hello'); print('{'); end(ok=1)") == [{"ok": 1, "interrupted": False}]


def test_progress_adds_up() -> None:
    parts = [
        Progress(phase="loading", num_images=1_000),
        Progress(phase="running", num_images=10, num_done=4, work_done=4, work_total=10, eta_s=6.0),
        Progress(phase="running", num_images=20, num_done=4, work_done=4, work_total=20, eta_s=8.0),
    ]
    whole = joined(parts)
    assert (whole.phase, whole.num_images, whole.num_done) == ("running", 45, 8)
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
        Supervisor(
            [config],
            observer=lambda _: None,
            say=said.append,
            stop=StopFlag(),
            started=time.monotonic(),
            is_finished=lambda: False,
        ).run()
    assert json.loads(config.model_dump_json())["device"] == "auto"


def test_a_folder_is_finished_when_all_is_published_and_whole(tmp_path: Path) -> None:
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(4)), tmp_path / "out"
    config = make_job_config({"manifests": [str(manifest)], "out": out})
    assert not folder_is_finished(config)
    Runner().run(manifest, out, shard_size=2, **SMALL)
    assert folder_is_finished(config)
    assert not folder_is_finished(config.model_copy(update={"retry_failed": True}))
    first = sorted((out / "images").glob("*.parquet"))[0]
    first.write_bytes(first.read_bytes()[:-1])
    assert not folder_is_finished(config), "a broken shard is still to be made again"
