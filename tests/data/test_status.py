import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from output_fakes import all_images, make_output, make_rows, open_ledger, run_job

from offline_diffusion.cli.main import main
from offline_diffusion.data import heartbeat
from offline_diffusion.data import sink as sink_module
from offline_diffusion.data.heartbeat import Heartbeat, OpenShard, write_heartbeat
from offline_diffusion.data.process import ProcessId
from offline_diffusion.data.sink import Sink
from offline_diffusion.data.status import read_status
from offline_diffusion.errors import JobError


def date_sign(out: Path, name: str, seconds: float) -> None:
    """Dates a sign of life so long after a file that is made there now."""
    (out / "now").touch()
    now = (out / "now").stat().st_mtime
    (out / "now").unlink()
    os.utime(out / "_state" / "tasks" / name, (now + seconds, now + seconds))


def edit_sign(out: Path, name: str, **values: Any) -> None:
    path = out / "_state" / "tasks" / name
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


def test_a_fresh_folder_has_everything_before_it(tmp_path: Path) -> None:
    open_ledger(tmp_path, 10, 4)
    status = read_status(tmp_path)
    assert (status.num_rows, status.num_rows_done, status.num_shards, status.num_shards_done) == (10, 0, 3, 0)
    assert (status.num_ok, status.num_failed, status.images_per_s, status.eta_s) == (0, 0, 0.0, None)
    assert status.tasks == status.shards == []


def test_a_finished_job(tmp_path: Path) -> None:
    run_job(open_ledger(tmp_path, 6, 3), make_rows(6, images=2, faults=(4,)), failing={(1, 1): "nan"})
    status = read_status(tmp_path)
    assert status.finished
    assert status.eta_s == 0.0
    assert (status.num_ok, status.num_failed, status.num_invalid_rows) == (9, 1, 1)
    assert [(s.shard, s.state, s.num_ok, s.num_failed, s.num_invalid_rows) for s in status.shards] == [
        (0, "done", 5, 1, 0),
        (1, "done", 4, 0, 1),
    ]
    (task,), (worker,) = status.tasks, status.workers
    assert (task.state, task.num_shards_done, task.num_ok, task.num_failed) == ("done", 2, 9, 1)
    assert (worker.state, worker.num_shards_done, worker.num_ok, worker.shards) == ("done", 2, 9, [])
    assert json.loads(json.dumps(status.to_dict()))["finished"] is True
    shutil.rmtree(tmp_path / "_state")
    again = read_status(tmp_path)
    assert (again.finished, again.num_ok, again.num_failed, again.num_invalid_rows) == (True, 9, 1, 1)


