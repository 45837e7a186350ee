"""Flags, job file and Slurm's variables: which one wins, and how mistakes are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from offline_diffusion.cli.main import main
from offline_diffusion.cli.options import SLURM_ARRAY, build_config, gather_values, slurm_task
from offline_diffusion.config import JobConfig
from offline_diffusion.errors import ConfigError

SLURM = {
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_ARRAY_TASK_ID": "12",
    "SLURM_ARRAY_TASK_MIN": "10",
}


def parse(args: list[str], environ: dict[str, str] | None = None) -> JobConfig:
    """The config that ``offdiff run ARGS`` would run with."""
    command = main.get_command(click.Context(main), "run")
    assert command is not None
    params: dict[str, Any] = command.make_context("run", args).params
    return build_config(params, environ=environ or {})


def write_job(folder: Path, text: str) -> str:
    path = folder / "job.yaml"
    path.write_text(text)
    return str(path)


def test_flags_alone() -> None:
    config = parse(
        ["a.jsonl", "b.tsv", "--out", "o", "--no-step-execution", "--map", "p=prompt", "--map", "a=b=seed",
         "--seed", str(2**64 - 1), "--negative-prompt", "", "--max-failures", "5%"]
    )  # fmt: skip
    assert config.manifests == ("a.jsonl", "b.tsv")
    assert config.out == Path("o")
    assert config.step_execution is False
    assert config.map == {"p": "prompt", "a=b": "seed"}
    assert config.seed == 2**64 - 1
    assert config.negative_prompt == ""
    assert config.max_failures == "5%"


def test_nothing_given_is_the_default_of_the_config() -> None:
    assert parse(["m", "--out", "o"]) == JobConfig(manifests=("m",), out=Path("o"))


def test_a_job_file_gives_everything_and_flags_win(tmp_path: Path) -> None:
    job = write_job(
        tmp_path,
        "manifests: a.jsonl\nout: o\nmax-num-seqs: 3\nseed: 5\nretry_failed: true\n"
        "map: {p: prompt, s: seed}\nmax_failures: 7\nnegative_prompt:\n",
    )
    config = parse(["--job", job, "--seed", "0", "--no-retry-failed", "--map", "s=num_inference_steps"])
    assert (config.manifests, config.out) == (("a.jsonl",), Path("o"))
    assert config.max_num_seqs == 3
    assert config.seed == 0
    assert config.retry_failed is False
    assert config.map == {"p": "prompt", "s": "num_inference_steps"}
    assert config.max_failures == "7"
    assert config.negative_prompt is None


def test_manifests_on_the_command_line_take_the_place_of_the_files(tmp_path: Path) -> None:
    job = write_job(tmp_path, "manifests: [a.jsonl, b.jsonl]\nout: o\n")
    assert parse(["--job", job, "c.jsonl"]).manifests == ("c.jsonl",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 3\n", "did you mean 'max_num_seqs'?"),
        ("zzz: 3\n", "known: allow_manifest_change, "),
        ("- a\n", "must hold a mapping of options, got list"),
        ("a: [\n", "is not YAML"),
        ("max_num_seqs: 0\n", "job.yaml: max_num_seqs: "),
        ("scheduling_policy: best\n", "Input should be 'fifo', 'pack'"),
    ],
)
def test_mistakes_in_a_job_file_name_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    job = write_job(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        parse(["m", "--out", "o", "--job", job])
    assert message in str(caught.value)
    assert "job.yaml" in str(caught.value)


def test_a_job_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        parse(["m", "--out", "o", "--job", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "o"], "MANIFEST... is required"),
        (["m"], "--out is required"),
        (["m", "--out", "o", "--limit", "-1"], "--limit: "),
        (["m", "--out", "o", "--true-cfg-scale", "nan"], "--true-cfg-scale: "),
        (["m", "--out", "o", "--max-failures", "few"], "--max-failures: must be a count"),
        (
            ["m", "--out", "o", "--task-index", "2", "--num-tasks", "2"],
            "--task-index: must be below the number of tasks, 2, got 2",
        ),
    ],
)
def test_mistakes_on_the_command_line_name_the_flag(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(args)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_map_to_nothing_only_carries_the_column() -> None:
    config = parse(["m", "--out", "o", "--map", "tag=", "--map", "a=b="])
    assert config.map == {"tag": "", "a=b": ""}


@pytest.mark.parametrize("pair", ["prompt", "=prompt", "="])
def test_a_map_needs_their_name_and_a_sign(pair: str) -> None:
    with pytest.raises(click.BadParameter, match="theirs=ours"):
        parse(["m", "--out", "o", "--map", pair])


def test_a_slurm_array_element_is_a_task() -> None:
    config = parse(["m", "--out", "o"], SLURM)
    assert (config.num_tasks, config.task_index) == (4, 2)


def test_a_slurm_array_with_a_step() -> None:
    environ = SLURM | {"SLURM_ARRAY_TASK_ID": "16", "SLURM_ARRAY_TASK_STEP": "2"}
    assert slurm_task(environ, None) == {"num_tasks": 4, "task_index": 3}


def test_given_tasks_beat_slurm() -> None:
    config = parse(["m", "--out", "o", "--num-tasks", "9", "--task-index", "8"], SLURM)
    assert (config.num_tasks, config.task_index) == (9, 8)


@pytest.mark.parametrize(
    ("changed", "args", "expected"),
    [
        ({"SLURM_ARRAY_TASK_ID": "17"}, [], (4, 3)),  # --array=10,12,13,17
        ({"SLURM_ARRAY_TASK_ID": "15", "SLURM_ARRAY_TASK_STEP": "2"}, [], (4, 2)),
        ({}, ["--num-tasks", "9"], (9, 2)),
        ({}, ["--num-tasks", "2"], (2, 0)),
    ],
)
def test_an_array_with_gaps_or_of_another_length_will_do(
    changed: dict[str, str], args: list[str], expected: tuple[int, int]
) -> None:
    config = parse(["m", "--out", "o", *args], SLURM | changed)
    assert (config.num_tasks, config.task_index) == expected


def test_what_the_array_gave_is_marked() -> None:
    command = main.get_command(click.Context(main), "run")
    assert command is not None
    params = command.make_context("run", ["m", "--out", "o"]).params
    _, spelling = gather_values(params, environ=SLURM)
    assert (spelling["task_index"], spelling["num_tasks"]) == (SLURM_ARRAY, SLURM_ARRAY)
    _, spelling = gather_values(params, environ={})
    assert spelling["task_index"] == "--task-index"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-tasks", "2"], "--num-tasks 2 without --task-index"),
        (["--task-index", "0"], "--task-index 0 without --num-tasks"),
        (["--task-index", "1"], "--task-index 1 without --num-tasks"),
    ],
)
def test_half_a_task_is_refused(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["m", "--out", "o", *args])
    assert message in caught.value.message
    assert caught.value.hint


def test_one_task_needs_no_index() -> None:
    assert parse(["m", "--out", "o", "--num-tasks", "1"]).task_index == 0


def test_a_plan_of_many_tasks_needs_no_index() -> None:
    command = main.get_command(click.Context(main), "plan")
    assert command is not None
    params = command.make_context("plan", ["m", "--num-tasks", "8"]).params
    assert build_config({**params, "out": "."}, environ={}).num_tasks == 8


def test_an_array_job_without_an_array_is_no_task() -> None:
    assert slurm_task({"SLURM_JOB_ID": "1"}, None) == {}


@pytest.mark.parametrize(
    ("flags", "expected"), [({}, 2), ({"image_format": "webp"}, 2), ({"image_format": "jpeg"}, None)]
)
def test_a_files_image_level_is_of_the_files_format(
    flags: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("image_format: webp\nimage_level: 2\n", encoding="utf-8")
    values, _ = gather_values({"job_file": job, "image_level": None, **flags}, environ={})
    assert values.get("image_level") == expected
