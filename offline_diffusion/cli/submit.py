"""``offdiff submit``: a job as a batch script for a cluster."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from offline_diffusion.cli.options import gather_values, together
from offline_diffusion.config import JobConfig, make_job_config, make_options
from offline_diffusion.errors import ConfigError
from offline_diffusion.launch.slurm import LOGS, SlurmArray, render_script, submit_script

LOGS_OF_URL = "offdiff-logs"
"""Where an output on object storage has its logs."""

slurm_options = together(
    click.option("--array", type=int, required=True, metavar="N", help="Number of tasks."),
    click.option("--max-parallel", type=int, metavar="N", help="Most tasks that run at once."),
    click.option("--time", metavar="TIME", help="Time limit of a task, as Slurm spells it: HH:MM:SS, D-HH."),
    click.option("--partition", metavar="NAME", help="Slurm's partition."),
    click.option("--account", metavar="NAME", help="Slurm's account."),
    click.option("--gpus-per-task", type=int, metavar="N", help="GPUs of a task."),
    click.option("--gres", metavar="LIST", help="Slurm's resources, such as gpu:h200:1."),
    click.option("--cpus-per-task", type=int, metavar="N", help="Processors of a task."),
    click.option("--mem", metavar="SIZE", help="Memory of a task, such as 64G."),
    click.option(
        "--job-name", metavar="NAME", help="Name in the queue.  [default: that of the output folder]"
    ),
    click.option(
        "--logs",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help=f"Folder of the logs.  [default: OUT/{LOGS}; for a URL {LOGS_OF_URL}/NAME]",
    ),
    click.option(
        "--setup",
        multiple=True,
        metavar="LINE",
        help="A line of shell to run before, such as 'source env/bin/activate'; repeatable.",
    ),
    click.option(
        "--container",
        metavar="COMMAND",
        help="Run offdiff in this, such as 'apptainer exec --nv offdiff.sif'.",
    ),
)


@click.group("submit")
def command() -> None:
    """Write a job as a batch script for a cluster, and submit it.

    \b
    Example:
      offdiff submit slurm jobs/slurm/job.yaml --array 4
    """


@command.command("slurm")
@click.argument("job_file", type=click.Path(path_type=Path), metavar="JOB")
@slurm_options
@click.option("--submit", "submit", is_flag=True, help="Run sbatch, and print the array's job id.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the script there."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def slurm(job_file: Path, submit: bool, output: Path | None, as_json: bool, **asked: Any) -> None:
    """Write the job file JOB as a Slurm array, and with --submit hand it to sbatch.

    The tasks take shards of one output folder, so that any array, of any length, goes on with what is
    left. Near its time limit a task saves its work and goes back to the queue. Without -o and --submit
    the script is printed.

    \b
    Example:
      offdiff submit slurm jobs/slurm/job.yaml --array 4 --time 04:00:00 --gpus-per-task 1
      offdiff submit slurm jobs/slurm/job.yaml --array 8 --max-parallel 2 -o job.sbatch
    """
    config = _job(job_file)
    array = _array(job_file, config, asked)
    script = render_script(array)
    array.logs.mkdir(parents=True, exist_ok=True)
    if output is not None:
        output.write_text(script, encoding="utf-8")
    job_id = submit_script(script) if submit else None
    if as_json:
        told = {"job_id": job_id, "script": script, "logs": str(array.logs)}
        click.echo(json.dumps(told))
    elif job_id is not None:
        click.echo(job_id)
    elif output is None:
        click.echo(script, nl=False)
    click.echo(_next_step(config, output, job_id), err=True)


def _job(job_file: Path) -> JobConfig:
    """The job as each task will read it."""
    values, spelling = gather_values({"job_file": job_file})
    for name in ("num_tasks", "task_index"):
        if name in values:
            raise ConfigError(
                f"{spelling[name]}: an array numbers its tasks itself", hint="leave it out of the job file"
            )
    return make_job_config(values, spelling=spelling)


def _array(job_file: Path, config: JobConfig, asked: dict[str, Any]) -> SlurmArray:
    given = {name: value for name, value in asked.items() if value is not None}
    name = Path(config.out).absolute().name
    logs = config.out / LOGS if isinstance(config.out, Path) else Path(LOGS_OF_URL) / name
    defaults = {"logs": logs, "job_name": name}
    spelling = {name: f"--{name.replace('_', '-')}" for name in SlurmArray.model_fields}
    spelling["job_file"] = "job file"
    return make_options(SlurmArray, {"job_file": job_file} | defaults | given, spelling=spelling)


def _next_step(config: JobConfig, output: Path | None, job_id: str | None) -> str:
    if job_id is not None:
        return f"look: squeue --me, offdiff status {shlex.quote(str(config.out))}"
    return f"next: sbatch {shlex.quote(str(output or 'FILE'))}"
