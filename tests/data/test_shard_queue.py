"""The queue of shards: own share first, then the dearest that is free, then what the dead left."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from output_fakes import make_rows, open_ledger, run_job

from offline_diffusion.data.claims import Claims, OwnerWatch
from offline_diffusion.data.deaths import Flight, FlightLog, suspicions_of
from offline_diffusion.data.heartbeat import Heartbeat, write_heartbeat
from offline_diffusion.data.layout import STEPS, StagedFolder
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.process import ProcessId, this_process
from offline_diffusion.data.shard_queue import ShardQueue

NUM_SHARDS = 6
COSTS = [1.0, 5.0, 2.0, 9.0, 5.0, 3.0]
ROWS = make_rows(2 * NUM_SHARDS)
DEAD = replace(this_process(), pid=2**22)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.2  # every look is a little later
        return self.now


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return open_ledger(tmp_path, 2 * NUM_SHARDS, 2)


def beat(ledger: Ledger, worker: str, state: Any = "running") -> None:
    write_heartbeat(ledger.out, Heartbeat(task=0, num_tasks=1, worker=worker, state=state))


def queue_of(ledger: Ledger, worker: str, share: list[int], **options: Any) -> ShardQueue:
    beat(ledger, worker)
    clock, job_id = Clock(), ledger.job.job_id
    todo = options.pop("todo", {n: None for n in range(NUM_SHARDS) if n not in ledger.published()})
    return ShardQueue(
        ledger,
        Claims(ledger.out, worker=worker, task=0, job_id=job_id),
        todo=todo,
        share=share,
        costs=COSTS,
        watch=OwnerWatch(ledger.out, job_id, stale_s=30.0, clock=clock),
        clock=clock,
        **options,
    )


def publish(ledger: Ledger, *shards: int) -> None:
    """Publishes some shards as a worker that is done would."""
    folder = ledger.out / "elsewhere"
    other = open_ledger(folder, 2 * NUM_SHARDS, 2)
    run_job(other, ROWS)
    for number in shards:
        marker = other.marker_path(other.shards[number])
        marker.rename(ledger.markers_folder / marker.name)


def take_all(queue: ShardQueue, limit: int = 500) -> list[tuple[int, int]]:
    taken = []
    for _ in range(limit):
        if not queue.is_open:
            break
        if (claimed := queue.take()) is not None:
            taken.append((claimed.shard.index, claimed.generation))
    return taken


def test_own_share_in_order_then_the_dearest(ledger: Ledger) -> None:
    queue = queue_of(ledger, "a", [5, 0])
    assert queue.num_rows_ahead == 4
    assert queue.has_work() is True
    assert take_all(queue) == [(n, 0) for n in (0, 5, 3, 1, 4, 2)]
    assert queue.num_rows_ahead == 0
    assert (queue.is_open, queue.take(), queue.num_left_to_others) == (False, None, 0)


def test_in_order_where_jumps_are_dear(ledger: Ledger) -> None:
    assert [n for n, _ in take_all(queue_of(ledger, "a", [4], ascending=True))] == [4, 0, 1, 2, 3, 5]


def test_two_workers_share_without_a_word(ledger: Ledger) -> None:
    first, second = queue_of(ledger, "a", [0, 2, 4]), queue_of(ledger, "b", [1, 3, 5])
    taken: dict[str, list[int]] = {"a": [], "b": []}
    for name, queue in (("a", first), ("b", second), ("a", first), ("a", first), ("a", first), ("b", second)):
        claimed = queue.take()
        assert claimed is not None
        taken[name].append(claimed.shard.index)
    assert taken == {"a": [0, 2, 4, 3], "b": [1, 5]}
    for queue in (first, second):
        assert queue.take() is None
        assert queue.is_open, "the other may be dead"


def test_a_second_start_of_a_task_shares_it(ledger: Ledger) -> None:
    """Both of the same share: no shard is given twice."""
    first, second = (queue_of(ledger, name, list(range(NUM_SHARDS))) for name in "ab")
    taken = [queue.take() for queue in (first, second, second, first, first, second)]
    assert [claimed.shard.index for claimed in taken if claimed] == [0, 1, 2, 3, 4, 5]


def test_a_live_owner_keeps_its_shards(ledger: Ledger) -> None:
    first, second = queue_of(ledger, "a", []), queue_of(ledger, "b", [])
    assert len(take_all(first)) == NUM_SHARDS
    assert second.has_work() is None
    for _ in range(NUM_SHARDS):
        assert second.take() is None
    beat(ledger, "a")
    assert second.take() is None
    assert second.has_work() is False
    assert (second.is_open, second.num_left_to_others) == (False, NUM_SHARDS)
    publish(ledger, 1, 2)
    assert second.num_left_to_others == NUM_SHARDS - 2


def test_a_silent_owner_loses_its_shards(ledger: Ledger) -> None:
    first, second = queue_of(ledger, "a", [3]), queue_of(ledger, "b", [1, 3])
    assert first.take() is not None
    assert [n for n, _ in take_all(second, limit=5)] == [1, 4, 5, 2, 0]
    assert second.take() is None
    assert second.is_open
    assert take_all(second) == [(3, 1)], "the next generation"
    assert first.num_left_to_others == 0
    assert not second.is_open


def test_what_was_let_go_is_taken_at_once_and_in_order(ledger: Ledger) -> None:
    first = queue_of(ledger, "a", [0, 1, 2])
    for _ in range(3):
        first.take()
    publish(ledger, 1)
    first.close()
    names = sorted(path.name for path in (ledger.state / "claims").iterdir())
    assert not any("shard-00001" in name for name in names), "claims of what is published go"
    assert "shard-00000.000000.released" in names
    assert take_all(queue_of(ledger, "b", [0, 1, 2]), limit=2) == [(0, 1), (2, 1)]


def test_an_owner_that_stopped_without_letting_go_loses_its_shards(ledger: Ledger) -> None:
    queue_of(ledger, "a", [0]).take()
    beat(ledger, "a", "stopped")
    assert take_all(queue_of(ledger, "b", [0]), limit=1) == [(0, 1)]


def test_what_others_publish_meanwhile_is_passed_over(ledger: Ledger) -> None:
    queue = queue_of(ledger, "a", [0, 1, 2])
    assert queue.take() is not None
    publish(ledger, 0, 1, 3)
    assert [n for n, _ in take_all(queue)] == [2, 4, 5]
    queue.let_go(lambda _: False)
    assert not any("shard-00000" in path.name for path in (ledger.state / "claims").iterdir())


def test_a_generation_is_above_what_was_made_without_a_claim(ledger: Ledger) -> None:
    """As the version before left it, or where somebody has deleted the claims."""
    (ledger.partials / "shard-00002.000007-0123abcd.arrows").write_bytes(b"")
    assert take_all(queue_of(ledger, "a", [2]), limit=1) == [(2, 8)]


def test_a_publication_is_made_again_once(ledger: Ledger) -> None:
    """Two workers retry the same failures: whoever comes second finds another publication there."""
    run_job(ledger, ROWS, failing={(0, 0): "nan", (6, 0): "nan"})
    before = {n: ledger.markers()[n] for n in (0, 3)}
    first, second = (queue_of(ledger, name, [0, 3], todo=before) for name in "ab")
    assert [claimed.shard.index for claimed in (first.take(), second.take()) if claimed] == [0, 3]
    run_job(ledger, ROWS, retry_failed=True)
    assert (take_all(first), take_all(second)) == ([], [])
    for queue in (first, second):
        queue.close()
    assert not list((ledger.state / "claims").iterdir())


def test_leftovers_of_the_dead_are_cleared(ledger: Ledger) -> None:
    first = queue_of(ledger, "a", [])
    assert len(take_all(first)) == NUM_SHARDS
    publish(ledger, 0, 1)  # killed between the marker and the claim's removal
    third = queue_of(ledger, "c", [])
    third.clear_leftovers(ledger.markers())
    assert len(list((ledger.state / "claims").iterdir())) == NUM_SHARDS, "its owner may live"
    beat(ledger, "a", "stopped")
    third = queue_of(ledger, "c", [])
    third.clear_leftovers(ledger.markers())
    assert len(list((ledger.state / "claims").iterdir())) == NUM_SHARDS - 2
    assert third.num_left_to_others == 0


def test_scratch_files_of_the_dead_go_and_those_of_the_living_stay(ledger: Ledger) -> None:
    queue_of(ledger, "dead", [0]).take()
    beat(ledger, "dead", "stopped")
    queue_of(ledger, "alive", [1]).take()
    for number in (0, 1, 2):
        (ledger.scratch / f"shard-{number:05d}.images.1-ab").write_bytes(b"torn")
    queue = queue_of(ledger, "new", [0, 1])
    queue.clear_leftovers({})
    assert sorted(path.name[:11] for path in ledger.scratch.iterdir()) == ["shard-00001", "shard-00002"]
    assert take_all(queue, limit=1) == [(0, 1)]


def claimed_stems(ledger: Ledger) -> set[str]:
    return {path.name.split(".")[0] for path in (ledger.state / "claims").iterdir()}


def test_what_a_worker_makes_that_begins_meanwhile_stays(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start without --retry-failed clears up just as another worker begins a retry: that one claims after
    the claims were listed, and goes on from what an earlier retry has left."""
    run_job(ledger, ROWS, failing={(0, 0): "nan"})
    ledger.marker_path(ledger.shards[2]).unlink()
    old = [f"shard-0000{number}.000004-0123abcd.arrows" for number in (0, 1)]
    for name in old:
        (ledger.partials / name).touch()
    queue = queue_of(ledger, "a", list(range(NUM_SHARDS)))
    real = Claims.newest

    def others_begin_then(claims: Claims) -> Any:
        found = real(claims)
        if claims.worker == "a":
            other = Claims(ledger.out, worker="b", task=0, job_id=ledger.job.job_id)
            assert other.create(ledger.shards[0], 5)
            assert other.create(ledger.shards[2], 0)
            (ledger.partials / "shard-00000.000005-0123abcd.arrows").touch()
            (ledger.scratch / "shard-00002.000000.safetensors.7-ab").touch()
        return found

    monkeypatch.setattr(Claims, "newest", others_begin_then)
    queue.clear_leftovers(ledger.markers())
    made = {path.name for folder in (ledger.partials, ledger.scratch) for path in folder.iterdir()}
    assert made == {old[0], "shard-00000.000005-0123abcd.arrows", "shard-00002.000000.safetensors.7-ab"}


