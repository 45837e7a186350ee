"""The group: quick, free of heavy imports, and documented by examples that parse."""

from __future__ import annotations

import errno
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import offline_diffusion
from offline_diffusion.cli.main import COMMANDS, main
from offline_diffusion.config import JobConfig

ROOT = Path(__file__).resolve().parents[2]


def get_command(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


def examples(name: str) -> list[str]:
    text = (get_command(name).help or "").partition("Example:")[2]
    return [line.strip() for line in text.splitlines() if line.strip().startswith("offdiff ")]


def modules_after(*args: str) -> set[str]:
    """The modules that are loaded when ``offdiff ARGS`` is done."""
    code = (
        "import json, sys\n"
        "from offline_diffusion.cli.main import main\n"
        f"main({list(args)!r}, standalone_mode=False)\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {"torch", "diffusers", "transformers", "pyarrow", "datasets", "pydantic", "numpy", "rich"}


@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_loads_no_heavy_module(args: list[str]) -> None:
    loaded = modules_after(*args)
    assert "click" in loaded
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_a_command_loads_neither_torch_nor_arrow(name: str) -> None:
    assert modules_after(name, "--help").isdisjoint({"torch", "diffusers", "pyarrow", "datasets"})


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, offline_diffusion; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert set(done.stdout.split()).isdisjoint(HEAVY)


def test_help_takes_less_than_a_second() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "offline_diffusion.cli.main", "--help"], check=True,
                       capture_output=True, cwd=ROOT)  # fmt: skip
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 1.0


def test_version_is_that_of_the_project_file() -> None:
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"offdiff, version {version}\n"
    assert offline_diffusion.__version__ == version


def test_the_public_names() -> None:
    assert set(offline_diffusion.__all__) <= set(dir(offline_diffusion))
    for name in ("SamplingParams", "Request", "RequestOutput", "OfflineDiffusion"):
        assert getattr(offline_diffusion, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = offline_diffusion.nothing


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_group_lists_the_first_line_of_each_commands_help(name: str) -> None:
    first = (get_command(name).help or "").splitlines()[0]
    assert COMMANDS[name] == first
    assert first in " ".join(CliRunner().invoke(main, ["--help"]).output.split())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_examples_parse(name: str) -> None:
    lines = examples(name)
    assert lines
    for line in lines:
        _, command, *args = shlex.split(line.partition(" | ")[0])
        assert command == name
        context = get_command(name).make_context(name, args)
        for file in [*context.params.get("manifests", ()), context.params.get("job_file")]:
            assert file is None or str(file) == "-" or (ROOT / file).exists(), file


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_has_a_help_text(name: str) -> None:
    options = [param for param in get_command(name).params if isinstance(param, click.Option)]
    assert all(option.help for option in options)


CONTRACT = {
    "run": (
        "--out --model --job --step-execution --no-step-execution --max-num-seqs --max-num-batched-tokens "
        "--request-batch-max-wait-ms --scheduling-policy --attention-backend --quantization --dtype --device "
        "--seed --shard-size --num-tasks --task-index --image-format --retry-failed --limit --max-failures "
        "--on-bad-size --map --allow-manifest-change --diffusion-streaming-output"
    ),
    "validate": "--json",
    "plan": "--model --num-tasks --json",
    "status": "--watch --json",
    "verify": "--json",
    "models": "--json",
}
"""The flags of the contract with users that exist so far."""


@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_the_contracts_options_exist(name: str) -> None:
    flags = {flag for param in get_command(name).params for flag in (*param.opts, *param.secondary_opts)}
    assert set(CONTRACT[name].split()) <= flags


def test_run_has_a_flag_for_every_option_of_a_job() -> None:
    names = {param.name for param in get_command("run").params}
    assert set(JobConfig.model_fields) <= names


def test_choices_of_the_contract() -> None:
    choices = {
        param.name: set(param.type.choices)
        for param in get_command("run").params
        if isinstance(param.type, click.Choice)
    }
    assert choices["attention_backend"] == {"auto", "fa3", "flash_attn", "torch_varlen", "sdpa"}
    assert choices["scheduling_policy"] >= {"fifo", "pack"}
    assert choices["image_format"] == {"png", "jpeg", "webp"}
    assert choices["on_bad_size"] == {"error", "round", "crop"}


def test_the_help_has_every_exit_code() -> None:
    text = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    for code in ("0 all rows done", "3 finished but some rows failed", "75 interrupted"):
        assert code in text
    assert "Of validate, 3 is a faulty row; of verify, nothing wrong but shards still to be done" in text


def test_an_unknown_command_is_answered_with_the_close_one() -> None:
    result = CliRunner().invoke(main, ["valdate"])
    assert result.exit_code == 2
    assert "hint: did you mean 'validate'?" in result.stderr
    assert "commands: run, " in CliRunner().invoke(main, ["zzz"]).stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_standard_output_is_told(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"prompt": ""}\n' * 3)
    command = [sys.executable, "-m", "offline_diffusion.cli.main", "validate", str(path)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "Error: [Errno 28] No space left on device\n")


def test_a_folder_that_cannot_be_written_is_told_by_name() -> None:
    def run_task(config: object, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "out/images")

    result = CliRunner().invoke(main, ["run", "m.jsonl", "--out", "out"], obj=run_task)
    assert result.exit_code == 1
    assert result.stderr == "Error: [Errno 13] Permission denied: 'out/images'\n"


def test_an_unknown_option_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["run", "--max-num-seq", "3"])
    assert result.exit_code == 2
    assert "--max-num-seqs" in result.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").rglob("*.yaml")), ids=lambda path: path.name)
def test_example_jobs_are_valid_and_name_files_that_are_there(path: Path) -> None:
    from offline_diffusion.config import make_job_config
    from offline_diffusion.job_yaml import read_job_file

    config = make_job_config(read_job_file(path))
    for manifest in config.manifests:
        assert (ROOT / manifest).exists()


def test_job_file_comments_name_real_options() -> None:
    for path in (ROOT / "jobs").rglob("*.yaml"):
        for flag in re.findall(r"(--[a-z-]+)", path.read_text()):
            params = [param for name in COMMANDS for param in get_command(name).params]
            submit = get_command("submit")
            assert isinstance(submit, click.Group)
            params += [param for command in submit.commands.values() for param in command.params]
            assert flag == "--help" or any(
                flag in (*param.opts, *param.secondary_opts) for param in params
            ), flag


def test_the_quickstart_manifest_is_as_mixed_as_promised() -> None:
    rows = [json.loads(line) for line in (ROOT / "manifests/quickstart.jsonl").read_text().splitlines()]
    assert len(rows) == 24 == len({row["id"] for row in rows})
    for row in rows:
        assert row["width"] % 16 == row["height"] % 16 == 0
        assert min(row["width"], row["height"]) >= 64
        assert max(row["width"], row["height"]) <= 256
        assert 0.5 <= row["width"] / row["height"] <= 2
    assert len({(row["width"], row["height"]) for row in rows}) > 12
    assert len({row["num_inference_steps"] for row in rows}) > 4
    guided = [
        row for row in rows if row.get("true_cfg_scale", 0) > 1 and row.get("negative_prompt") is not None
    ]
    assert 12 <= len(guided) < len(rows) - 3
    *_, with_guidance, without, plain, negative = rows
    assert differing(with_guidance, without) == {"id", "true_cfg_scale"}
    assert differing(plain, negative) == {"id", "negative_prompt"}


def differing(row: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Columns in which two rows differ."""
    return {name for name in row.keys() | other.keys() if row.get(name) != other.get(name)}
