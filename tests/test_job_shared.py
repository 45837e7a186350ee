"""Several workers of one folder, in one process: what each says, takes and leaves."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from job_fakes import SMALL, CountingEngine, Runner, make_rows, pixels_by_key, write_jsonl

from offline_diffusion import draw_loop, job, pulse
from offline_diffusion.config import make_job_config
from offline_diffusion.data import claims, heartbeat, shard_queue
from offline_diffusion.data import sink as sink_module
from offline_diffusion.data.claims import Claims
from offline_diffusion.data.layout import StagedFolder
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.process import ProcessId
from offline_diffusion.data.publication import Publications
from offline_diffusion.data.shard_queue import ShardQueue
from offline_diffusion.data.status import read_status
from offline_diffusion.data.verify import verify
from offline_diffusion.job import JobSummary
from offline_diffusion.progress import StopFlag

NUM_ROWS = 16
OPTIONS = SMALL | {"shard_size": 1, "max_num_seqs": 2, "scheduling_policy": "fifo", "device": "cpu"}


@pytest.fixture(autouse=True)
def _quick_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "INTERVAL_S", 0.1)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "m.jsonl", make_rows(NUM_ROWS))


def test_what_a_live_worker_holds_is_left_to_it(manifest: Path, tmp_path: Path) -> None:
    """A second start in the middle of the first, which holds all shards."""
    out, said, first, second = tmp_path / "out", list[str](), Runner(), Runner()
    later: list[JobSummary] = []

    def on_step(engine: CountingEngine) -> None:
        if engine.num_steps == 6:
            later.append(second.run(manifest, out, say=said.append, **OPTIONS))

    first.on_step = on_step
    assert first.run(manifest, out, **OPTIONS).num_ok == NUM_ROWS
    (summary,) = later
    assert second.engine is None, "a model was loaded for nothing"
    assert not summary.interrupted
    assert summary.num_ok + int(said[-1].split()[0]) >= NUM_ROWS  # the first goes on publishing meanwhile
    assert said[-1].endswith("left to other workers, which are at work on them")
    assert sum(first.finished.values()) == NUM_ROWS
    assert verify(out).pending == verify(out).problems == []


def test_a_claim_is_held_until_the_files_are_in_their_places(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a worker that lets go as soon as the marker is there, while it still moves the files."""
    out, claims = tmp_path / "out", list[list[str]]()
    real = Publications.move

    def slow_move(self: Publications, staged: StagedFolder, marker: Marker) -> None:
        if staged.shard == 0:
            time.sleep(0.5)  # meanwhile the next shards are claimed and drawn
            claims.append(os.listdir(out / "_state" / "claims"))
        real(self, staged, marker)

    monkeypatch.setattr(Publications, "move", slow_move)
    monkeypatch.setattr(draw_loop, "LOOK_AHEAD", 2)
    assert Runner().run(manifest, out, **OPTIONS).num_ok == NUM_ROWS
    assert "shard-00000.000000.json" in claims[0]
    assert len(claims[0]) > 4
    assert os.listdir(out / "_state" / "claims") == []


def test_other_workers_are_looked_at_now_and_then(manifest: Path, tmp_path: Path) -> None:
    """Catches a worker that lists folders twenty times a second for as long as it waits."""
    out, stop, looks = tmp_path / "out", StopFlag(), list[str]()
    config = make_job_config({"model": "tiny", "manifests": [str(manifest)], "out": out, **OPTIONS})
    job.prepare_job(config, observer=lambda _: None, stop=stop, say=print)
    ledger = Ledger(out)
    other = Claims(out, worker="silent", task=0, job_id=ledger.job.job_id)
    other._process = ProcessId()
    for shard in ledger.shards:
        assert other.create(shard, 0)
    with pytest.MonkeyPatch.context() as patch:
        real = ShardQueue.has_work
        patch.setattr(ShardQueue, "has_work", lambda queue: (looks.append(""), real(queue))[1])
        threading.Timer(1.5, stop.request, ("SIGTERM",)).start()
        assert Runner().run_task(config, stop=stop).interrupted
    assert 2 <= len(looks) <= 4