def test_a_claim_stays_until_the_files_are_in_their_places(ledger: Ledger) -> None:
    queue = queue_of(ledger, "a", [0, 1, 2])
    for _ in range(3):
        queue.take()
    publish(ledger, 0, 1)
    queue.let_go(lambda index: index != 1)
    assert claimed_stems(ledger) == {"shard-00000", "shard-00002"}
    assert queue.take() is not None
    assert {"shard-00000", "shard-00002"} < claimed_stems(ledger)


@pytest.mark.parametrize("in_time", [True, False])
def test_a_shard_that_was_lost_is_watched(ledger: Ledger, in_time: bool) -> None:
    """Catches one that is neither ours nor another worker's: should the new owner die, nobody would know."""
    first = queue_of(ledger, "a", [0])
    taken = take_all(first)
    beat(ledger, "a", "stopped")  # so it seemed to the other
    assert take_all(queue_of(ledger, "b", [0]), limit=1) == [(0, 1)]
    if in_time:
        first.let_go(lambda index: index != 0)
        assert (first.is_open, first.num_left_to_others) == (True, 1)
        beat(ledger, "b", "stopped")
        assert take_all(first) == [(0, 2)]
        assert len(taken) == NUM_SHARDS
    first.close()
    assert first.num_left_to_others == (0 if in_time else 1)
    assert ("shard-00000.000000.released" in os.listdir(ledger.state / "claims")) is False