def test_a_running_job_shows_its_rate_and_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "INTERVAL_S", 0.05)
    ledger = open_ledger(tmp_path, 8, 2)
    rows = make_rows(8)
    sink = Sink(ledger, task=1, num_tasks=2, worker="node7:0")
    for shard in ledger.shards[1:4:2]:
        part = rows[shard.start : shard.stop]
        sink.open_shard(shard, part)
    for image in all_images([rows[2], rows[3], rows[6]]):
        sink.submit(image.row // 2, image, make_output(image))
    sink.drain()
    for _ in range(100):
        status = read_status(tmp_path)
        if status.num_ok == 3:
            break
        time.sleep(0.05)
    assert [(s.shard, s.state, s.num_ok, s.num_images, s.task) for s in status.shards] == [
        (1, "done", 2, 2, 1),
        (3, "running", 1, 2, 1),
    ]
    (task,), (worker,) = status.tasks, status.workers
    assert (task.task, task.state, task.num_workers_running, task.num_shards_done) == (1, "running", 1, 1)
    assert (worker.task, worker.worker, worker.state, worker.num_shards_done, worker.shards) == (
        1, "node7:0", "running", 1, [3],
    )  # fmt: skip
    text = CliRunner().invoke(main, ["status", str(tmp_path)]).stdout
    assert ["1", "running", "1", "3", "3", "0"] in [line.split()[:6] for line in text.splitlines()]
    assert status.images_per_s > 0
    assert status.eta_s == pytest.approx((8 - 3) / status.images_per_s)
    with monkeypatch.context() as frozen:
        frozen.setattr(ledger, "beat", lambda _: None)
        time.sleep(0.2)  # for a sign that is on its way
        date_sign(tmp_path, "task-00001.node7-0.json", -60)
        silent = read_status(tmp_path)
    assert [worker.state for worker in silent.workers] == [task.state for task in silent.tasks] == ["lost"]
    assert [shard.state for shard in silent.shards] == ["done", "begun"]
    assert silent.images_per_s == 0.0
    assert silent.eta_s is None
    sink.close(abandon=True)
    assert [task.state for task in read_status(tmp_path).tasks] == ["stopped"]


def test_a_shard_whose_failures_are_retried_runs_again(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 2, 2)
    rows = make_rows(2)
    run_job(ledger, rows, failing={(1, 0): "nan"})
    sink = Sink(ledger)
    sink.open_shard(ledger.shards[0], rows, retry_failed=True)
    sink._beat()
    status = read_status(tmp_path)
    assert [(s.state, s.num_ok, s.num_failed) for s in status.shards] == [("running", 1, 1)]
    assert status.num_shards_done == 1
    sink.close(abandon=True)
    assert [s.state for s in read_status(tmp_path).shards] == ["done"]


def test_partials_without_a_heartbeat_are_begun(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 4, 2)
    rows = make_rows(4)
    sink = Sink(ledger)
    sink.open_shard(ledger.shards[1], rows[2:])
    sink.close(abandon=True)
    shutil.rmtree(tmp_path / "_state" / "tasks")
    assert [(s.shard, s.state) for s in read_status(tmp_path).shards] == [(1, "begun")]


def test_an_array_from_the_folder_alone(tmp_path: Path) -> None:
    """Four workers of three tasks, one of them started twice, one killed, one stopped."""
    ledger = open_ledger(tmp_path, 16, 2)
    rows = make_rows(16)
    sinks = [
        Sink(ledger, task=task, num_tasks=3, worker=worker)
        for task, worker in ((0, "a:1:x"), (0, "b:1:y"), (1, "c:1:z"), (2, "d:1:w"))
    ]
    for number, sink in enumerate(sinks):
        for shard in (ledger.shards[number], ledger.shards[number + 4]):
            sink.open_shard(shard, rows[shard.start : shard.stop])
        for image in all_images(rows[2 * number : 2 * number + 2]):
            sink.submit(number, image, make_output(image))
        sink.drain()
        sink._beat()
    sinks[2].close(abandon=True)
    path = tmp_path / "_state" / "tasks" / "task-00002.d-1-w.json"
    dead = json.loads(path.read_bytes())
    dead["process"]["started"] = "1"  # its number is another process's now
    sinks[3].close(abandon=True)
    path.write_text(json.dumps(dead))
    status = read_status(tmp_path)
    assert [(w.worker, w.state, w.num_shards_done, w.shards) for w in status.workers] == [
        ("a:1:x", "running", 1, [4]),
        ("b:1:y", "running", 1, [5]),
        ("c:1:z", "stopped", 1, []),
        ("d:1:w", "lost", 1, []),
    ]
    assert [(t.task, t.state, t.num_workers_running, t.num_shards_done) for t in status.tasks] == [
        (0, "running", 2, 2),
        (1, "stopped", 0, 1),
        (2, "lost", 0, 1),
    ]
    assert {s.shard: s.state for s in status.shards} == {
        0: "done", 1: "done", 2: "done", 3: "done", 4: "running", 5: "running", 6: "begun", 7: "begun",
    }  # fmt: skip
    assert status.eta_s == pytest.approx(8 / status.images_per_s)
    for sink in sinks[:2]:
        sink.close(abandon=True)


ELSEWHERE = {"host": "node7", "boot_id": "another", "pid_namespace": "p", "pid": 1, "started": "1"}
"""A process that nobody here can ask about."""


@pytest.mark.parametrize("clock_s", [-60.0, 7_200.0])
def test_a_worker_whose_clock_is_wrong(tmp_path: Path, clock_s: float) -> None:
    """Catches a comparison of the worker's clock with this machine's: by it a live one is lost, or a dead one
    runs for hours."""
    ledger = open_ledger(tmp_path, 4, 2)
    sink = Sink(ledger, worker="w")
    sink.open_shard(ledger.shards[1], make_rows(4)[2:])
    sink.close(abandon=True)
    name, at = "task-00000.w.json", time.time() + clock_s
    shards = {"1": {"num_images": 2, "num_ok": 1, "num_failed": 0}}
    edit_sign(tmp_path, name, state="running", process=ELSEWHERE, updated_at=at, shards=shards)
    alive = read_status(tmp_path)
    assert ([w.state for w in alive.workers], [s.state for s in alive.shards]) == (["running"], ["running"])
    for seconds in (-31, 31):  # the file system's clock was set back in the second case
        date_sign(tmp_path, name, seconds)
        dead = read_status(tmp_path)
        assert ([w.state for w in dead.workers], [s.state for s in dead.shards]) == (["lost"], ["begun"])
    assert not list(ledger.scratch.iterdir())


def test_the_clock_of_the_file_system_counts_and_without_leave_to_write_this_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is on a server whose clock is an hour behind."""
    ledger = open_ledger(tmp_path, 4, 2)
    write_heartbeat(tmp_path, Heartbeat(task=0, num_tasks=1, worker="w", process=ProcessId(**ELSEWHERE)))
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(time=lambda: time.time() + 3_600))
    assert [worker.state for worker in read_status(tmp_path).workers] == ["running"]
    ledger.scratch.rename(tmp_path / "away")
    assert [worker.state for worker in read_status(tmp_path).workers] == ["lost"]


def test_who_took_a_shard_over_is_shown_though_the_dead_ones_clock_was_ahead(tmp_path: Path) -> None:
    """Catches signs that are put in order by the clocks of several machines."""
    open_ledger(tmp_path, 4, 2)
    for task, worker in enumerate(("heir", "dead")):
        sign = Heartbeat(task=task, num_tasks=2, worker=worker, process=ProcessId(**ELSEWHERE))
        sign.shards[0] = OpenShard(num_images=2, num_ok=1)
        write_heartbeat(tmp_path, sign)
    edit_sign(tmp_path, "task-00001.dead.json", updated_at=time.time() + 7_200)
    date_sign(tmp_path, "task-00001.dead.json", -60)
    assert [(s.shard, s.state, s.task) for s in read_status(tmp_path).shards] == [(0, "running", 0)]


def test_a_process_of_this_machine_that_was_killed_is_lost_at_once(tmp_path: Path) -> None:
    """However fresh its sign is."""
    open_ledger(tmp_path, 4, 2)
    script = (
        "import sys, time; from pathlib import Path\n"
        "from offline_diffusion.data.heartbeat import Heartbeat, write_heartbeat\n"
        "write_heartbeat(Path(sys.argv[1]), Heartbeat(task=0, num_tasks=1, worker='w'))\n"
        "print('begun', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        assert [worker.state for worker in read_status(tmp_path).workers] == ["running"]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: nobody has asked about it
        assert [worker.state for worker in read_status(tmp_path).workers] == ["lost"]


def test_a_damaged_heartbeat_is_left_out(tmp_path: Path) -> None:
    run_job(open_ledger(tmp_path, 2, 2), make_rows(2))
    (tmp_path / "_state" / "tasks" / "task-00001.json").write_text('{"shards": {"x": 1}}')
    assert [task.task for task in read_status(tmp_path).tasks] == [0]


def test_not_an_output_folder(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not an output folder"):
        read_status(tmp_path)


def test_a_task_that_has_ended_shows_its_mean(tmp_path: Path) -> None:
    run_job(open_ledger(tmp_path, 6, 2), make_rows(6), failing={(1, 0): "nan"})
    edit_sign(tmp_path, "task-00000.json", started_at=1_000.0, updated_at=1_012.0)
    status = read_status(tmp_path)
    assert [worker.images_per_s for worker in status.workers] == [pytest.approx(0.5)]
    assert status.images_per_s == pytest.approx(0.5)
    shown = CliRunner().invoke(main, ["status", str(tmp_path)]).stdout.splitlines()[0]
    assert shown.endswith("0.5 images/s")
