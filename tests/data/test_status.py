import json
import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from output_fakes import all_images, make_output, make_rows, open_ledger, run_job

from offline_diffusion.cli.main import main
from offline_diffusion.data import sink as sink_module
from offline_diffusion.data.sink import Sink
from offline_diffusion.data.status import read_status
from offline_diffusion.errors import JobError


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
    silent = read_status(tmp_path, now=time.time() + 60)
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


def test_a_damaged_heartbeat_is_left_out(tmp_path: Path) -> None:
    run_job(open_ledger(tmp_path, 2, 2), make_rows(2))
    (tmp_path / "_state" / "tasks" / "task-00001.json").write_text('{"shards": {"x": 1}}')
    assert [task.task for task in read_status(tmp_path).tasks] == [0]


def test_not_an_output_folder(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not an output folder"):
        read_status(tmp_path)


def test_a_task_that_has_ended_shows_its_mean(tmp_path: Path) -> None:
    run_job(open_ledger(tmp_path, 6, 2), make_rows(6), failing={(1, 0): "nan"})
    path = tmp_path / "_state" / "tasks" / "task-00000.json"
    beat = json.loads(path.read_bytes())
    beat["started_at"] = beat["updated_at"] - 12.0
    path.write_text(json.dumps(beat))
    status = read_status(tmp_path, now=beat["updated_at"] + 86_400)
    assert [worker.images_per_s for worker in status.workers] == [pytest.approx(0.5)]
    assert status.images_per_s == pytest.approx(0.5)
    shown = CliRunner().invoke(main, ["status", str(tmp_path)]).stdout.splitlines()[0]
    assert shown.endswith("0.5 images/s")
