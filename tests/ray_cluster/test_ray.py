"""A job on a real Ray cluster of two workers on this machine, of which one is killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job_fakes import Runner, contents, make_rows, write_jsonl

from offline_diffusion.config import make_job_config
from offline_diffusion.data.verify import verify
from offline_diffusion.errors import ManifestError
from offline_diffusion.job import JobSummary
from offline_diffusion.launch.ray import run_on_ray
from offline_diffusion.progress import Progress, StopFlag

ray = pytest.importorskip("ray", reason="the package ray is not installed (make test-ray does)")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
    ),
]

ALONE = {"RAY_ADDRESS": "local"}

PAUSE_S = 0.02
"""After each step: so a job outlasts the time until a sign of life is seen, however fast the machine is."""

OPTIONS = {"model": "tiny", "shard_size": 10, "max_num_seqs": 4, "height": 32, "width": 32, "device": "cpu"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"env_vars": _environment(), "worker_process_setup_hook": _hook()}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


def _environment() -> dict[str, str]:
    names = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: os.environ[name] for name in names if name in os.environ}


def _hook() -> Callable[[], None]:
    """What each worker process does first; a function in a function travels to it as it is."""

    def slow_down() -> None:
        from offline_diffusion.engine.engine import Engine

        count_step = Engine._count_step

        def count_step_slowly(self: Engine, *args: Any) -> None:
            count_step(self, *args)
            time.sleep(PAUSE_S)

        Engine._count_step = count_step_slowly  # type: ignore[method-assign]

    return slow_down


def heartbeats(out: Path) -> list[dict[str, Any]]:
    found = []
    for path in (out / "_state" / "tasks").glob("*.json"):
        try:
            found.append(json.loads(path.read_bytes()))
        except (OSError, ValueError):
            continue
    return found


def run(manifest: Path, out: Path, steps: int, stop: StopFlag | None = None) -> JobSummary:
    options = OPTIONS | {"manifests": [str(manifest)], "out": out, "num_inference_steps": steps}
    seen: list[Progress] = []
    config = make_job_config(options)
    return run_on_ray(config, observer=seen.append, say=print, stop=stop or StopFlag())


def test_a_killed_worker_costs_nothing(cluster: None, tmp_path: Path) -> None:
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(60)), tmp_path / "out"
    killed: list[int] = []

    def kill_one() -> None:
        while True:
            busy = [beat for beat in heartbeats(out) if beat["num_ok"] > 0 and beat["state"] == "running"]
            if busy:
                killed.append(int(busy[0]["worker"].split(":")[1]))
                os.kill(killed[0], signal.SIGKILL)
                return
            time.sleep(0.1)

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    summary = run(manifest, out, steps=100)
    thread.join(5)
    assert killed, "the job was over before a worker could be killed"
    assert (summary.num_ok, summary.num_images, summary.interrupted) == (60, 60, False)
    report = verify(out)
    assert (report.num_problems, report.pending, report.num_images) == (0, [], 60)
    Runner().run(manifest, tmp_path / "whole", **OPTIONS, num_inference_steps=100)
    for ours, theirs in zip(contents(out), contents(tmp_path / "whole"), strict=True):
        assert ours == theirs


def test_a_stop_ends_all_workers_and_the_job_goes_on(cluster: None, tmp_path: Path) -> None:
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(40)), tmp_path / "out"
    stop = StopFlag()

    def stop_when_drawing() -> None:
        while not any(beat["num_ok"] > 0 for beat in heartbeats(out)):
            time.sleep(0.1)
        stop.request("SIGTERM")

    thread = threading.Thread(target=stop_when_drawing, daemon=True)
    thread.start()
    assert run(manifest, out, steps=100, stop=stop).interrupted
    thread.join(5)
    assert all(beat["state"] != "running" for beat in heartbeats(out))
    assert 0 < sum(beat["num_ok"] for beat in heartbeats(out)) < 40
    assert not run(manifest, out, steps=100).interrupted
    assert (verify(out).num_problems, verify(out).num_images) == (0, 40)


def test_relative_paths_name_the_drivers_files(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have a folder of their own to be in."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "m.jsonl", make_rows(10))
    assert run(Path("m.jsonl"), Path("out"), steps=2).num_ok == 10
    assert verify(tmp_path / "out").num_images == 10


def test_a_missing_manifest_is_a_clear_error(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="missing"):
        run(tmp_path / "missing.jsonl", tmp_path / "out", steps=2)


def test_the_driver_prepares_nothing_itself(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine may have no GPU, and what ``auto`` comes to there would be another job."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("in the driver's process")

    monkeypatch.setattr("offline_diffusion.job.prepare_job", refuse)
    monkeypatch.setattr("offline_diffusion.preparation.job_identity", refuse)
    assert run(write_jsonl(tmp_path / "m.jsonl", make_rows(10)), tmp_path / "out", steps=2).num_ok == 10


ON_A_GPU = """
import sys, ray
from offline_diffusion.config import make_job_config
from offline_diffusion.launch.ray import run_on_ray
from offline_diffusion.progress import StopFlag
ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
config = make_job_config({"manifests": [sys.argv[1]], "out": sys.argv[2], "model": "tiny",
                          "shard_size": 5, "max_num_seqs": 2, "height": 32, "width": 32,
                          "num_inference_steps": 20})
assert run_on_ray(config, observer=lambda _: None, say=print, stop=StopFlag()).num_ok == 20
"""


def test_a_worker_takes_one_gpu(tmp_path: Path) -> None:
    """There is one, which is only counted, and CPUs for four workers."""
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(20)), tmp_path / "out"
    subprocess.run([sys.executable, "-c", ON_A_GPU, manifest, out], check=True, env=os.environ | ALONE)
    times = sorted((beat["started_at"], beat["updated_at"]) for beat in heartbeats(out))
    assert times
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times)), "two shared a GPU"


def test_the_command_starts_a_cluster_or_joins_one(cluster: None, tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(10))
    address = ray.get_runtime_context().gcs_address
    for name, environment in (("own", ALONE), ("joined", {"RAY_ADDRESS": address})):
        command = [Path(sys.executable).with_name("offdiff"), "run", manifest, "--out", tmp_path / name]
        flags = "--launcher ray --model tiny --device cpu --height 32 --width 32"
        flags += " --num-inference-steps 2 --shard-size 5"
        done = subprocess.run(
            [*command, *flags.split()], env=os.environ | environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "done: 10 of 10 images" in done.stderr
        assert verify(tmp_path / name).num_images == 10
