"""Options that commands share, made from the fields of ``JobConfig`` so that both always agree."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from offline_diffusion.config import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MODEL,
    JobConfig,
    check_option_names,
    make_job_config,
)
from offline_diffusion.errors import ConfigError
from offline_diffusion.job_yaml import read_job_file

SLURM_ARRAY = "Slurm's array"
"""How options are spelled that it gave."""

LEVEL_HELP = (
    "jpeg: quality, 1 to 100  [default: 95]; png and webp lose nothing, higher is smaller and slower: "
    "png 1 to 9 (1 to 5 are alike), webp 0 to 6  [default: 1]."
)

IMAGE_FORMAT = JobConfig.model_fields["image_format"].default

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

_CLICK_TYPES: dict[Any, click.ParamType[Any]] = {
    int: click.INT,
    float: click.FLOAT,
    str: click.STRING,
    Path: click.Path(path_type=Path),
}


def job_option(flag: str, help: str, *, metavar: str | None = None, as_text: bool = False) -> Decorator:
    """One option of ``JobConfig`` as a flag: its type, choices and default come from the field.

    With ``as_text`` the field reads the value from text itself.

    The value is None when the flag is not given, so that a job file can speak.
    """
    name = flag.lstrip("-").replace("-", "_")
    default = JobConfig.model_fields[name].default
    kind = _plain_type(get_type_hints(JobConfig)[name])
    if kind is bool:
        shown = flag if default else f"no{flag[1:]}"
        flags = f"{flag}/--no-{flag.lstrip('-')}"
        return click.option(flags, name, default=None, help=f"{help}  [default: {shown.lstrip('-')}]")
    if default is not None and not JobConfig.model_fields[name].is_required():
        help = f"{help}  [default: {default}]"
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    click_type = click.Choice(choices) if choices else _CLICK_TYPES[str if as_text else kind]
    return click.option(flag, name, type=click_type, default=None, metavar=metavar, help=help)


def _plain_type(annotation: Any) -> Any:
    """``int`` of ``int | None``; text of what the field tells apart itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [part for part in get_args(annotation) if part is not type(None)]
        return kinds[0] if len(kinds) == 1 else str
    return annotation