def test_a_helper_claims_only_what_it_needs_next(tmp_path: Path) -> None:
    """Its own half it takes at once, then a shard of one image about whenever one is drawn."""
    manifest = write_jsonl(tmp_path / "same.jsonl", make_rows(NUM_ROWS, prompt="a red cup"))
    out, runner, ahead = tmp_path / "out", Runner(), list[int]()

    def on_step(engine: CountingEngine) -> None:
        paths = [*(out / "_state" / "shards").iterdir(), *(out / "_state" / "claims").iterdir()]
        num_claimed = len({path.name.split(".")[0] for path in paths})
        if num_claimed > NUM_ROWS // 2:
            ahead.append(num_claimed - engine.finished.total())

    runner.on_step = on_step
    assert runner.run(manifest, out, num_tasks=2, task_index=0, **OPTIONS).num_ok == NUM_ROWS
    assert 0 < max(ahead) <= 6
    assert len(pixels_by_key(out)) == NUM_ROWS


def test_two_tasks_that_run_at_once_draw_each_image_once(manifest: Path, tmp_path: Path) -> None:
    """The second task begins and ends in the middle of the first one's steps, and helps it."""
    out, first, second = tmp_path / "out", Runner(), Runner()
    later: list[JobSummary] = []

    def on_step(engine: CountingEngine) -> None:
        if engine.num_steps == 4:
            later.append(second.run(manifest, out, num_tasks=2, task_index=1, **OPTIONS))

    first.on_step = on_step
    summary = first.run(manifest, out, num_tasks=2, task_index=0, **OPTIONS)
    assert not summary.interrupted
    assert sum(second.finished.values()) >= NUM_ROWS // 2 - 4
    assert set((first.finished + second.finished).values()) == {1}
    assert len(pixels_by_key(out)) == NUM_ROWS
    assert not list((out / "_state" / "claims").iterdir())


def test_steps_that_take_long_keep_no_dead_owner_alive(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard is taken while own images are at work. Catches a watch that every long step begins anew."""
    out, taken_at = tmp_path / "out", list[int]()
    monkeypatch.setattr(heartbeat, "STALE_S", 0.8)
    monkeypatch.setattr(claims, "MAX_LOOK_GAP_S", 0.4)
    for module in (claims, shard_queue):
        monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0.02)
    options = OPTIONS | {"num_inference_steps": 10, "max_num_seqs": NUM_ROWS, "limit": 4}
    config = make_job_config({"model": "tiny", "manifests": [str(manifest)], "out": out, **options})
    job.prepare_job(config, observer=lambda _: None, stop=StopFlag(), say=lambda _: None)
    ledger = Ledger(out)
    dead = Claims(out, worker="far:1:a", task=0, job_id=ledger.job.job_id)
    dead._process = ProcessId()
    assert dead.create(ledger.shards[2], 0)
    runner = Runner()

    def on_step(engine: CountingEngine) -> None:
        time.sleep(0.5)
        if "shard-00002.000001.json" in os.listdir(out / "_state" / "claims"):
            taken_at.append(engine.num_steps)

    runner.on_step = on_step
    assert runner.run(manifest, out, **options).num_ok == 4
    assert taken_at[0] < 10, "not before own images were done"


def test_the_shards_of_a_worker_that_hangs_are_taken_over(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step that never ends, as far as others can see. Catches signs of life that only say that a thread
    is alive. When it comes back all is published, once."""
    out, said, first, second = tmp_path / "out", list[str](), Runner(), Runner()
    monkeypatch.setattr(heartbeat, "STALE_S", 1.0)
    for name in ("HUNG_S", "FIRST_HUNG_S", "HUNG_FACTOR"):
        monkeypatch.setattr(pulse, name, 0.3)
    states, summaries = list[list[str]](), list[JobSummary]()

    def on_step(engine: CountingEngine) -> None:
        if engine.num_steps == 3:
            while not said:  # ends by the timeout of the test
                time.sleep(0.05)
            summaries.append(second.run(manifest, out, **OPTIONS))
            states.append([worker.state for worker in read_status(out).workers])

    first.on_step = on_step
    first.run(manifest, out, say=said.append, **OPTIONS)
    assert summaries[0].num_ok == NUM_ROWS
    assert states == [["lost", "done"]]
    assert sum("no step has ended for" in line for line in said) == 1
    assert verify(out).pending == verify(out).problems == []
    assert len(pixels_by_key(out)) == NUM_ROWS


def test_a_worker_beats_during_a_long_step(manifest: Path, tmp_path: Path) -> None:
    out, runner, counts = tmp_path / "out", Runner(), list[int]()

    def on_step(engine: CountingEngine) -> None:
        for _ in range(2 if engine.num_steps == 3 else 0):
            counts.extend(beat.count for beat in heartbeat.read_heartbeats(out))
            time.sleep(0.6)

    runner.on_step = on_step
    runner.run(manifest, out, limit=4, **OPTIONS)
    assert counts[1] >= counts[0] + 3
