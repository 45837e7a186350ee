"""Every error a user can meet.

::

    OffdiffError                  what a user is told: message, then an optional ``hint:``
    ├── UsageError                exit 2: an option, a job file or an argument is wrong
    │   └── ConfigError           an option's or a job file's value
    ├── ManifestError             exit 1: a fault of a whole file (a faulty row is data: ``RowFault``)
    ├── TraceError                exit 1: a trace of traffic cannot be replayed
    ├── ModelError                exit 1: a checkpoint cannot be loaded
    │   └── UnsupportedModelError the checkpoint's config turns on what this version lacks
    ├── BackendError              exit 1: an attention or quantization backend does not work here
    ├── QueueFullError            a running engine has as many requests at hand as it may
    ├── JobError                  exit 1: the output folder or the job cannot go on
    │   ├── JobMismatchError      the folder belongs to another manifest, model or pixel option
    │   ├── CrashError            drawing broke the engine or its device; a launcher starts the worker again
    │   ├── DiskFullError         no space, or the quota is used up; a running job waits for some first
    │   └── TooManyFailuresError  ``--max-failures`` was reached
    └── JobInterrupted            exit 75: stopped in good order, the same command goes on

A row's failure is never raised: it is recorded, and its neighbours go on.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OffdiffError(Exception):
    """Base of all errors shown to users.

    Args:
        message: What is wrong, which file or option, and the allowed values.
        hint: What the user can do, shown on a line of its own after ``hint:``.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(OffdiffError):
    """The command was called wrongly."""

    exit_code = 2


class ConfigError(UsageError):
    """A value of an option or of a job file is not allowed."""


class ManifestError(OffdiffError):
    """A manifest file as a whole cannot be used."""


class TraceError(OffdiffError):
    """A trace of traffic cannot be replayed."""


class ModelError(OffdiffError):
    """A checkpoint cannot be loaded."""


class UnsupportedModelError(ModelError):
    """A checkpoint's config turns on something this version does not support."""


class BackendError(OffdiffError):
    """A backend that was asked for does not work on this machine."""


class QueueFullError(OffdiffError):
    """A running engine has as many requests at hand as it may, and none finished in time."""


class JobError(OffdiffError):
    """The job cannot start or go on."""


class JobMismatchError(JobError):
    """The output folder holds another job."""


class CrashError(JobError):
    """Drawing has broken the engine or its device: this process is of no more use, another one may go on."""


class DiskFullError(JobError):
    """There is no space left to write to."""


class TooManyFailuresError(JobError):
    """More rows failed than ``--max-failures`` allows."""


class JobInterrupted(OffdiffError):
    """The job stopped in good order before it was finished."""

    exit_code = 75


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to ``name``, or None when nothing is close."""
    matches = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.72)
    return matches[0] if matches else None
