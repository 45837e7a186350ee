"""Outputs on object storage: against a real S3 server whose requests fail on demand, and in memory."""

import functools
import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import fsspec
import pyarrow.parquet as pq
import pytest
from output_fakes import all_images, contents, make_identity, make_output, make_rows, run_job
from s3_server import BUCKET, Fault, S3Request, S3Server

from offline_diffusion.config import make_job_config
from offline_diffusion.data import heartbeat, tables
from offline_diffusion.data import storage as storage_module
from offline_diffusion.data.claims import Claims
from offline_diffusion.data.files import to_json
from offline_diffusion.data.heartbeat import Heartbeat, heartbeat_name
from offline_diffusion.data.ledger import Ledger, open_to_read
from offline_diffusion.data.process import ProcessId
from offline_diffusion.data.quick_check import find_broken
from offline_diffusion.data.shard_queue import ShardQueue
from offline_diffusion.data.sink import Sink
from offline_diffusion.data.staged_remote import StagedPublications
from offline_diffusion.data.status import read_status
from offline_diffusion.data.storage import Storage
from offline_diffusion.data.verify import verify, verify_shards
from offline_diffusion.errors import ConfigError, JobError, JobInterrupted, JobMismatchError

URL = f"s3://{BUCKET}/job"
ROWS = make_rows(6, images=2, faults=(4,))
TABLES = {f"{table}/shard-0000{shard}.parquet" for table in ("images", "metrics") for shard in range(2)} | {
    "failures/shard-00001.parquet"
}


class Killed(BaseException):
    """What a process does after this no storage ever sees."""


def open_job(work: Path, url: str = URL, *, rows: int = 6, **options: Any) -> Ledger:
    ledger = Ledger(work, Storage(url, **options))
    ledger.open(make_identity(rows, 3))
    return ledger


