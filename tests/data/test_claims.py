"""Claims: one owner a shard, taken over only from the dead, whatever the clocks say."""

from __future__ import annotations

import errno
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from output_fakes import open_ledger

from offline_diffusion.data import claims as claims_module
from offline_diffusion.data import files
from offline_diffusion.data.claims import Claim, Claims, Newest, OwnerWatch
from offline_diffusion.data.heartbeat import (
    MAX_KEPT,
    Heartbeat,
    drop_old_heartbeats,
    heartbeat_path,
    read_heartbeats,
    write_heartbeat,
)
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.process import ProcessId, is_known_dead, this_process
from offline_diffusion.errors import JobError

ELSEWHERE = ProcessId(host="far", boot_id="another boot", pid_namespace="pid:[1]", pid=1, started="5")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return open_ledger(tmp_path / "out", 12, 2)


def claims_of(ledger: Ledger, worker: str, task: int = 0) -> Claims:
    return Claims(ledger.out, worker=worker, task=task, job_id=ledger.job.job_id)


def claim_by(worker: str, ledger: Ledger, process: ProcessId = ELSEWHERE) -> Claim:
    return Claim(
        shard=0,
        generation=0,
        worker=worker,
        task=0,
        process=process,
        job_id=ledger.job.job_id,
        created_at=0.0,
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def watch_on(ledger: Ledger, clock: Clock) -> OwnerWatch:
    return OwnerWatch(ledger.out, ledger.job.job_id, stale_s=30.0, clock=clock)


def test_of_many_that_claim_at_once_one_wins(ledger: Ledger) -> None:
    won: list[int] = []
    barrier = threading.Barrier(8)

    def claim(number: int) -> None:
        claims = claims_of(ledger, f"w{number}")
        barrier.wait()
        won.extend(number for shard in ledger.shards if claims.create(shard, 0))

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == len(ledger.shards)
    assert claims_of(ledger, "x").newest() == dict.fromkeys(range(6), Newest(0, False))
    assert not list(ledger.scratch.iterdir())


def test_the_highest_generation_owns_and_only_its_own_release_counts(ledger: Ledger) -> None:
    shard, claims = ledger.shards[3], claims_of(ledger, "w")
    assert claims.create(shard, 9)
    assert claims.create(shard, 10)
    claims.release(shard, 9)
    assert claims.newest() == {3: Newest(10, False)}
    claims.release(shard, 10)
    assert claims.newest() == {3: Newest(10, True)}
    claims.create(shard, 11)
    claims.remove([(shard, 10)])
    assert claims.newest() == {3: Newest(11, False)}, "a later owner's claim must stay"
    (ledger.state / "claims" / "shard-00003.000011.json.77-0123abcd").write_bytes(b"torn by a kill")
    claims.remove([(shard, 10)])
    assert [path.name for path in (ledger.state / "claims").iterdir()] == ["shard-00003.000011.json"]
    assert (claims.read(shard, 11).worker, claims.read(shard, 11).process) == ("w", this_process())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_claim_whose_folder_cannot_be_synced_is_held(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Catches a claim of a worker that does not know of it: it would wait for itself and leave the shard."""
    shard, claims, real = ledger.shards[0], claims_of(ledger, "w"), files.sync_folder

    def sync(folder: Path) -> None:
        if folder.name == "claims":
            raise OSError(number, os.strerror(number), str(folder))
        real(folder)

    monkeypatch.setattr(files, "sync_folder", sync)
    assert claims.create(shard, 0)
    assert not claims_of(ledger, "other").create(shard, 0)
    assert claims.newest() == {0: Newest(0, False)}
    monkeypatch.setattr(os, "link", functools.partial(_fails_with, number))
    with pytest.raises(JobError, match="cannot write"):
        claims.create(ledger.shards[1], 0)
    assert claims.newest() == {0: Newest(0, False)}


def _fails_with(number: int, *_: object) -> None:
    raise OSError(number, os.strerror(number))


# --- who is dead ------------------------------------------------------------------------------


@pytest.mark.parametrize("wall", [0.0, 1e12, -5.0])
def test_an_owner_is_alive_while_its_sign_changes_whatever_its_clock_says(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, wall: float
) -> None:
    clock = Clock()
    watch, beat = watch_on(ledger, clock), Heartbeat(task=0, num_tasks=1, worker="far:1:a")
    monkeypatch.setattr(time, "time", lambda: wall)  # it never moves on
    write_heartbeat(ledger.out, beat)
    assert watch.judge(claim_by("far:1:a", ledger)) == "unsure"
    for _ in range(40):
        clock.now += 2.0
        write_heartbeat(ledger.out, beat)
        assert watch.judge(claim_by("far:1:a", ledger)) == "alive"
    verdicts = []
    for _ in range(30):
        clock.now += 1.0
        verdicts.append(watch.judge(claim_by("far:1:a", ledger)))
    assert verdicts == ["alive"] * 10 + ["unsure"] * 19 + ["dead"]
    write_heartbeat(ledger.out, beat)  # it thaws
    assert watch.judge(claim_by("far:1:a", ledger)) == "alive"


def test_silence_counts_only_while_somebody_listens(ledger: Ledger) -> None:
    """The whole machine slept for an hour, observer and owner: nobody is dead for that."""
    clock = Clock()
    watch = watch_on(ledger, clock)
    write_heartbeat(ledger.out, Heartbeat(task=0, num_tasks=1, worker="w"))
    watch.judge(claim_by("w", ledger))
    clock.now += 3_600.0
    assert watch.judge(claim_by("w", ledger)) == "unsure"


def test_what_was_seen_before_a_long_gap_says_nothing(ledger: Ledger) -> None:
    """The owner lived on for a while after the first look and has been dead for an hour at the second."""
    clock = Clock()
    watch, beat = watch_on(ledger, clock), Heartbeat(task=0, num_tasks=1, worker="w")
    write_heartbeat(ledger.out, beat)
    watch.judge(claim_by("w", ledger))
    verdicts = []
    for _ in range(2):  # its sign has changed once since the first look, and not since the second
        write_heartbeat(ledger.out, beat)
        clock.now += 2.0
        verdicts.append(watch.judge(claim_by("w", ledger)))
        clock.now += 3_600.0
        write_heartbeat(ledger.out, beat)
        verdicts.append(watch.judge(claim_by("w", ledger)))
        clock.now += 3_600.0
        verdicts.append(watch.judge(claim_by("w", ledger)))
    assert verdicts == ["alive", "unsure", "unsure"] * 2
    for _ in range(15):
        clock.now += 2.0
        verdict = watch.judge(claim_by("w", ledger))
    assert verdict == "dead"


def test_an_owner_without_any_sign_is_dead_after_a_while(ledger: Ledger) -> None:
    clock = Clock()
    watch = watch_on(ledger, clock)
    verdicts = []
    for _ in range(9):
        verdicts.append(watch.judge(claim_by("nobody", ledger)))
        clock.now += 4.0
    assert verdicts == ["unsure"] * 8 + ["dead"]


@pytest.mark.parametrize("is_alive", [True, False])
def test_owners_are_watched_while_nobody_asks(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    """A step takes longer than a gap that spoils a watch. Catches dead owners that are never found dead."""
    monkeypatch.setattr(claims_module, "MAX_LOOK_GAP_S", 0.3)
    monkeypatch.setattr(claims_module, "LOOK_INTERVAL_S", 0.02)
    watch, beat = (
        OwnerWatch(ledger.out, ledger.job.job_id, stale_s=0.5),
        Heartbeat(task=0, num_tasks=1, worker="w"),
    )
    write_heartbeat(ledger.out, beat)
    assert watch.judge(claim_by("w", ledger)) == "unsure"
    with watch.watching():
        for _ in range(10):
            time.sleep(0.1)
            if is_alive:
                write_heartbeat(ledger.out, beat)
        assert watch.judge(claim_by("w", ledger)) == ("alive" if is_alive else "dead")
        reads = list[Any]()
        monkeypatch.setattr(claims_module, "read_heartbeat", lambda *what: reads.append(what))
        time.sleep(0.2)
        assert bool(reads) is not is_alive, "who is alive is not watched until somebody asks again"
    assert "offdiff-watch" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("state", ["stopped", "done"])
def test_an_owner_that_has_said_goodbye_is_dead_at_once(ledger: Ledger, state: str) -> None:
    write_heartbeat(ledger.out, Heartbeat(task=0, num_tasks=1, worker="w", state=state))
    assert watch_on(ledger, Clock()).judge(claim_by("w", ledger)) == "dead"


def test_an_owner_of_another_job_has_no_say(ledger: Ledger) -> None:
    claim = replace(claim_by("w", ledger), job_id="of the manifest before")
    assert watch_on(ledger, Clock()).judge(claim) == "dead"


@pytest.fixture
def other_process() -> Iterator[tuple[subprocess.Popen[str], ProcessId]]:
    """A process that sleeps, and who it says it is."""
    code = (
        "import dataclasses, json, time; from offline_diffusion.data.process import this_process as t; "
        "print(json.dumps(dataclasses.asdict(t())), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, ProcessId(**json.loads(process.stdout.readline()))
        process.kill()


def test_a_process_of_this_machine_is_known_to_have_ended(
    ledger: Ledger, other_process: tuple[subprocess.Popen[str], ProcessId]
) -> None:
    process, who = other_process
    assert who.pid == process.pid
    watch = watch_on(ledger, Clock())
    assert not is_known_dead(this_process())
    assert watch.judge(claim_by("w", ledger, who)) == "unsure"
    assert is_known_dead(replace(who, started="1")), "its number was given to another process"
    for changed in ({"boot_id": "other"}, {"pid_namespace": "other"}, {"started": ""}, {"boot_id": ""}):
        assert not is_known_dead(replace(who, pid=2**22, **changed)), "nothing is known of it from here"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: ended, but still there
    assert watch.judge(claim_by("w", ledger, who)) == "dead"
    process.wait()
    assert is_known_dead(who)


def test_a_damaged_claim_is_one_of_somebody_who_never_gives_a_sign(ledger: Ledger) -> None:
    shard, claims, clock = ledger.shards[0], claims_of(ledger, "w"), Clock()
    assert claims.create(shard, 0)
    for text in ("", "{", '{"shard": 0, "process": 3}'):
        (ledger.state / "claims" / "shard-00000.000000.json").write_text(text)
        assert watch_on(ledger, clock).judge(claims.read(shard, 0)) == "unsure"


# --- signs of life ----------------------------------------------------------------------------


def test_two_workers_of_one_task_never_write_the_same_file(ledger: Ledger) -> None:
    for worker in ("host:1:aa", "host:1:ab", "host/../../x:2:b"):
        write_heartbeat(ledger.out, Heartbeat(task=3, num_tasks=4, worker=worker))
    assert len(list((ledger.state / "tasks").iterdir())) == 3
    assert {beat.worker for beat in read_heartbeats(ledger.out)} == {
        "host:1:aa",
        "host:1:ab",
        "host/../../x:2:b",
    }


def test_signs_of_dead_workers_do_not_pile_up(ledger: Ledger) -> None:
    for number in range(50):
        write_heartbeat(ledger.out, Heartbeat(task=1, num_tasks=2, worker=f"w{number}"))
        drop_old_heartbeats(ledger.out, 1, f"w{number}")
        os.utime(heartbeat_path(ledger.out, 1, f"w{number}"), (number, number))
    for worker in "abcdefgh":  # all at work now
        write_heartbeat(ledger.out, Heartbeat(task=1, num_tasks=2, worker=worker))
        drop_old_heartbeats(ledger.out, 1, worker)
    write_heartbeat(ledger.out, Heartbeat(task=0, num_tasks=2, worker="other"))
    kept = [beat.worker for beat in read_heartbeats(ledger.out)]
    assert kept == ["other", *(f"w{number}" for number in range(50 - MAX_KEPT, 50)), *"abcdefgh"]


def test_signs_of_the_format_before_are_read(ledger: Ledger) -> None:
    old = {
        "task": 2, "num_tasks": 4, "worker": "node:17", "host": "node", "started_at": 1.0, "updated_at": 9.0,
        "state": "running", "num_ok": 3, "num_failed": 1, "images_per_s": 0.5,
        "shards": {"7": {"num_images": 4, "num_ok": 3, "num_failed": 1}},
    }  # fmt: skip
    (ledger.state / "tasks").mkdir()
    (ledger.state / "tasks" / "task-00002.json").write_text(json.dumps(old))
    (beat,) = read_heartbeats(ledger.out)
    assert (beat.task, beat.worker, beat.shards[7].num_ok, beat.count) == (2, "node:17", 3, 0)
    assert beat.may_run
