"""Which failures ``--retry-failed`` makes again: those that were there when the command was given.

A command may have many workers, some of which start when others are done: Ray's tasks, the later lives of
``--devices``, tasks of an array that come late or back from the queue. What still fails must not be tried
by each of them again. So the numbers of the publications are noted when the command begins, and a shard is
retried only while its newest one has the number noted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from offline_diffusion.data.files import to_json
from offline_diffusion.data.layout import STATE
from offline_diffusion.data.state_files import StateFiles
from offline_diffusion.errors import JobError

_TOLD = f"{STATE}/retry.json"

SLURM_ARRAY_JOB = "SLURM_ARRAY_JOB_ID"
"""Names the submission in the environment of an array's tasks; a requeued one keeps it."""

MAX_KEPT_NOTES = 4
"""Submissions of arrays whose tasks may still come."""


def numbers_at_begin(
    files: StateFiles, numbers: Mapping[int, int], environ: Mapping[str, str]
) -> dict[int, int]:
    """The numbers to go by for a command that begins now.

    A task of a Slurm array belongs to the command that submitted it: the first task of all notes the
    numbers in ``_state/retry.slurm-<array's job>.json``. More tasks may come at any time: see
    `drop_old_notes`.

    Args:
        files: What the workers share.
        numbers: Of each published shard's newest publication, by the shard's index.
        environ: The process's environment.

    Raises:
        DiskFullError: There is no space.
        JobError: The folder cannot be written, or the note is damaged.
    """
    job = environ.get(SLURM_ARRAY_JOB, "")
    if not job.isalnum():
        return dict(numbers)
    path = f"{STATE}/retry.slurm-{job}.json"
    files.create(path, _to_json(numbers))
    try:
        return _read(files, path)
    except FileNotFoundError:  # dropped at once: nothing fails any more
        return dict(numbers)


def drop_old_notes(out: Path, has_failures: Callable[[], bool]) -> None:
    """Drops the notes of Slurm arrays that no task will need any more, once a job is complete.

    While something fails, tasks of an array may come late, so the newest few stay.

    Args:
        out: The output folder.
        has_failures: Whether any published shard has; asked only where there are notes.
    """
    with contextlib.suppress(OSError):
        notes = sorted((path.stat().st_mtime_ns, path) for path in (out / STATE).glob("retry.slurm-*.json"))
        num_kept = MAX_KEPT_NOTES if notes and has_failures() else 0
        for _, path in notes[: max(0, len(notes) - num_kept)]:
            path.unlink(missing_ok=True)


def tell_workers(files: StateFiles, numbers: Mapping[int, int]) -> None:
    """Notes the numbers for the workers of a command, before the first of them starts.

    Raises:
        DiskFullError: There is no space.
        JobError: The folder cannot be written.
    """
    files.replace(_TOLD, _to_json(numbers))


def told_to_workers(files: StateFiles) -> dict[int, int]:
    """What `tell_workers` noted last.

    Raises:
        JobError: The note is damaged or gone.
    """
    try:
        return _read(files, _TOLD)
    except FileNotFoundError:
        raise JobError(f"{_TOLD} is gone", hint="give the command again") from None


def _to_json(numbers: Mapping[int, int]) -> bytes:
    return to_json({"numbers": {str(index): number for index, number in numbers.items()}})


def _read(files: StateFiles, path: str) -> dict[int, int]:
    values = files.read(path)
    try:
        return {int(index): int(number) for index, number in values["numbers"].items()}
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise JobError(f"{path} is damaged: {error}", hint="give the command again") from None