def check(s3: S3Server, folder: Path, whole: Path) -> None:
    """A copy of what is there is a whole dataset, the same as that of a run on a disk."""
    copy = s3.download("job", folder)
    report = verify(copy, num_threads=1)
    assert report.ok, report.problems
    assert report.finished
    assert contents(copy) == contents(whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    ledger = Ledger(out)
    ledger.open(make_identity(6, 3))
    run_job(ledger, ROWS)
    return out


def test_a_job_is_there_as_on_a_disk(s3: S3Server, tmp_path: Path, whole: Path) -> None:
    ledger = open_job(tmp_path / "work")
    run_job(ledger, ROWS)
    check(s3, tmp_path / "copy", whole)
    keys = set(s3.keys("job"))
    assert {key for key in keys if not key.startswith("_state/")} == {*TABLES, "README.md", "job.json"}
    assert not [key for key in keys if key.startswith(("_state/staged", "_state/claims", "_state/partial"))]
    left = [path for path in (tmp_path / "work").rglob("*") if path.suffix in {".parquet", ".arrows"}]
    assert not left, "the working folder keeps no images"


def test_nothing_is_done_twice(s3: S3Server, tmp_path: Path) -> None:
    run_job(open_job(tmp_path / "work"), ROWS)
    before = s3.keys("job")
    for work in (tmp_path / "work", tmp_path / "another machine"):
        drawn: list[tuple[int, int]] = []
        run_job(open_job(work), ROWS, drawn=drawn)
        assert not drawn
    uploads = [request for request in s3.requests if request.verb == "PUT" and "staged" in request.key]
    assert len(uploads) == len(TABLES)
    assert {key: size for key, size in s3.keys("job").items() if "tasks" not in key}.items() <= before.items()


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_death_at_every_request(
    s3: S3Server, tmp_path: Path, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th request is the last of a process; then another machine goes on, or this one."""
    do, calls = Storage._do, 0

    def dying(self: Storage, path: str, request: Callable[[], Any]) -> Any:
        nonlocal calls
        if path.startswith("_state/tasks/"):
            return do(self, path, request)
        calls += 1
        if calls < last:
            return do(self, path, request)
        if calls == last and after:
            do(self, path, request)
        raise Killed

    rows = make_rows(2)
    for last in range(1, 200):
        s3.reset()
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(Storage, "_do", dying)
            try:
                run_job(open_job(tmp_path / f"{last}", rows=2), rows)
                break
            except Killed:
                pass
        work = tmp_path / (f"{last}" if last % 2 else f"{last} elsewhere")
        run_job(open_job(work, rows=2), rows)
        copy = s3.download("job", tmp_path / f"{last} copy")
        report = verify(copy, num_threads=1)
        assert (report.ok, report.finished, report.num_images) == (True, True, 2), report.problems
        assert not [key for key in s3.keys("job") if key.startswith("_state/staged")]
    assert last > 20


@pytest.mark.parametrize("kind", ["busy", "lost"])
def test_requests_that_fail_are_made_again(s3: S3Server, tmp_path: Path, whole: Path, kind: Fault) -> None:
    """Each first try fails; where the answer is lost, what was done must not be taken for another's deed."""
    seen: set[S3Request] = set()

    def first_try(request: S3Request) -> Fault | None:
        if request in seen or "tasks" in request.key:
            return None
        seen.add(request)
        return kind

    s3.fault = first_try
    said: list[str] = []
    run_job(open_job(tmp_path / "work", say=said.append), ROWS)
    s3.fault = lambda _: None
    check(s3, tmp_path / "copy", whole)
    assert len(seen) > 20


def test_an_outage_ends_the_job_in_good_order_and_nothing_is_lost(
    s3: S3Server, tmp_path: Path, whole: Path
) -> None:
    s3.fault = lambda request: "busy" if "staged" in request.key else None
    said: list[str] = []
    drawn: list[tuple[int, int]] = []
    with pytest.raises(JobInterrupted, match=r"cannot be reached: .*made up") as caught:
        run_job(open_job(tmp_path / "work", say=said.append, give_up_after_s=1.0), ROWS, drawn=drawn)
    assert caught.value.exit_code == 75
    assert [line for line in said if "trying again, for at most 1 s" in line]
    s3.fault = lambda _: None
    again: list[tuple[int, int]] = []
    run_job(open_job(tmp_path / "work"), ROWS, drawn=again)
    check(s3, tmp_path / "copy", whole)
    assert not {*drawn[:6]} & {*again}, "images of the first shard are drawn again"


def test_what_is_denied_is_told_at_once_with_where_credentials_come_from(
    s3: S3Server, tmp_path: Path
) -> None:
    s3.fault = lambda _: "denied"
    with pytest.raises(JobError, match=f"{URL}/job.json: (made up|Forbidden)") as caught:
        open_job(tmp_path)
    assert "AWS_PROFILE" in (caught.value.hint or "")


def test_a_place_that_holds_something_else_is_left_alone(s3: S3Server, tmp_path: Path) -> None:
    s3.put("job/thesis.pdf", b"dear")
    with pytest.raises(JobError, match=r"is not empty and was not written by offdiff: it holds thesis\.pdf"):
        open_job(tmp_path)
    assert set(s3.keys("job")) == {"thesis.pdf"}


def test_another_job_is_refused(s3: S3Server, tmp_path: Path) -> None:
    open_job(tmp_path / "a")
    with pytest.raises(JobMismatchError, match="num_rows: 6 -> 7"):
        open_job(tmp_path / "b", rows=7)


def test_a_job_that_was_deleted_there_begins_anew(s3: S3Server, tmp_path: Path, whole: Path) -> None:
    run_job(open_job(tmp_path / "work"), ROWS)
    for key in s3.keys("job"):
        s3.delete(f"job/{key}")
    run_job(open_job(tmp_path / "work"), ROWS)
    check(s3, tmp_path / "copy", whole)


@pytest.mark.parametrize("how", ["missing", "cut short", "marker"])
def test_what_is_broken_is_made_again(s3: S3Server, tmp_path: Path, whole: Path, how: str) -> None:
    run_job(open_job(tmp_path / "work"), ROWS)
    if how == "marker":
        s3.delete("job/_state/shards/shard-00001.json")
    elif how == "missing":
        s3.delete("job/images/shard-00001.parquet")
    else:
        s3.put("job/images/shard-00001.parquet", b"PAR1")
    with open_to_read(URL) as ledger:
        reports = list(verify_shards(ledger, num_threads=1))
    assert [report.done and not report.problems for report in reports] == [True, False]
    ledger = open_job(tmp_path / "work")
    broken = find_broken(ledger, ledger.shards)
    assert list(broken) == ([] if how == "marker" else [1])
    run_job(ledger, ROWS)
    check(s3, tmp_path / "copy", whole)


def test_failures_are_retried(s3: S3Server, tmp_path: Path, whole: Path) -> None:
    failing = {(0, 1): "nan"}
    run_job(open_job(tmp_path / "work"), ROWS, failing=failing)
    drawn: list[tuple[int, int]] = []
    run_job(open_job(tmp_path / "elsewhere"), ROWS, retry_failed=True, drawn=drawn)
    assert drawn == [(0, 1)]
    check(s3, tmp_path / "copy", whole)
    assert {"_state/shards/shard-00000.json", "_state/shards/shard-00000.r1.json"} <= set(s3.keys("job"))
    assert pq.read_table(tmp_path / "copy" / "failures" / "shard-00000.parquet").num_rows == 0
    deleted = [request.key for request in s3.requests if request.verb == "DELETE"]
    assert not [key for key in deleted if not key.startswith("job/_state/")], "anybody may do that late"


def test_files_that_a_publication_does_not_need_any_more_are_empty(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five files of images and one of failures, then one and none; markers may be gone. Catches files of the
    publication before that readers of the folder take in."""
    with monkeypatch.context() as patch:
        patch.setattr(tables, "FILE_BYTES", 0)
        patch.setattr(tables, "ROW_GROUP_ROWS", 1)
        run_job(open_job(tmp_path / "work", rows=3), ROWS[:3], failing={(0, 1): "nan"})
    parts = [key for key in s3.keys("job") if key.startswith("images/")]
    assert len(parts) == 5
    run_job(open_job(tmp_path / "elsewhere", rows=3), ROWS[:3], retry_failed=True)
    copy = s3.download("job", tmp_path / "copy")
    assert [len(pq.read_table(copy / part)) for part in sorted(parts)] == [6, 0, 0, 0, 0]
    assert verify(copy, num_threads=1).problems == []
    images = datasets.load_dataset(str(copy), "images", split="train", cache_dir=str(tmp_path / "cache"))
    assert [(row["row"], row["image_index"]) for row in images] == [(n // 2, n % 2) for n in range(6)]
    assert datasets.get_dataset_config_names(str(copy)) == ["images", "metrics"]
    for key in list(s3.keys("job/_state/shards")):
        s3.delete(f"job/_state/shards/{key}")
    s3.put("job/failures/shard-00000.parquet", (copy / "metrics" / "shard-00000.parquet").read_bytes())
    run_job(open_job(tmp_path / "work", rows=3), ROWS[:3])
    copy = s3.download("job", tmp_path / "another copy")
    assert pq.read_table(copy / "failures" / "shard-00000.parquet").num_rows == 0


def freeze_in_move(
    patch: pytest.MonkeyPatch, late: Ledger, last: int, others: Callable[[], None]
) -> list[str]:
    """Lets others act before the ``last``-th request that a worker makes to put files into their places.

    Returns:
        The paths of these requests, as they are made.
    """
    assert late.remote is not None
    do, move, frozen = Storage._do, StagedPublications.move, late.remote.storage
    moving, requests = threading.Event(), list[str]()

    def freezing(self: Storage, path: str, request: Callable[[], Any]) -> Any:
        if self is frozen and moving.is_set():
            requests.append(path)
            if len(requests) == last:
                others()
        return do(self, path, request)

    def moves(self: StagedPublications, *arguments: Any) -> None:
        if self.remote.storage is frozen:
            moving.set()
        move(self, *arguments)
        if self.remote.storage is frozen:
            moving.clear()

    patch.setattr(Storage, "_do", freezing)
    patch.setattr(StagedPublications, "move", moves)
    return requests


@pytest.mark.slow
def test_a_winner_frozen_before_any_request_of_its_move_changes_nothing(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts a retry without failures into its place; meanwhile something breaks and the shard is published
    again, with failures and in more files. Catches whatever it does by a final name after a look."""
    rows, after = make_rows(2), dict[str, str]()

    def others() -> None:
        ledger = open_job(tmp_path / f"{last} work", rows=2)
        s3.delete("job/metrics/shard-00000.parquet")
        with monkeypatch.context() as patch:
            patch.setattr(tables, "FILE_BYTES", 0)
            patch.setattr(tables, "ROW_GROUP_ROWS", 1)
            run_job(ledger, rows, failing={(1, 0): "nan"})
        after.update(table_tags(s3))

    for last in range(1, 100):
        s3.reset()
        after.clear()
        run_job(open_job(tmp_path / f"{last} first", rows=2), rows, failing={(0, 0): "nan"})
        late = open_job(tmp_path / f"{last} late", rows=2)
        with monkeypatch.context() as patch:
            requests = freeze_in_move(patch, late, last, others)
            run_job(late, rows, retry_failed=True)
        if len(requests) < last:
            break
        assert {"failures/shard-00000.parquet", "metrics/shard-00000.part001.parquet"} <= after.keys()
        assert table_tags(s3) == after, requests[last - 1 :]
        report = verify(s3.download("job", tmp_path / f"{last} copy"), num_threads=1)
        assert (report.problems, report.num_images) == ([], 1)
    assert last > 8


def table_tags(s3: S3Server) -> dict[str, str]:
    """What is in the tables' folders."""
    keys = [key for key in s3.keys("job") if key.startswith(("images/", "metrics/", "failures/"))]
    return {key: s3.client.get_object(Bucket=BUCKET, Key=f"job/{key}")["ETag"] for key in keys}


def test_a_late_winner_changes_nothing(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has committed and freezes; others put its files into their places and publish the shard again."""
    late: list[tuple[Any, ...]] = []
    move = StagedPublications.move
    with monkeypatch.context() as patch:
        patch.setattr(StagedPublications, "move", lambda *arguments: late.append(arguments))
        patch.setattr(StagedPublications, "roll_forward", lambda *_: None)
        run_job(open_job(tmp_path / "late"), ROWS[:3] + ROWS[3:], failing={(0, 0): "nan"})
    run_job(open_job(tmp_path / "work"), ROWS, retry_failed=True)
    before = {key: s3.client.get_object(Bucket=BUCKET, Key=f"job/{key}")["ETag"] for key in s3.keys("job")}
    for arguments in late:
        move(*arguments)
    after = {key: s3.client.get_object(Bucket=BUCKET, Key=f"job/{key}")["ETag"] for key in s3.keys("job")}
    assert after == before


def test_of_two_that_publish_at_once_one_wins(s3: S3Server, tmp_path: Path, whole: Path) -> None:
    """Both make every shard without a claim, as a frozen one and its heir may."""
    threads = [
        threading.Thread(target=lambda n=n: run_job(open_job(tmp_path / f"{n}"), ROWS)) for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(s3, tmp_path / "copy", whole)
    markers = [key for key in s3.keys("job") if key.startswith("_state/shards")]
    assert len(markers) == 2
    for key in markers:
        marker = json.loads(s3.client.get_object(Bucket=BUCKET, Key=f"job/{key}")["Body"].read())
        (images,) = (file for file in marker["files"] if file["path"].startswith("images"))
        assert s3.keys("job")[images["path"]] == images["num_bytes"]


def test_a_loser_whose_uploads_the_winner_has_swept(s3: S3Server, tmp_path: Path, whole: Path) -> None:
    """Between its last upload and its look at what arrived: it has lost, and its job goes on."""
    loser, winner = open_job(tmp_path / "a"), open_job(tmp_path / "b")
    assert loser.remote is not None
    storage, has_run = loser.remote.storage, False
    real = storage.names

    def names(folder: str) -> dict[str, int]:
        nonlocal has_run
        if folder.startswith("_state/staged/") and not has_run:
            has_run = True
            run_job(winner, ROWS)
        return real(folder)

    storage.names = names  # type: ignore[method-assign]
    run_job(loser, ROWS)
    assert has_run
    check(s3, tmp_path / "copy", whole)


def queue_of(ledger: Ledger, worker: str, share: list[int]) -> ShardQueue:
    claims = Claims(ledger.out, worker=worker, task=0, job_id=ledger.job.job_id, files=ledger.files)
    todo = dict.fromkeys(range(len(ledger.shards)))
    looks = itertools.count(step=2.0)
    clock = functools.partial(next, looks)
    return ShardQueue(ledger, claims, todo=todo, share=share, costs=[1.0, 1.0], clock=clock)


def test_machines_share_nothing_but_the_storage_and_keep_apart(s3: S3Server, tmp_path: Path) -> None:
    ledgers = [open_job(tmp_path / name) for name in "ab"]
    queues = [queue_of(ledger, f"w{n}", [n]) for n, ledger in enumerate(ledgers)]
    taken = [queue.take() for queue in queues]
    assert [claimed.shard.index for claimed in taken if claimed] == [0, 1]
    assert queues[0].take() is None, "the other one has it"
    queues[1].close()
    (again,) = filter(None, [queues[0].take()])
    assert (again.shard.index, again.generation) == (1, 1)


def test_what_a_stopped_machine_has_made_another_one_goes_on_with(
    s3: S3Server, tmp_path: Path, whole: Path
) -> None:
    ledger = open_job(tmp_path / "a")
    queue = queue_of(ledger, "a", [0, 1])
    claimed = queue.take()
    assert claimed is not None
    sink = Sink(ledger)
    sink.open_shard(claimed.shard, ROWS[:3], generation=claimed.generation)
    for image in all_images(ROWS[:2]):
        sink.submit(0, image, make_output(image))
    sink.close(abandon=True)
    (ledger.out / "_state" / "steps" / "shard-00000.000000.safetensors").write_bytes(b"steps")
    queue.park()
    queue.close()
    other = open_job(tmp_path / "b")
    assert queue_of(other, "b", [0, 1]).take() == (other.shards[0], 1)
    assert (other.out / "_state" / "steps" / "shard-00000.000000.safetensors").read_bytes() == b"steps"
    drawn: list[tuple[int, int]] = []
    run_job(other, ROWS, drawn=drawn)
    assert {row for row, _ in drawn} == {2, 3, 5}
    check(s3, tmp_path / "copy", whole)
    assert not [key for key in s3.keys("job") if key.startswith(("_state/partial", "_state/steps"))]


def test_signs_of_earlier_workers_do_not_pile_up(s3: S3Server, tmp_path: Path) -> None:
    ledger, now = open_job(tmp_path), time.time()
    assert ledger.remote is not None
    states = {"gone": ("running", 2 * 86_400.0), "quiet": ("running", 3600.0), "own": ("running", 0.0)}
    for n in range(6):
        states[f"done{n}"] = ("done", 100.0 * n)
    for worker, (state, age_s) in states.items():
        beat = Heartbeat(task=3, num_tasks=4, worker=worker, state=state, updated_at=now - age_s)
        s3.put(f"job/_state/tasks/task-00003.{worker}.json", to_json(asdict(beat)))
    s3.put("job/_state/tasks/task-00004.other.json", b"{}")
    ledger.drop_old_heartbeats(3, "own")
    kept = {key.split("/")[-1] for key in s3.keys("job") if "tasks" in key}
    workers = {name.split(".")[1] for name in kept if name.startswith("task-00003")}
    assert workers == {"own", "quiet", "done0", "done1", "done2", "done3"}
    assert "task-00004.other.json" in kept


def test_status_and_verify_read_the_storage_alone(s3: S3Server, tmp_path: Path) -> None:
    run_job(open_job(tmp_path / "work"), ROWS, failing={(0, 0): "nan"})
    status = read_status(URL)
    assert (status.out, status.finished, status.num_ok, status.num_failed) == (URL, True, 9, 1)
    assert status.num_invalid_rows == 1
    assert [worker.state for worker in status.workers] == ["done"]
    with open_to_read(URL) as ledger:
        reports = list(verify_shards(ledger, num_threads=1))
        assert not list(ledger.out.glob("images/*")), "a shard's files go before the next one's come"
    assert [(report.num_rows, report.num_images, report.problems) for report in reports] == [
        (3, 5, []),
        (3, 4, []),
    ]


def test_who_is_at_work_is_told_by_the_clock_of_the_storage(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the worker's clock nor by the reader's: both may be wrong."""
    ledger = open_job(tmp_path)
    assert ledger.remote is not None
    process = ProcessId(host="h", boot_id="another", pid_namespace="p", pid=1, started="1")
    for hours in (-2, 0, 2):
        beat = Heartbeat(task=0, num_tasks=1, worker=f"w{hours}", process=process)
        beat.updated_at = time.time() + hours * 3600
        s3.put(f"job/{heartbeat_name(0, beat.worker)}", to_json(asdict(beat)))
        monkeypatch.setattr(
            storage_module, "time", SimpleNamespace(time=lambda h=hours: time.time() + h * 3600)
        )
        states = [worker.state for worker in read_status(URL).workers]
        assert states == ["running"] * len(states)
    assert len(states) == 3
    time.sleep(2.1)
    monkeypatch.setattr(heartbeat, "STALE_S", 1.0)  # dates over there are whole seconds
    assert {worker.state for worker in read_status(URL).workers} == {"lost"}


def test_nothing_there_is_told(s3: S3Server) -> None:
    with pytest.raises(JobError, match=f"{URL} is not an output of offdiff: it has no job.json"):
        read_status(URL)


def test_a_storage_that_cannot_tell_the_first_from_the_second_is_noticed(
    s3: S3Server, tmp_path: Path
) -> None:
    ledger = open_job(tmp_path)
    assert ledger.remote is not None
    assert ledger.remote.is_exclusive()
    s3.ignores_conditions = True
    assert not ledger.remote.is_exclusive()


def test_any_file_system_of_fsspec_will_do(tmp_path: Path, whole: Path) -> None:
    fs = fsspec.filesystem("memory")
    run_job(open_job(tmp_path / "work", "memory://bucket/job"), ROWS)
    fs.get("/bucket/job", str(tmp_path / "copy"), recursive=True)
    assert verify(tmp_path / "copy", num_threads=1).ok
    assert contents(tmp_path / "copy") == contents(whole)
    fs.rm("/bucket", recursive=True)


def test_an_unknown_kind_of_storage_is_told() -> None:
    with pytest.raises(ConfigError, match=r"nosuch://x/y: .*nosuch"):
        Storage("nosuch://x/y")


def test_a_storage_that_is_only_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path, Storage("memory://bucket/job"))
    monkeypatch.setattr(
        "fsspec.implementations.memory.MemoryFileSystem.pipe_file",
        lambda *_, **__: (_ for _ in ()).throw(NotImplementedError),
    )
    with pytest.raises(JobError, match="this storage cannot be written to"):
        ledger.open(make_identity(6, 3))


def test_an_upload_that_did_not_arrive_whole_is_not_published(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Storage.upload

    def cut(self: Storage, source: Path, path: str) -> None:
        upload(self, source, path)
        s3.put(f"job/{path}", source.read_bytes()[:-1])

    monkeypatch.setattr(Storage, "upload", cut)
    with pytest.raises(JobError, match="is not what was uploaded"):
        run_job(open_job(tmp_path), ROWS)
    assert not [key for key in s3.keys("job") if key.startswith(("_state/shards", "images"))]


def test_sixteen_that_begin_at_once_begin_the_same_job(s3: S3Server, tmp_path: Path) -> None:
    """As the tasks of an array do. Catches one that takes another's job.json for something foreign."""
    with ThreadPoolExecutor(16) as threads:
        ledgers = list(threads.map(lambda n: open_job(tmp_path / f"{n}"), range(16)))
    assert len({ledger.job.job_id for ledger in ledgers}) == 1


def test_of_many_that_claim_at_once_one_wins(s3: S3Server, tmp_path: Path) -> None:
    ledger = open_job(tmp_path)

    def claim(number: int) -> bool:
        claims = Claims(ledger.out, worker=f"w{number}", task=0, job_id=ledger.job.job_id, files=ledger.files)
        return claims.create(ledger.shards[0], 0)

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(claim, range(16))) == 1


def test_workers_see_what_others_publish_while_they_run(s3: S3Server, tmp_path: Path) -> None:
    a, b = (open_job(tmp_path / name) for name in "ab")
    assert b.published() == set()
    run_job(a, ROWS)
    b.refresh(b.shards[1])
    assert b.marker(b.shards[1]) == a.marker(a.shards[1])
    b._next_pull = 0.0  # as after some seconds
    assert b.published() == {0, 1}


def test_who_works_for_a_job_that_is_there_no_more_publishes_nothing(s3: S3Server, tmp_path: Path) -> None:
    """The place was emptied and begun anew while a worker ran: its images may be of another model."""
    old = open_job(tmp_path / "old")
    for key in s3.keys("job"):
        s3.delete(f"job/{key}")
    open_job(tmp_path / "new")
    with pytest.raises(JobError, match=r"is not this job's any more"):
        run_job(old, ROWS)
    assert not [key for key in s3.keys("job") if key.startswith(("images", "_state/shards", "_state/staged"))]


def test_who_knows_an_older_marker_leaves_alone_what_was_committed_since(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker was deleted, and the shard is made again under the same name just now."""
    a = open_job(tmp_path / "a")
    run_job(a, ROWS)
    s3.delete("job/_state/shards/shard-00001.json")
    with monkeypatch.context() as patch:
        patch.setattr(StagedPublications, "move", lambda *_: None)  # it has committed and not moved yet
        patch.setattr(StagedPublications, "roll_forward", lambda *_: None)
        run_job(open_job(tmp_path / "b"), ROWS)
    assert any(key.startswith("_state/staged/shard-00001") for key in s3.keys("job"))
    a.publications.roll_forward()
    report = verify(s3.download("job", tmp_path / "copy"), num_threads=1)
    assert report.ok, report.problems
    assert report.finished


@pytest.mark.parametrize("status", ["412 Precondition Failed", "409 Conflict"])
def test_stores_that_answer_otherwise_when_a_file_is_there(s3: S3Server, tmp_path: Path, status: str) -> None:
    """Some do not say which condition failed; and who comes at the same moment may be asked to try again."""
    open_job(tmp_path / "a")
    s3.answers = {"denied": (status, status.split(" ", 1)[1].replace(" ", ""))}
    asked: list[S3Request] = []

    def once(request: S3Request) -> Fault | None:
        if request.verb != "PUT" or not request.key.endswith("job.json") or asked:
            return None
        asked.append(request)
        return "denied"

    s3.fault = once
    ledger = Ledger(tmp_path / "b", Storage(URL))
    assert ledger.remote is not None
    assert not ledger.remote.storage.create("job.json", b"another")
    assert asked


def test_a_lost_answer_to_an_upload_in_parts_is_no_end(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library then tries to abort the upload, which is over, and says that there is no such file."""
    storage, calls = Storage(URL), list[str]()
    put = storage._fs.put_file

    def put_file(source: str, path: str) -> None:
        calls.append(path)
        put(source, path)
        if len(calls) == 1:
            raise FileNotFoundError("The specified upload does not exist")

    monkeypatch.setattr(storage._fs, "put_file", put_file)
    (tmp_path / "file").write_bytes(b"content")
    storage.upload(tmp_path / "file", "there")
    assert len(calls) == 2
    assert s3.keys("job") == {"there": 7}
    with pytest.raises(FileNotFoundError):
        storage.upload(tmp_path / "nothing", "there")


@pytest.mark.parametrize("url", ["s3://", "s3://bucket//job", "s3://bucket/a[1]", "s3://bucket/a*"])
def test_urls_that_would_be_patterns_or_no_place_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="out: must be"):
        make_job_config({"manifests": "a.jsonl", "out": url})


def test_a_stopped_retry_is_gone_on_with_elsewhere(s3: S3Server, tmp_path: Path) -> None:
    """All shards are published then, yet what is parked of this one is needed."""
    rows = make_rows(6, images=2)
    run_job(open_job(tmp_path / "a"), rows, failing={(0, 0): "nan", (0, 1): "nan"})
    ledger = open_job(tmp_path / "a")
    marker = ledger.marker(ledger.shards[0])
    assert marker is not None
    name = f"shard-00000.{marker.generation + 1:06d}-0123abcd.arrows"
    (ledger.partials / name).touch()
    ledger.park(ledger.shards[0], until=time.monotonic() + 10)
    (ledger.partials / "shard-00001.000009-0123abcd.arrows").touch()
    ledger.park(ledger.shards[1], until=time.monotonic() + 10)
    ledger.finish()
    parked = [key.split("/")[-1] for key in s3.keys("job") if key.startswith("_state/parked")]
    assert parked == [name], "the other shard has nothing to retry"


def test_a_stop_waits_for_the_upload_at_work_and_for_no_other(s3: S3Server, tmp_path: Path) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def slow(request: S3Request) -> Fault | None:
        if request.verb == "PUT" and "staged/shard-00000" in request.key:
            began.set()
            goes_on.wait(60)
        return None

    s3.fault = slow
    ledger = open_job(tmp_path)
    sink = Sink(ledger)
    for shard in ledger.shards:
        sink.open_shard(shard, ROWS[shard.start : shard.stop])
    for image in all_images(ROWS[:3]):
        sink.submit(0, image, make_output(image))
    assert began.wait(30)
    for image in all_images(ROWS[3:]):  # else they may be all written before the last of the first shard
        sink.submit(1, image, make_output(image))
    begun, deadline = list(sink._open.values()), time.monotonic() + 30

    def are_durable() -> bool:
        return len(sink.finished(1) or ()) == 4 and all(writer._partial._synced for writer in begun)

    while not are_durable() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert are_durable(), "images of the second shard are written and synced during the upload"
    sink.abandon()
    goes_on.set()
    sink.close(abandon=True)
    assert [key for key in s3.keys("job") if "shards/" in key] == ["_state/shards/shard-00000.json"]
    drawn: list[tuple[int, int]] = []
    run_job(open_job(tmp_path), ROWS, drawn=drawn)
    assert drawn == []
