"""The driver of `--launcher ray`, over a cluster that is made up: tasks end when the test says so."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offline_diffusion.config import make_job_config
from offline_diffusion.errors import JobError, JobInterrupted, ManifestError, TooManyFailuresError, UsageError
from offline_diffusion.launch.outcome import MAX_RESTARTS
from offline_diffusion.launch.ray import Driver, as_workers_see_it, run_on_ray
from offline_diffusion.launch.ray_cluster import Cluster
from offline_diffusion.launch.ray_task import PREPARATION, Life
from offline_diffusion.progress import StopFlag


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class TaskCancelledError(RayError):
    pass


DONE: dict[str, Any] = {"summary": {"interrupted": False}}
STOPPED: dict[str, Any] = {"summary": {"interrupted": True}}
Behaviour = Callable[[int, int], Any]


def failure(message: str, code: int = 1, kind: str = "JobError") -> dict[str, Any]:
    return {"error": {"kind": kind, "exit_code": code, "message": message, "hint": None}}


class FakeCluster:
    """Runs up to ``num_slots`` tasks at a time; those that run end at the next look, as ``behave`` says."""

    exceptions = SimpleNamespace(
        RayError=RayError, RayTaskError=RayTaskError, TaskCancelledError=TaskCancelledError
    )

    def __init__(self, out: Path, num_slots: int = 2) -> None:
        self.out, self.num_slots = out, num_slots
        self.stop, self.is_finished, self.board_is_lost = StopFlag(), False, False
        self.submitted: list[Life] = []
        self.options: list[dict[str, Any]] = []
        self.cancelled: list[Life] = []
        self.said: list[str] = []
        self.places: dict[Life, Any] = {}
        self.progress: dict[Life, Any] = {}
        self.told: list[str] = []
        self.on_wait: Callable[[], None] = lambda: None

    def run(self, behave: Behaviour, *, max_workers: int = 9, **options: Any) -> list[dict[str, Any]]:
        self.behave = behave
        started = options.pop("started", time.monotonic())
        config = make_job_config({"manifests": ["m.jsonl"], "out": self.out, **options})
        self.driver = Driver(
            config,
            self.cluster(),
            submit=self.submit,
            resource="GPU",
            max_workers=max_workers,
            started=started,
            is_finished=lambda: self.is_finished,
        )
        return self.driver.run()

    def cluster(self) -> Cluster:
        return Cluster(
            ray=self,
            read_board=self.read_board,
            observer=lambda _: None,
            say=self.said.append,
            stop=self.stop,
        )

    def prepare(self, outcome: Any) -> dict[str, Any]:
        self.behave = lambda *_: outcome
        return self.cluster().prepare(PREPARATION)

    def submit(self, options: dict[str, Any], life: Life) -> Life:
        self.submitted.append(life)
        self.options.append(options)
        return life

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": float(self.num_slots), "CPU": 64.0}

    def wait(self, references: list[Life], **_: Any) -> tuple[list[Life], list[Life]]:
        running = [each for each in references if each not in self.cancelled][: self.num_slots]
        for life in running:
            self.places[life] = (socket.gethostname(), 1_000_000 + 100 * life[0] + life[1])
        self.on_wait()
        done = [each for each in references if each in running or each in self.cancelled]
        return done, [each for each in references if each not in done]

    def cancel(self, reference: Life) -> None:
        self.cancelled.append(reference)

    def get(self, reference: Life) -> Any:
        if reference in self.cancelled:
            raise TaskCancelledError
        outcome = self.behave(*reference)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def read_board(self, stops: list[str], seconds_left: float | None) -> Any:
        if self.board_is_lost:
            raise RayError("the actor died")
        self.told = stops
        return self.places, self.progress, []


@pytest.fixture
def cluster(tmp_path: Path) -> FakeCluster:
    (tmp_path / "_state" / "tmp").mkdir(parents=True)
    return FakeCluster(tmp_path)


def test_as_many_tasks_as_can_run_and_one_that_waits(cluster: FakeCluster) -> None:
    assert len(cluster.run(lambda number, life: DONE)) == 3
    assert cluster.submitted == [(0, 1), (1, 1), (2, 1)]


def test_no_more_tasks_than_shards(cluster: FakeCluster) -> None:
    cluster.run(lambda number, life: DONE, max_workers=1)
    assert cluster.submitted == [(0, 1)]


def test_more_tasks_where_machines_come_later(cluster: FakeCluster) -> None:
    cluster.num_slots = 0
    cluster.on_wait = lambda: setattr(cluster, "num_slots", 3)
    cluster.run(lambda number, life: DONE)
    assert [number for number, _ in cluster.submitted] == [0, 1, 2, 3]


def test_a_task_that_is_lost_is_submitted_again(cluster: FakeCluster) -> None:
    found = cluster.run(lambda number, life: RayError("node lost") if (number, life) == (0, 1) else DONE)
    assert len(found) == 3
    assert (0, 2) in cluster.submitted
    assert "worker 0 was lost: node lost: submitted again" in cluster.said


def test_one_that_is_only_lost_is_given_up_and_another_helps(cluster: FakeCluster) -> None:
    found = cluster.run(lambda number, life: RayError("lost") if number == 0 else DONE)
    assert [life for number, life in cluster.submitted if number == 0] == list(range(1, 2 + MAX_RESTARTS))
    assert cluster.submitted[-1] == (1, 2)
    assert len(found) == 3  # two of worker 1, one of worker 2


def test_what_nobody_could_do_is_an_error(cluster: FakeCluster) -> None:
    with pytest.raises(JobError, match="worker 0 died of lost, 4 times"):
        cluster.run(lambda number, life: DONE if number and life == 1 else RayError("lost"))


def test_drawing_and_convicting_restore_the_restarts(cluster: FakeCluster) -> None:
    """Crashes over one row after the other, in lives too short to report; then lives that do report."""

    def behave(number: int, life: int) -> Any:
        if number or life > 4 * MAX_RESTARTS:
            return DONE
        if life <= 2 * MAX_RESTARTS:
            host, pid = cluster.places[number, life]
            crash = {"worker": "w", "crash": "Aborted", "in_flight": [[life, 0]]}
            folder = cluster.out / "_state" / "deaths"
            folder.mkdir(exist_ok=True)
            (folder / f"{host}_{pid}_ab12.json").write_text(json.dumps(crash))
        return RayError("lost")

    def report() -> None:
        for life in cluster.places:
            if life[1] > 2 * MAX_RESTARTS:
                cluster.progress[life] = {"phase": "running", "num_done": 1}

    cluster.on_wait = report
    cluster.run(behave)
    assert (0, 4 * MAX_RESTARTS + 1) in cluster.submitted


def test_an_error_is_the_jobs_when_shards_are_left(cluster: FakeCluster) -> None:
    with pytest.raises(JobInterrupted, match="disk full"):
        cluster.run(lambda number, life: DONE if number else failure("disk full", 75))
    with pytest.raises(JobError, match="broken"):
        cluster.run(lambda number, life: RayTaskError("x\nValueError: broken") if number else DONE)
    cluster.is_finished = True
    assert len(cluster.run(lambda number, life: DONE if number else failure("disk full"))) == 2


def test_too_many_failures_stop_the_others(cluster: FakeCluster) -> None:
    kind = "TooManyFailuresError"
    with pytest.raises(TooManyFailuresError):
        cluster.run(lambda number, life: STOPPED if number else failure("9 failed", kind=kind))
    assert cluster.told == ["--max-failures"]


def test_a_stop_cancels_what_has_not_begun(cluster: FakeCluster) -> None:
    cluster.on_wait = lambda: cluster.stop.request("SIGTERM")
    assert cluster.run(lambda number, life: STOPPED) == [{"interrupted": True}] * 2
    assert cluster.cancelled == [(2, 1)]
    assert cluster.told[0] == "SIGTERM"


def test_nothing_is_cancelled_while_the_board_is_lost(cluster: FakeCluster) -> None:
    """Nobody knows then who has begun."""
    cluster.board_is_lost = True
    cluster.on_wait = lambda: cluster.stop.request("SIGTERM")
    cluster.run(lambda number, life: STOPPED)
    assert cluster.cancelled == []


def test_all_lost_during_a_stop_is_an_interruption(cluster: FakeCluster) -> None:
    cluster.on_wait = lambda: cluster.stop.request("SIGTERM")
    with pytest.raises(JobInterrupted, match="SIGTERM"):
        cluster.run(lambda number, life: RayError("lost"))
    assert cluster.submitted == [(0, 1), (1, 1), (2, 1)]


def test_nothing_is_submitted_after_a_stop_or_the_time_limit(cluster: FakeCluster) -> None:
    with pytest.raises(JobInterrupted, match="time limit"):
        cluster.run(lambda number, life: DONE, time_limit=10, started=time.monotonic() - 20)
    cluster.stop.request("SIGINT")
    with pytest.raises(JobInterrupted, match="SIGINT"):
        cluster.run(lambda number, life: DONE)
    assert cluster.submitted == []


def test_tasks_get_the_time_that_is_left(cluster: FakeCluster) -> None:
    cluster.run(lambda number, life: DONE, time_limit=1000, started=time.monotonic() - 600)
    assert all(380 < options["time_limit"] <= 400 for options in cluster.options)


def test_a_lost_board_does_not_end_the_job(cluster: FakeCluster) -> None:
    cluster.board_is_lost = True
    assert len(cluster.run(lambda number, life: DONE)) == 3


def test_paths_are_absolute_and_urls_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    urls = ["s3://bucket/m.jsonl", "hf://datasets/a/b", "zip://m.csv::http://host/m.zip"]
    config = as_workers_see_it(
        make_job_config({"manifests": ["m.jsonl", "../n/*.csv", *urls], "out": "out/a", "model": "model"})
    )
    here = os.fspath(tmp_path)
    parent = os.path.dirname(here)
    assert config.manifests == (f"{here}/m.jsonl", f"{parent}/n/*.csv", *urls)
    assert (config.out, config.model) == (tmp_path / "out" / "a", f"{here}/model")
    (tmp_path / "tiny").mkdir()
    for name in ("a/b", "tiny"):
        options = {"manifests": ["m"], "out": "o", "model": name}
        assert as_workers_see_it(make_job_config(options)).model == name


def test_what_the_preparation_finds_and_its_errors(cluster: FakeCluster) -> None:
    assert cluster.prepare({"num_rows": 7, "num_images": 9}) == {"num_rows": 7, "num_images": 9}
    told = {"kind": "ManifestError", "exit_code": 1, "message": "m.jsonl: gone", "hint": "look"}
    with pytest.raises(ManifestError, match=r"^m.jsonl: gone\nhint: look$"):
        cluster.prepare({"error": told})
    with pytest.raises(JobError, match="division by zero"):
        cluster.prepare(RayTaskError("Traceback ...\nZeroDivisionError: division by zero"))
    with pytest.raises(JobInterrupted, match="the node died"):
        cluster.prepare(RayError("the node died"))


def test_a_preparation_that_waits_for_a_machine_can_be_stopped(cluster: FakeCluster) -> None:
    cluster.num_slots = 0
    cluster.on_wait = lambda: cluster.stop.request("SIGTERM")
    with pytest.raises(JobInterrupted, match="SIGTERM: stopped before the job began"):
        cluster.prepare({"num_rows": 7})
    assert cluster.cancelled == [PREPARATION]


def test_a_preparation_that_has_begun_ends_by_itself(cluster: FakeCluster) -> None:
    cluster.on_wait = lambda: cluster.stop.request("SIGTERM")
    assert cluster.prepare({"num_rows": 7}) == {"num_rows": 7}
    assert not cluster.cancelled
    assert cluster.told == ["SIGTERM"]


def test_standard_input_is_refused(tmp_path: Path) -> None:
    config = make_job_config({"manifests": ["-"], "out": tmp_path / "out", "launcher": "ray"})
    with pytest.raises(UsageError, match="--launcher ray: the manifest cannot be '-'"):
        run_on_ray(config, observer=lambda _: None, say=print, stop=StopFlag())
