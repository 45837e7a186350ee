"""A worker of `--launcher ray`, with a board that is called directly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_fakes import SMALL, make_rows, pixels_by_key, write_jsonl

from offline_diffusion.launch import ray_task
from offline_diffusion.launch.ray_task import PREPARATION, Board, prepare, work


class RayError(Exception):
    pass


class FakeBoard:
    """The actor; ``is_lost`` makes every call fail as Ray's do."""

    def __init__(self) -> None:
        self.board, self.is_lost = Board(), False

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            return lambda: getattr(self.board, name)(*args)

        return SimpleNamespace(remote=remote)

    def get(self, call: Any) -> Any:
        if self.is_lost:
            raise RayError("the actor died")
        return call()


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> FakeBoard:
    board = FakeBoard()
    exceptions = SimpleNamespace(RayError=RayError)
    monkeypatch.setattr(ray_task, "load_ray", lambda: SimpleNamespace(get=board.get, exceptions=exceptions))
    return board


def options_of(tmp_path: Path) -> dict[str, Any]:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(3))
    return {
        "model": "tiny",
        "manifests": [str(manifest)],
        "out": str(tmp_path / "out"),
        "device": "cpu",
        **SMALL,
    }


def test_the_preparation_reads_the_manifest_and_takes_the_folder(board: FakeBoard, tmp_path: Path) -> None:
    options = options_of(tmp_path)
    write_jsonl(tmp_path / "m.jsonl", [row | {"num_images_per_prompt": 2} for row in make_rows(3)])
    assert prepare(options, board) == {"num_rows": 3, "num_images": 6}
    assert json.loads((tmp_path / "out" / "job.json").read_bytes())["num_rows"] == 3
    places, *_ = board.board.read([], None)
    assert list(places) == [PREPARATION]


def test_an_error_of_the_preparation_is_told(board: FakeBoard, tmp_path: Path) -> None:
    outcome = prepare(options_of(tmp_path) | {"manifests": ["missing.jsonl"]}, board)
    assert (outcome["error"]["kind"], outcome["error"]["exit_code"]) == ("ManifestError", 1)


def test_a_worker_that_comes_after_a_stop_does_nothing(board: FakeBoard, tmp_path: Path) -> None:
    board.board.read(["SIGTERM"], None)
    assert work(options_of(tmp_path), (0, 1), board) == {}
    assert not (tmp_path / "out").exists()


def test_a_worker_that_comes_after_the_time_limit_does_nothing(board: FakeBoard, tmp_path: Path) -> None:
    board.board.read([], -1.0)
    assert work(options_of(tmp_path), (0, 1), board) == {}
    assert not (tmp_path / "out").exists()


def test_a_worker_gets_the_time_that_is_left_when_it_begins(
    board: FakeBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have waited for its place for hours."""
    seen: list[Any] = []
    monkeypatch.setattr(ray_task, "make_job_config", lambda options: seen.append(options) or options)
    monkeypatch.setattr("offline_diffusion.job.run_task", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(ray_task.dataclasses, "asdict", lambda _: {})
    board.board.read([], 70.0)
    assert work({"time_limit": 9_000.0}, (0, 1), board) == {"summary": {}}
    assert seen == [{"time_limit": 70.0}]


def test_a_worker_draws_on_without_its_board(board: FakeBoard, tmp_path: Path) -> None:
    board.is_lost = True
    outcome = work(options_of(tmp_path), (0, 1), board)
    assert (outcome["summary"]["num_ok"], outcome["summary"]["interrupted"]) == (3, False)
    assert len(pixels_by_key(tmp_path / "out")) == 3


def test_the_board_tells_where_a_life_is_and_how_far(board: FakeBoard, tmp_path: Path) -> None:
    work(options_of(tmp_path), (4, 2), board)
    places, progress, lines = board.board.read([], None)
    assert list(places) == [(4, 2)]
    assert progress[4, 2]["num_done"] == 3
    assert all(line.startswith("worker 4: ") for line in lines)
    assert board.board.read([], None)[2] == []


def test_an_engine_that_hangs_ends_its_process(
    board: FakeBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver hears why before it finds the task lost."""
    killed: list[tuple[int, int]] = []

    def hang(*_: Any, on_hung: Any, **__: Any) -> Any:
        on_hung(720.0)
        return SimpleNamespace()

    monkeypatch.setattr(ray_task, "POLL_S", 0.05)
    monkeypatch.setattr("offline_diffusion.job.run_task", hang)
    monkeypatch.setattr(ray_task.dataclasses, "asdict", lambda _: {})
    monkeypatch.setattr(ray_task.os, "kill", lambda *args: killed.append(args))
    work(options_of(tmp_path), (4, 1), board)
    assert killed == [(os.getpid(), signal.SIGKILL)]
    *_, lines = board.board.read([], None)
    assert lines == ["worker 4: no step has ended for 12 min: it is killed"]
