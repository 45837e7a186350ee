"""A small job through the commands: run, status, verify."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from job_fakes import SMALL, Runner, make_rows, write_jsonl
from resume_fakes import stop_at

from offline_diffusion.cli.main import main
from offline_diffusion.job import StopFlag

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "a cup", "kind": "object", "height": 64, "width": 64},
    {"id": "b", "prompt": "a hat", "kind": "object", "height": 32, "width": 96, "num_images_per_prompt": 2},
    {"id": "c", "prompt": "", "kind": "nothing"},
    {"id": "d", "prompt": "a tree", "kind": "plant", "height": 64, "width": 32, "negative_prompt": " "},
]


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("manifest") / "m.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run(manifest: Path, model: Path, out: Path, *args: object) -> Result:
    common = ("--model", model, "--device", "cpu", "--num-inference-steps", 2, "--shard-size", 2)
    return invoke("run", manifest, "--out", out, *common, *args)


@pytest.fixture(scope="module")
def finished(
    manifest: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("out") / "job"
    return out, run(manifest, tiny_model, out, "--json")


def test_a_faulty_row_is_set_aside_and_the_rest_is_drawn(finished: tuple[Path, Result]) -> None:
    out, result = finished
    assert result.exit_code == 3, result.output
    summary = json.loads(result.stdout)
    assert (summary["num_rows"], summary["num_ok"], summary["num_quarantined_rows"]) == (4, 4, 1)
    assert "1 row quarantined" in result.stderr
    ids = [
        value
        for path in sorted((out / "images").glob("*.parquet"))
        for value in pq.read_table(path)["id"].to_pylist()
    ]
    assert ids == ["a", "b", "b", "d"]


def test_the_dataset_opens_as_the_help_says(finished: tuple[Path, Result], tmp_path: Path) -> None:
    images = datasets.load_dataset(str(finished[0]), "images", split="train", cache_dir=str(tmp_path))
    assert images["kind"] == ["object", "object", "object", "plant"]
    assert [image.size for image in images["image"]] == [(64, 64), (96, 32), (96, 32), (32, 64)]


def test_the_same_command_again_has_nothing_to_do(
    finished: tuple[Path, Result], manifest: Path, tiny_model: Path
) -> None:
    result = run(manifest, tiny_model, finished[0], "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["num_resumed"] == 4


def test_another_seed_is_refused_by_name(
    finished: tuple[Path, Result], manifest: Path, tiny_model: Path
) -> None:
    result = run(manifest, tiny_model, finished[0], "--seed", 1)
    assert result.exit_code == 1
    assert "seed" in result.stderr
    assert "Traceback" not in result.output


def test_status_of_a_finished_job(finished: tuple[Path, Result]) -> None:
    result = invoke("status", finished[0], "--json")
    status = json.loads(result.stdout)
    assert (status["num_shards"], status["num_shards_done"], status["finished"]) == (2, 2, True)
    assert (status["num_rows"], status["num_ok"], status["num_invalid_rows"]) == (4, 4, 1)
    text = invoke("status", finished[0], "--watch")
    assert text.exit_code == 0
    assert "2 of 2 shards done, 4 of 4 rows, 4 images drawn, 0 failed, 1 row quarantined" in text.stdout


def test_verify_of_a_whole_dataset(finished: tuple[Path, Result]) -> None:
    result = invoke("verify", finished[0])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "sound: 2 of 2 shards, 4 rows, 4 images, 0 problems" in result.stderr


def test_verify_names_what_is_broken(finished: tuple[Path, Result], tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished[0], out)
    victim = sorted((out / "images").glob("*.parquet"))[1]
    victim.write_bytes(victim.read_bytes()[:-10])
    result = invoke("verify", out)
    assert result.exit_code == 1
    assert victim.name in result.stdout
    report = json.loads(invoke("verify", out, "--json").stdout)
    assert report["ok"] is False
    assert any(victim.name in problem["file"] for problem in report["problems"])


def test_one_task_makes_anothers_shards_too(manifest: Path, tiny_model: Path, tmp_path: Path) -> None:
    tasks = ("--num-tasks", 2, "--task-index")
    first = run(manifest, tiny_model, tmp_path / "o", *tasks, 0, "--json")
    assert first.exit_code == 3
    assert json.loads(first.stdout)["num_shards"] == 2
    assert invoke("verify", tmp_path / "o").exit_code == 0
    second = run(manifest, tiny_model, tmp_path / "o", *tasks, 1, "--json")
    assert json.loads(second.stdout)["num_shards"] == 1
    assert json.loads(second.stdout)["num_resumed"] == json.loads(second.stdout)["num_ok"]


def test_an_unfinished_job_is_sound_and_said_to_be_unfinished(tmp_path: Path) -> None:
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(4)), tmp_path / "o"
    options = SMALL | {"shard_size": 2, "max_num_seqs": 1, "scheduling_policy": "fifo", "device": "cpu"}
    stop, runner = StopFlag(), Runner()
    runner.on_step = stop_at(stop, 2)
    assert runner.run(manifest, out, stop=stop, **options).interrupted
    verified = invoke("verify", out)
    assert verified.exit_code == 3
    assert "sound but unfinished: 1 of 2 shards" in verified.stderr
    status = invoke("status", out)
    assert "1 of 2 shards done" in status.stdout
    assert "not running" in status.stdout
    assert Runner().run(manifest, out, **options).num_ok == 4
    assert invoke("verify", out).exit_code == 0


@pytest.mark.parametrize("command", ["status", "verify"])
def test_a_folder_that_is_no_output(command: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        result = invoke(command, folder)
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")
        assert str(folder) in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_in_good_order_and_the_same_command_goes_on(
    number: signal.Signals, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"cup {number}"}) + "\n" for number in range(40)))
    args = ["run", path, "--out", tmp_path / "o", "--model", tiny_model, "--device", "cpu"]
    size = ["--height", "64", "--width", "64", "--num-inference-steps", "20", "--max-num-seqs", "2"]
    command = [sys.executable, "-m", "offline_diffusion.cli.main", *map(str, args), *size]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("running: "):
                break
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == 75, rest
    assert "the same command goes on" in rest
    assert invoke("verify", tmp_path / "o").exit_code == 3
    again = subprocess.run(command, check=False, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert invoke("verify", tmp_path / "o").exit_code == 0
