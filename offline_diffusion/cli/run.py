"""``offdiff run``: the main job."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from offline_diffusion.cli.cost_record import remember
from offline_diffusion.cli.options import (
    LEVEL_HELP,
    SLURM_ARRAY,
    budget_options,
    compute_options,
    gather_values,
    job_option,
    manifest_options,
    model_options,
    row_options,
    schedule_options,
    shard_options,
    slurm_time_left,
    together,
)
from offline_diffusion.cli.profile import profile_text
from offline_diffusion.cli.progress import make_progress
from offline_diffusion.cli.signals import STOP_KEY
from offline_diffusion.cli.text import duration
from offline_diffusion.config import make_job_config
from offline_diffusion.errors import JobInterrupted
from offline_diffusion.progress import plural

if TYPE_CHECKING:
    from offline_diffusion.config import JobConfig
    from offline_diffusion.job import JobSummary
    from offline_diffusion.progress import StopFlag

RunTask = Callable[..., "JobSummary"]

EXIT_SOME_FAILED = 3

engine_options = together(
    schedule_options,
    budget_options,
    job_option(
        "--request-batch-max-wait-ms", "How long a wave waits to fill up in request mode.", metavar="MS"
    ),
    job_option("--attention-backend", "See `offdiff models`."),
    compute_options,
    job_option(
        "--diffusion-streaming-output",
        "Show unfinished images: their latest previews are JPEG files in the output's _state/previews.",
    ),
    job_option("--preview-interval", "Denoise steps of an image between two previews.", metavar="N"),
)

task_options = together(
    job_option(
        "--num-tasks",
        "Tasks that share the job, the first to be done helping; from Slurm's array when in one.",
        metavar="N",
    ),
    job_option("--task-index", "Which of them this is, from 0; likewise.", metavar="I"),
    job_option(
        "--devices",
        "One worker on each: all, or a list such as 0,1; in place of --device.",
        metavar="all|N,N",
    ),
    job_option(
        "--launcher", "ray: workers as tasks of a Ray cluster, one a GPU (RAY_ADDRESS, or this machine)."
    ),
)

profile_option = job_option(
    "--profile", "Tell where the time went; write that and a trace of some steps to _state/profile."
)

failure_options = together(
    job_option("--retry-failed", "Run the failed and quarantined rows of finished shards again."),
    job_option(
        "--max-failures",
        "Stop when more rows of the job fail: a count, or a share such as 5%.",
        metavar="N|P%",
    ),
    job_option("--allow-manifest-change", "Resume although the manifest changed; unchanged rows are kept."),
)


stop_options = together(
    job_option(
        "--checkpoint-interval",
        "How often unfinished images are saved at their step; 0 is only when the job stops.",
        metavar="SECONDS",
    ),
    job_option(
        "--time-limit",
        "The process is ended after this long: save and stop before. A Slurm job's own limit counts too.",
        metavar="SECONDS|HH:MM:SS",
        as_text=True,
    ),
)


@click.command("run")
@manifest_options
@job_option("--out", "Output folder, or a URL such as s3://bucket/name; the same one resumes.", metavar="DIR")
@job_option(
    "--work-dir",
    "With a URL: where shards are built before they are uploaded; best kept, to resume without a loss.",
    metavar="DIR",
)
@model_options
@row_options
@job_option("--seed", "Job seed, for rows without one.", metavar="N")
@engine_options
@shard_options
@job_option("--image-level", LEVEL_HELP, metavar="N")
@task_options
@failure_options
@stop_options
@profile_option
@click.option("--json", "as_json", is_flag=True, help="Print the final summary as JSON on standard output.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **given: Any) -> None:
    """Draw every image of a manifest into a dataset; the same command again resumes.

    A faulty row never stops the job: it is set aside with its reason, and the exit code is 3.
    SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 save the images that are being drawn at their step and exit
    with 75, as does a time limit; a second signal, 2 s later or more (SIGINT: at once), stops without
    saving.

    \b
    Example:
      offdiff run manifests/quickstart.jsonl --out out/quickstart
      offdiff run --job jobs/promptset.yaml --limit 100 --out out/first-100
    """
    values, spelling = gather_values(given)
    config = _with_slurm_end(make_job_config(values, spelling=spelling))
    if spelling["task_index"] == SLURM_ARRAY:
        index, count = config.task_index, config.num_tasks
        click.echo(f"task {index + 1} of {count} (--task-index {index}, from {SLURM_ARRAY})", err=True)
    summary = _run(config, ctx.obj, ctx.meta[STOP_KEY])
    _report(summary)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(summary), default=str))
    ctx.exit(_exit_code(summary))


def _with_slurm_end(config: JobConfig) -> JobConfig:
    """With the time limit of a Slurm job where that comes first."""
    left = slurm_time_left(os.environ, now=time.time())
    if left is None or (config.time_limit is not None and config.time_limit <= left):
        return config
    return config.model_copy(update={"time_limit": left})


def _launcher(config: JobConfig) -> RunTask:
    """What runs a job: this process, one worker a device, or a cluster."""
    from offline_diffusion.job import run_task

    if config.launcher == "ray":
        from offline_diffusion.launch.ray import run_on_ray

        return run_on_ray
    if config.devices is not None:
        from offline_diffusion.launch.local import run_on_devices

        return run_on_devices
    return functools.partial(run_task, own_process=True)


def _run(config: JobConfig, run_task: RunTask | None, stop: StopFlag) -> JobSummary:
    """Runs the task; ``run_task`` stands in for that of ``offline_diffusion.job`` in tests."""
    with make_progress() as display:
        run_task = run_task or _launcher(config)
        if stop.requests:
            raise JobInterrupted(
                f"{stop.why}: stopped before the job began", hint="the same command starts it"
            )
        summary = run_task(config, observer=display.update, stop=stop, say=display.say)
    if summary.cost is not None and summary.profile is None:  # tracing takes time of its own
        remember(summary.cost, config)
    return summary


def _report(summary: JobSummary) -> None:
    if summary.profile is not None:
        click.echo(profile_text(summary.profile), err=True)
    for warning in summary.warnings:
        click.echo(f"warning: {warning}", err=True)
    counts = f"{summary.num_ok:,} of {plural(summary.num_images, 'image')}"
    speed = f"in {duration(summary.seconds)} ({summary.images_per_s:.3g} images/s)"
    state = "interrupted" if summary.interrupted else "done"
    click.echo(f"{state}: {counts} {speed} in {summary.out}", err=True)
    if summary.num_resumed:
        click.echo(f"  {plural(summary.num_resumed, 'image')} done before", err=True)
    if summary.num_failed:
        click.echo(f"  {plural(summary.num_failed, 'image')} failed: {summary.out}/failures", err=True)
    if summary.num_quarantined_rows:
        rows = plural(summary.num_quarantined_rows, "row")
        click.echo(f"  {rows} quarantined: {summary.out}/failures", err=True)
    if summary.interrupted:
        click.echo("next: the same command goes on", err=True)
    else:
        click.echo(f"next: offdiff verify {summary.out}", err=True)
    click.echo(f"look: offdiff status {summary.out}", err=True)


def _exit_code(summary: JobSummary) -> int:
    if summary.interrupted:
        return JobInterrupted.exit_code
    return EXIT_SOME_FAILED if summary.num_failed or summary.num_quarantined_rows else 0
