"""A job as a Slurm array: the batch script, and its submission. Free of torch.

Every element of the array runs the same ``offdiff run --job FILE`` and takes shards of the one output
folder, so an array of any length, submitted any number of times, goes on with what is left.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from offline_diffusion.config import Options
from offline_diffusion.data.layout import STATE
from offline_diffusion.errors import JobError

LOGS = f"{STATE}/logs"
"""Where in the output folder the tasks' logs go, unless told otherwise."""

MAX_LEAD_S = 120
"""How long before its time limit Slurm tells a task, at most: enough to save what it has in hand."""

LEAD_SHARE = 4
"""A short limit is told of in its last quarter: 120 s before its end could be at its start."""

MAX_REQUEUES = 100
"""A task that goes back to the queue more often than this is not getting on."""

_NO_LINE = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
"""Control characters and line ends of every kind."""


def _one_line(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    if _NO_LINE.search(text):
        raise ValueError("must be one line without control characters")
    return text


def _one_line_path(path: Path) -> Path:
    _one_line(str(path))
    return path


def _words(text: str) -> str:
    shlex.split(text)  # a ValueError says which quote is open
    return text


def time_limit_s(time: str) -> int:
    """Seconds of a time limit as Slurm spells it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        ValueError: It is none of these, or zero.
    """
    seconds = 0
    if re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time, re.ASCII):
        days, dash, clock = time.rpartition("-")
        numbers = [int(number) for number in clock.split(":")]
        units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
        seconds = int(days or 0) * 86_400 + sum(n * unit for n, unit in zip(numbers, units, strict=False))
    if not seconds:
        raise ValueError("must be minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS, and not zero")
    return seconds


def _time_limit(time: str) -> str:
    time_limit_s(time)
    return time


Line = Annotated[str, AfterValidator(_one_line)]
LinePath = Annotated[Path, AfterValidator(_one_line_path)]
Count = Annotated[int, Field(ge=1)]


class SlurmArray(Options):
    """What is asked of Slurm for a job; names without a word here are those of ``sbatch``'s options.

    Args:
        job_file: The job file, as tasks find it from the folder in which ``sbatch`` is run.
        logs: Where the tasks' logs go. Slurm makes no folder: it must be there when a task starts.
        array: Number of tasks.
        max_parallel: How many of them run at once, at most.
        setup: Lines of shell to run before, such as the activation of an environment.
        container: A command to run ``offdiff`` in, as words of a shell.
    """

    job_file: LinePath
    logs: LinePath
    array: Count
    max_parallel: Count | None = None
    job_name: Line
    time: Annotated[str, AfterValidator(_time_limit)] | None = None
    partition: Line | None = None
    account: Line | None = None
    cpus_per_task: Count | None = None
    gpus_per_task: Count | None = None
    gres: Line | None = None
    mem: Line | None = None
    setup: tuple[Line, ...] = ()
    container: Annotated[Line, AfterValidator(_words)] | None = None

    @property
    def lead_s(self) -> int:
        """How long before its time limit a task is told, in seconds."""
        return min(MAX_LEAD_S, time_limit_s(self.time) // LEAD_SHARE) if self.time else MAX_LEAD_S


def render_script(array: SlurmArray) -> str:
    """The batch script: directives for ``sbatch``, then a short program for bash."""
    container = shlex.split(array.container or "")
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH --{option}" for option in _directives(array)),
        setup="".join(f"{line}\n" for line in array.setup) + "\n" * bool(array.setup),
        command=shlex.join([*container, "offdiff", "run", "--job", str(array.job_file)]),
        max_requeues=MAX_REQUEUES,
    )


def _directives(array: SlurmArray) -> list[str]:
    at_once = f"%{array.max_parallel}" if array.max_parallel else ""
    log = str(array.logs).replace("%", "%%") + "/%A_%a.log"  # for Slurm % begins a pattern
    asked = ("time", "partition", "account", "cpus_per_task", "gpus_per_task", "gres", "mem")
    values = {name.replace("_", "-"): getattr(array, name) for name in asked}
    return [
        f"job-name={_directive_word(array.job_name)}",
        f"array=0-{array.array - 1}{at_once}",
        f"output={_directive_word(log)}",
        "open-mode=append",
        "requeue",
        f"signal=B:USR1@{array.lead_s}",
        "nodes=1",
        "ntasks=1",
        *(f"{name}={_directive_word(str(value))}" for name, value in values.items() if value is not None),
    ]


def _directive_word(value: str) -> str:
    """``value`` as one word of an ``#SBATCH`` line.

    sbatch reads these lines itself: it expands nothing, but a backslash escapes, in quotes of either kind.
    """
    if re.fullmatch(r"[\w./:,=%@+-]+", value, re.ASCII):
        return value
    return '"' + re.sub(r'([\\"])', r"\\\1", value) + '"'


_SCRIPT = """\
#!/usr/bin/env bash
{directives}

# Written by `offdiff submit slurm`. Run sbatch in the folder that the relative paths start from. Another
# submission, with any --array, goes on with what is left.

{setup}task=${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}

# Older versions of Slurm do not tell a task when its time is up.
if [ -z "${{SLURM_JOB_END_TIME:-}}" ]; then
    end=$(SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$task" --format=%e 2> /dev/null)
    [[ $end =~ ^[0-9]+$ ]] && export SLURM_JOB_END_TIME=$end
fi

# Near the time limit Slurm signals this shell alone; to cancel or preempt, every process.
trap 'kill -USR1 $!' USR1
trap : TERM
{command} &
worker=$!
wait "$worker"
while kill -0 "$worker" 2> /dev/null; do wait "$worker"; done # a signal ends a wait early
wait "$worker"
code=$?

# 75: stopped in good order, with work left. This task alone goes back to the queue, unless Slurm is
# ending it: a cancelled task must not come back, a preempted one is requeued already.
if [ "$code" -eq 75 ] && [ "$(squeue --noheader --jobs="$task" --format=%T)" = RUNNING ]; then
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_requeues} ] && scontrol requeue "$task"; then
        exit 75
    fi
fi
[ "$code" -eq 75 ] && echo "task $task: work is left; unless Slurm starts it again, submit again" >&2
exit "$code"
"""


def submit_script(script: str) -> str:
    """Hands a script to ``sbatch``; the tasks run in the current directory.

    Returns:
        The array's job id.

    Raises:
        JobError: There is no ``sbatch`` here, or it refuses the script.
    """
    command = ["sbatch", "--parsable"]
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise JobError(
            "there is no sbatch on this machine",
            hint="write the script with -o job.sbatch, and run `sbatch job.sbatch` where Slurm is",
        ) from None
    if done.returncode:
        raise JobError(f"sbatch refused the script: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # the cluster's name may follow
