"""``offdiff submit slurm``: what is checked, written and said."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from offline_diffusion.cli.main import main
from offline_diffusion.cli.submit import command

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("manifests: m.jsonl\nout: out/a job\n")


def submit(*args: str) -> Result:
    return CliRunner().invoke(main, ["submit", "slurm", *args])


def write_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in on the PATH that keeps what it gets."""
    (folder / "sbatch").write_text("#!/bin/sh\ncat > submitted\necho 42\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_script_is_printed_and_the_logs_folder_made() -> None:
    result = submit("job.yaml", "--array", "3", "--max-parallel", "2")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "#SBATCH --array=0-2%2" in lines
    assert '#SBATCH --job-name="a job"' in lines
    assert '#SBATCH --output="out/a job/_state/logs/%A_%a.log"' in lines
    assert "offdiff run --job job.yaml &" in lines
    assert Path("out/a job/_state/logs").is_dir()
    assert result.stderr == "next: sbatch FILE\n"


def test_the_script_is_written() -> None:
    printed = submit("job.yaml", "--array", "3").stdout
    result = submit("job.yaml", "--array", "3", "-o", "x.sbatch")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "next: sbatch x.sbatch\n")
    assert Path("x.sbatch").read_text() == printed


def test_other_logs_and_another_name() -> None:
    script = submit("job.yaml", "--array", "1", "--logs", "logs/100%", "--job-name", "x").stdout
    assert "#SBATCH --output=logs/100%%/%A_%a.log\n" in script
    assert "#SBATCH --job-name=x\n" in script
    assert Path("logs/100%").is_dir()


def test_submission_prints_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sbatch(tmp_path, monkeypatch)
    result = submit("job.yaml", "--array", "3", "--submit")
    assert (result.exit_code, result.stdout) == (0, "42\n")
    assert "offdiff status 'out/a job'" in result.stderr
    assert Path("submitted").read_text() == submit("job.yaml", "--array", "3").stdout


def test_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = submit("job.yaml", "--array", "3").stdout
    logs = "out/a job/_state/logs"
    told = json.loads(submit("job.yaml", "--array", "3", "--json").stdout)
    assert told == {"job_id": None, "script": script, "logs": logs}
    write_sbatch(tmp_path, monkeypatch)
    told = json.loads(submit("job.yaml", "--array", "3", "--json", "--submit").stdout)
    assert told == {"job_id": "42", "script": script, "logs": logs}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("manifests: m\nout: o\nmax_num_seq: 3\n", "did you mean 'max_num_seqs'?"),
        ("manifests: m\nout: o\nmax_num_seqs: 0\n", "job file job.yaml: max_num_seqs: "),
        ("manifests: m\n", "--out is required"),
        ("out: o\n", "MANIFEST... is required"),
        (
            "manifests: m\nout: o\ntask_index: 1\n",
            "job file job.yaml: task_index: an array numbers its tasks",
        ),
        ("manifests: m\nout: o\nnum_tasks: 4\n", "leave it out of the job file"),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_anything_is_written(text: str, message: str) -> None:
    Path("job.yaml").write_text(text)
    result = submit("job.yaml", "--array", "2", "-o", "x.sbatch")
    assert result.exit_code == 2
    assert message in result.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["job.yaml"]


def test_mistakes_name_the_flag() -> None:
    result = submit("job.yaml", "--array", "0", "--time", "soon", "--setup", "a\nb")
    assert result.exit_code == 2
    for start in ("--array: ", "--time: must be minutes, ", "--setup"):
        assert start in result.stderr
    assert submit("job.yaml").exit_code == 2


def test_the_example_is_what_the_command_in_it_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (ROOT / "jobs/slurm/job.yaml").read_text()
    (shown,) = re.findall(r"offdiff (submit slurm .*?) -o (\S+)", re.sub(r"\n# +", " ", text))
    (tmp_path / "jobs/slurm").mkdir(parents=True)
    (tmp_path / "jobs/slurm/job.yaml").write_text(text)
    result = CliRunner().invoke(main, [*shlex.split(shown[0]), "-o", shown[1]])
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / shown[1]).read_text() == (ROOT / "jobs/slurm/array.sbatch").read_text()


def test_the_help_is_whole() -> None:
    assert isinstance(command, click.Group)
    slurm = command.commands["slurm"]
    assert all(option.help for option in slurm.params if isinstance(option, click.Option))
    lines = (slurm.help or "").partition("Example:")[2].strip().splitlines()
    for line in lines:
        context = slurm.make_context("slurm", shlex.split(line)[3:])
        assert (ROOT / context.params["job_file"]).exists()
    assert len(lines) == 2
