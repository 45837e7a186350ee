"""Several processes draw from one queue: started twice, frozen, killed, of any number of tasks."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from job_fakes import Runner, read_table
from processes import Forked, Process
from test_kills import FLAGS, OPTIONS, check_same, make_manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STALE_S = 6.0
NUM_IMAGES = 61


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_manifest(tmp_path_factory.mktemp("manifest") / "m.jsonl", num_steps=40)


@pytest.fixture(scope="module")
def whole(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    Runner().run(manifest, out, **OPTIONS)
    return out


def start(manifest: Path, out: Path, *flags: str) -> Process:
    return Forked(str(STALE_S), "run", manifest, "--out", out, *FLAGS, *flags, program="impatient")


def images_drawn(out: Path) -> dict[str, int]:
    """By worker, as each says itself; one that was killed has said what it had by its last sign."""
    beats = [json.loads(path.read_bytes()) for path in (out / "_state" / "tasks").glob("*.json")]
    return {beat["worker"]: beat["num_ok"] for beat in beats}


def claimed(out: Path) -> list[str]:
    folder = out / "_state" / "claims"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_task_started_twice_is_shared(manifest: Path, whole: Path, tmp_path: Path) -> None:
    twins = [start(manifest, tmp_path), start(manifest, tmp_path)]
    for twin in twins:
        assert twin.wait() in (0, 3), twin.stderr
    drawn = images_drawn(tmp_path)
    assert len(drawn) == 2
    assert sum(drawn.values()) == NUM_IMAGES, "an image was drawn twice"
    assert {row["worker"] for row in read_table(tmp_path, "metrics")} <= drawn.keys()
    check_same(tmp_path, whole)
    assert claimed(tmp_path) == []


def test_a_frozen_worker_loses_its_shards_and_thaws_in_good_order(
    manifest: Path, whole: Path, tmp_path: Path
) -> None:
    frozen = start(manifest, tmp_path)
    assert frozen.wait_until(lambda: any(images_drawn(tmp_path).values()) and claimed(tmp_path))
    frozen.send(signal.SIGSTOP)
    held = claimed(tmp_path)
    assert held
    assert all(name.endswith(".000000.json") for name in held)
    other = start(manifest, tmp_path)
    assert other.wait() == 3, other.stderr
    assert len({row["row"] for row in read_table(tmp_path, "metrics")}) == 60, "the other did not go on"
    published = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.parquet")}
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == 3, frozen.stderr
    assert "Traceback" not in frozen.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.parquet")} == published
    check_same(tmp_path, whole)
    assert claimed(tmp_path) == []


def test_a_killed_tasks_share_is_made_by_the_others(manifest: Path, whole: Path, tmp_path: Path) -> None:
    """Its process is gone from this machine, so nobody waits; each image that it finished is kept."""
    tasks = [start(manifest, tmp_path, "--num-tasks=3", f"--task-index={task}") for task in range(3)]
    tasks[1].wait_until(lambda: claimed(tmp_path))
    time.sleep(0.5)
    tasks[1].send(signal.SIGKILL)
    codes = [task.wait() for task in tasks]
    assert codes[1] == -signal.SIGKILL, "too fast: it was over before it could be killed"
    assert {codes[0], codes[2]} <= {0, 3}, tasks[0].stderr + tasks[2].stderr
    check_same(tmp_path, whole)
    assert claimed(tmp_path) == []
