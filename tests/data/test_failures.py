"""Failures of a job in other workers' hands: by markers and signs, each counted once and read seldom."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from output_fakes import make_rows, open_ledger, run_job

from offline_diffusion.data import failures, publication
from offline_diffusion.data.failures import FailuresElsewhere
from offline_diffusion.data.heartbeat import Heartbeat, OpenShard, heartbeat_path, write_heartbeat
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.process import ProcessId, this_process
from offline_diffusion.progress import Counts

ROWS = make_rows(12)
FAILING = {(0, 0): "nan", (5, 0): "nan", (6, 0): "nan"}  # in shards 0, 2 and 3 of six
NEW: dict[int, Any] = dict.fromkeys(range(6))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return open_ledger(tmp_path / "out", 12, 2)


def beat(ledger: Ledger, worker: str, shards: dict[int, tuple[int, int]], **values: Any) -> None:
    opened = {n: OpenShard(num_images=9, num_ok=ok, num_failed=failed) for n, (ok, failed) in shards.items()}
    write_heartbeat(ledger.out, Heartbeat(task=0, num_tasks=1, worker=worker, shards=opened, **values))


def test_published_shards_of_others_count(ledger: Ledger) -> None:
    run_job(ledger, ROWS, failing=FAILING)
    elsewhere = FailuresElsewhere(ledger, "me", NEW)
    assert elsewhere.count([]) == Counts(9, 3, 0)
    assert elsewhere.count([2]) == Counts(8, 2, 0), "at once: what is ours is counted elsewhere"
    assert elsewhere.count([2, 3, 4]) == Counts(5, 1, 0)


def test_what_is_made_again_does_not_count_until_it_is(ledger: Ledger) -> None:
    run_job(ledger, ROWS, failing=FAILING)
    markers, clock = ledger.markers(), Clock()
    elsewhere = FailuresElsewhere(ledger, "me", {n: markers[n] for n in (0, 2)}, clock)
    assert elsewhere.count([]).num_failed == 1
    run_job(ledger, ROWS, retry_failed=True, failing={(0, 0): "nan"})
    clock.now += 60
    assert elsewhere.count([]) == Counts(11, 1, 0)


def test_what_others_are_at_counts(ledger: Ledger) -> None:
    clock = Clock()
    elsewhere = FailuresElsewhere(ledger, "me", NEW, clock)
    for expected in (Counts(), Counts(1, 3, 0)):  # at the second look they have changed
        beat(ledger, "me", {0: (1, 1)})
        beat(ledger, "alive", {1: (0, 2), 2: (1, 1)}, process=ProcessId())
        beat(ledger, "before it", {1: (0, 1)}, process=ProcessId(), started_at=5.0)  # has lost it to that one
        beat(ledger, "ended", {3: (1, 1)}, state="stopped")
        beat(ledger, "dead", {4: (1, 1)}, process=replace(this_process(), pid=2**22))
        assert elsewhere.count([]) == expected
        clock.now += 5.0
    assert elsewhere.count([1]) == Counts(1, 1, 0)
    run_job(ledger, ROWS)
    clock.now += 5.0
    assert elsewhere.count([0]) == Counts(10, 0, 0), "its marker is newer"


def test_looks_are_seldom_and_read_a_marker_once(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file that is read for every image, or a folder that is slow and listed all the time."""
    run_job(ledger, ROWS, failing=FAILING)
    read, clock, looks = list[str](), Clock(), list[float]()
    real_marker, real_beats = publication.read_marker, failures.read_heartbeats
    monkeypatch.setattr(
        publication, "read_marker", lambda path: (read.append(path.name), real_marker(path))[1]
    )

    def slow_look(out: Path) -> Any:
        looks.append(clock.now)
        clock.now += 1.0
        return real_beats(out)

    monkeypatch.setattr(failures, "read_heartbeats", slow_look)
    elsewhere = FailuresElsewhere(ledger, "me", NEW, clock)
    for _ in range(1_500):
        elsewhere.count([])
        clock.now += 0.1
    assert looks == pytest.approx([0.0, 50.0, 100.0, 150.0], abs=0.2), "a look of 1 s every 50 s"
    assert len(read) == 6


@pytest.mark.parametrize("clock_s", [-60.0, 0.0, 7_200.0])
def test_only_signs_that_change_count_whatever_the_clock_of_their_worker_says(
    ledger: Ledger, clock_s: float
) -> None:
    """Its process cannot be asked for; what it made is counted again by who takes its shard over. Catches a
    comparison of two machines' clocks, and the sign of an earlier run that counts at the start."""
    process = ProcessId(host="h", boot_id="another", pid_namespace="p", pid=1, started="1")
    clock = Clock()
    elsewhere = FailuresElsewhere(ledger, "me", NEW, clock)

    def look(*, sign: bool) -> Counts:
        if sign:
            beat(ledger, "other", {0: (1, 7)}, process=process)
            path = heartbeat_path(ledger.out, 0, "other")
            values = json.loads(path.read_text())
            path.write_text(json.dumps(values | {"updated_at": values["updated_at"] + clock_s}))
        clock.now += 10.0
        return elsewhere.count([])

    assert look(sign=True) == Counts(), "it may be dead since yesterday"
    assert look(sign=True) == Counts(1, 7, 0)
    assert [look(sign=False).num_failed for _ in range(4)] == [7, 7, 0, 0]
    assert look(sign=True) == Counts(1, 7, 0), "it was only frozen"