@pytest.mark.parametrize(("state", "num_deaths"), [("stopped", 0), ("done", 0), ("running", 1)])
def test_only_who_did_not_say_goodbye_has_died(ledger: Ledger, state: str, num_deaths: int) -> None:
    """A worker that stops says so first and clears up then: whoever comes in between finds its log."""
    queue_of(ledger, "a", [0]).take()
    FlightLog(ledger.out, "a").begin(Flight(row=0, image_index=0, row_hash="abc", number=0, step=0))
    beat(ledger, "a", state)
    assert (0, 1) in take_all(queue_of(ledger, "b", [0]))
    found = suspicions_of(ledger.out, {0: "abc"}, number=0)
    assert sum(suspicion.num_deaths for suspicion in found.values()) == num_deaths


def test_who_works_for_another_job_has_not_died(ledger: Ledger) -> None:
    """The folder was given to another manifest while it worked; catches a live worker's log that goes."""
    other = Claims(ledger.out, worker="a", task=0, job_id="of the manifest before")
    assert other.create(ledger.shards[0], 0)
    beat(ledger, "a")
    log = FlightLog(ledger.out, "a")
    log.begin(Flight(row=0, image_index=0, row_hash="abc", number=0, step=0))
    assert take_all(queue_of(ledger, "b", [0]), limit=1) == [(0, 1)]
    assert suspicions_of(ledger.out, {0: "abc"}, number=0) == {}
    log.end((0, 0))
    assert list((ledger.state / "flights").iterdir()), "it goes on writing to it"