def _parse_maps(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    pairs = {}
    for value in values:
        theirs, equals, ours = value.rpartition("=")
        if not (theirs and equals):
            raise click.BadParameter(
                f"{value!r} is not of the form theirs=ours, or theirs= to only carry the column", ctx, param
            )
        pairs[theirs] = ours
    return pairs or None


def together(*decorators: Decorator) -> Decorator:
    """Applies decorators so that their options are listed in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def manifest_options(command: Command) -> Command:
    """``MANIFEST...``, ``--job``, and how the manifest is read."""
    return together(
        click.argument("manifests", nargs=-1, metavar="MANIFEST..."),
        click.option(
            "--job",
            "job_file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="YAML file with any of these options; a flag wins. Paths in it are relative to the "
            "current directory.",
        ),
        click.option(
            "--map",
            "map",
            multiple=True,
            callback=_parse_maps,
            metavar="THEIRS=OURS",
            help="Read the manifest's column THEIRS as OURS, or with THEIRS= only carry it; repeatable.",
        ),
        job_option("--limit", "Use the first N rows only.", metavar="N"),
    )(command)


def model_options(command: Command) -> Command:
    """Which model."""
    return together(
        job_option(
            "--model",
            "Folder or hub id of a diffusers checkpoint, or a name that `offdiff models` lists.",
            metavar="M",
        ),
        job_option("--revision", "Revision of a hub model.", metavar="REV"),
    )(command)


def row_options(command: Command) -> Command:
    """What rows that are silent take."""
    return together(
        job_option("--height", "Height of rows without one, in pixels.", metavar="PIXELS"),
        job_option("--width", "Width of rows without one, in pixels.", metavar="PIXELS"),
        job_option("--num-inference-steps", "Denoise steps of rows without a count.", metavar="N"),
        job_option("--true-cfg-scale", "Classic guidance scale of rows without one.", metavar="SCALE"),
        job_option(
            "--guidance-scale",
            "Guidance scale of rows without one, for models whose pipeline has it.",
            metavar="SCALE",
        ),
        job_option("--negative-prompt", "Negative prompt of rows without one.", metavar="TEXT"),
        job_option("--on-bad-size", "What to do with sizes the model cannot draw."),
    )(command)


def budget_options(command: Command) -> Command:
    """How much shares a step."""
    return together(
        job_option("--max-num-seqs", "Most images in a step.", metavar="N"),
        job_option(
            "--max-num-batched-tokens",
            "Token budget of a step.  [default: what `run` measures at start; on a CPU "
            f"{DEFAULT_MAX_NUM_BATCHED_TOKENS}]",
            metavar="N",
        ),
    )(command)


def shard_options(command: Command) -> Command:
    """How rows fall into shards and files."""
    return together(
        job_option("--shard-size", "Rows of an output shard.", metavar="ROWS"),
        job_option("--image-format", "Encoding of the images."),
    )(command)


def schedule_options(command: Command) -> Command:
    """Who shares a step."""
    return together(
        job_option(
            "--step-execution",
            "Requests join and leave between steps; off, they run in waves (request mode).",
        ),
        job_option(
            "--batching",
            "Who may share a step: packed: anyone; same_shape: images of one size, guidance and adapter; "
            "auto: the best that the model can do. See `offdiff models`.",
        ),
        job_option(
            "--scheduling-policy",
            "Who goes first: fifo is in order; pack fills steps; shortest is the least work, by and by also "
            "who has waited long; deadline is the earliest (Python and replay).",
        ),
    )(command)


def compute_options(command: Command) -> Command:
    """On what and in which numbers."""
    return together(
        job_option(
            "--quantization",
            "Eight bits for the blocks' products: faster, half the weight memory. fp8 from compute "
            "capability 8.9, int8 from 8.0; on a CPU either is only imitated, to try it.",
        ),
        job_option("--dtype", "Type to compute in; auto: bfloat16 on a GPU, float32 on a CPU."),
        job_option("--device", "auto, cpu, cuda or cuda:N.", metavar="DEVICE"),
    )(command)


def gather_values(
    given: dict[str, Any], *, environ: Mapping[str, str] = os.environ
) -> tuple[dict[str, Any], dict[str, str]]:
    """Joins the flags, the job file and Slurm's array variables; the first that speaks wins.

    Args:
        given: Parameters of a command as click has them; ``job_file`` names the job file.
        environ: Where Slurm's variables are looked up.

    Returns:
        Option values, and how the user spells each of them.

    Raises:
        ConfigError: The job file cannot be read or has unknown options, or the task cannot be told.
    """
    spelling = {name: f"--{name.replace('_', '-')}" for name in JobConfig.model_fields}
    spelling["manifests"] = "MANIFEST..."
    values: dict[str, Any] = {}
    if (job_file := given.get("job_file")) is not None:
        values = {name: value for name, value in read_job_file(job_file).items() if value is not None}
        check_option_names(values, source=f"job file {job_file}")
        spelling |= {name: f"job file {job_file}: {name}" for name in values}
    if given.get("image_format") not in (None, values.get("image_format", IMAGE_FORMAT)):
        values.pop("image_level", None)  # it is a level of the file's format
    for name, value in given.items():
        if name in JobConfig.model_fields and value not in (None, ()):
            file_map = values.get("map")
            joined = {**file_map, **value} if name == "map" and isinstance(file_map, dict) else value
            values[name] = joined
            spelling[name] = "MANIFEST..." if name == "manifests" else f"--{name.replace('_', '-')}"
    if "task_index" in given:
        task = {} if "task_index" in values else slurm_task(environ, values.get("num_tasks"))
        values |= task
        spelling |= dict.fromkeys(task, SLURM_ARRAY)
        _check_task(values)
    return values, spelling


def _check_task(values: Mapping[str, Any]) -> None:
    """Refuses half of a task: every element of a home-made array would do the work of the first."""
    if "task_index" in values and "num_tasks" not in values:
        given, missing = "task_index", "--num-tasks"
    elif "task_index" not in values and values.get("num_tasks") not in (None, 1):
        given, missing = "num_tasks", "--task-index"
    else:
        return
    raise ConfigError(
        f"--{given.replace('_', '-')} {values[given]} without {missing}: which task this is cannot be told",
        hint="give both; in a Slurm array neither is needed",
    )


def build_config(given: dict[str, Any], *, environ: Mapping[str, str] = os.environ) -> JobConfig:
    """The job that flags, job file and Slurm's variables describe together.

    Raises:
        ConfigError: A value is not allowed, or the manifest or the output folder is missing.
    """
    values, spelling = gather_values(given, environ=environ)
    return make_job_config(values, spelling=spelling)


def build_model(given: dict[str, Any]) -> tuple[str, str | None]:
    """The model and its revision, for commands that need no more of a job."""
    return given["model"] or DEFAULT_MODEL, given["revision"]


def slurm_time_left(environ: Mapping[str, str], *, now: float) -> float | None:
    """Seconds until Slurm ends this job, as it said when it started it; None where it did not say.

    Args:
        environ: Holds Slurm's variables.
        now: Seconds since the epoch.
    """
    end = environ.get("SLURM_JOB_END_TIME", "")
    # An end that has passed is not true any more: the job's time was extended.
    return float(end) - now if end.isdecimal() and float(end) > now else None


def slurm_task(environ: Mapping[str, str], num_tasks: int | None) -> dict[str, int]:
    """``num_tasks`` and ``task_index`` of a Slurm array element; empty outside an array.

    They only say with which shards a task begins, so any array will do: one with gaps, a part of an
    earlier one, one of another length. Elements that come to one index share its shards.

    Args:
        environ: Holds Slurm's variables.
        num_tasks: What the user asked for, if anything.
    """
    names = ("SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN")
    if any(not environ.get(name, "").isdecimal() for name in names):
        return {}
    count, task_id, first = (int(environ[name]) for name in names)
    count = num_tasks or count
    position = (task_id - first) // int(environ.get("SLURM_ARRAY_TASK_STEP") or 1)
    return {"num_tasks": count, "task_index": position % count}