@pytest.mark.parametrize(
    ("process", "state", "goes"),
    [(DEAD, "running", True), (ProcessId(), "stopped", True), (ProcessId(), "running", False)],
)
def test_what_the_dead_staged_goes(ledger: Ledger, process: ProcessId, state: str, goes: bool) -> None:
    """A retry that was killed before its commit. One that is silent may be frozen, and commit later."""
    run_job(ledger, ROWS, failing={(0, 0): "nan"})
    claims = Claims(ledger.out, worker="a", task=0, job_id=ledger.job.job_id)
    claims._process = process
    assert claims.create(ledger.shards[0], 3)
    beat(ledger, "a", state)
    staged = ledger.publications.stage(ledger.shards[0], 1, "000003-0123abcd")
    assert staged.generation == 3
    (staged.path / "images.shard-00000.parquet").write_bytes(b"half")
    for _ in range(2):
        queue_of(ledger, "b", list(range(NUM_SHARDS))).clear_leftovers(ledger.markers())
    assert staged.path.exists() is not goes


def test_what_was_committed_by_the_dead_stays(ledger: Ledger) -> None:
    """It died between the commit and the move, after the publications were listed."""
    run_job(ledger, ROWS, failing={(0, 0): "nan"})
    publications = ledger.publications
    staged = publications.stage(ledger.shards[0], 1, "000003-0123abcd")

    def dies_after_its_commit(_: StagedFolder) -> bool:
        marker = publications.marker("shard-00000", 0)
        assert marker is not None
        assert publications.commit(staged, replace(marker, staged=staged.path.name))
        return True

    publications.drop_of_the_dead(dies_after_its_commit)
    assert staged.path.exists()


def test_clearing_up_lists_each_folder_once(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shards: a listing of a large folder on a network file system takes seconds."""
    take_all(queue_of(ledger, "a", []))
    publish(ledger, *range(NUM_SHARDS))
    beat(ledger, "a", "done")
    (ledger.out / STEPS).mkdir()
    for number in range(NUM_SHARDS):
        (ledger.partials / f"shard-{number:05d}.000000-0123abcd.arrows").touch()
        (ledger.out / STEPS / f"shard-{number:05d}.000000.safetensors").touch()
    queue, markers, listed = queue_of(ledger, "b", list(range(NUM_SHARDS))), ledger.markers(), list[str]()
    for name in ("listdir", "scandir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, real=real: (listed.append(Path(path).name), real(path))[1])
    queue.clear_leftovers(markers)
    monkeypatch.undo()
    assert sorted(listed) == [
        "claims",
        "claims",
        "partial",
        "shards",
        "shards",
        "staged",
        "staged",
        "steps",
        "tmp",
    ]
    for folder in (ledger.state / "claims", ledger.partials, ledger.out / STEPS):
        assert os.listdir(folder) == []


def test_what_the_publisher_left_goes_also_where_something_failed(ledger: Ledger) -> None:
    """A kill between a commit and the end of the partials; what a retry has made is of a later owner."""
    run_job(ledger, ROWS, failing={(0, 0): "nan"})
    marker = ledger.marker(ledger.shards[0])
    assert marker is not None
    assert marker.staged == f"shard-00000.{marker.generation:06d}-{marker.staged.rpartition('-')[2]}"
    for generation in (marker.generation, marker.generation + 1):
        (ledger.partials / f"shard-00000.{generation:06d}-0123abcd.arrows").touch()
        (ledger.out / STEPS).mkdir(exist_ok=True)
        (ledger.out / STEPS / f"shard-00000.{generation:06d}.safetensors").touch()
    queue_of(ledger, "a", list(range(NUM_SHARDS))).clear_leftovers(ledger.markers())
    later = f"shard-00000.{marker.generation + 1:06d}"
    assert os.listdir(ledger.partials) == [f"{later}-0123abcd.arrows"]
    assert os.listdir(ledger.out / STEPS) == [f"{later}.safetensors"]


def test_a_retry_is_of_a_later_owner_than_what_it_retries(ledger: Ledger) -> None:
    """Claims and partials are gone by then: counted from 0 again, its work would be taken for leftovers."""
    run_job(ledger, ROWS, failing={(0, 0): "nan"})
    (marker,) = (marker for marker in ledger.markers().values() if marker.has_failures)
    queue = queue_of(ledger, "a", [0], todo={0: marker})
    assert queue.take() == (ledger.shards[0], marker.generation + 1)
