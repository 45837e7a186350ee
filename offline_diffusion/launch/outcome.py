"""What becomes of a job of several workers: who is tried again after a death, and what the whole came to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar

from offline_diffusion import errors as every_error
from offline_diffusion.config import JobConfig
from offline_diffusion.data.deaths import give_cause, record_death, tells_of_drawn
from offline_diffusion.data.files import read_json
from offline_diffusion.data.layout import DEATHS, FLIGHTS
from offline_diffusion.data.quick_check import find_broken
from offline_diffusion.data.sources import STDIN
from offline_diffusion.data.status import status_of
from offline_diffusion.errors import (
    CrashError,
    JobError,
    JobInterrupted,
    OffdiffError,
    TooManyFailuresError,
    UsageError,
)
from offline_diffusion.preparation import ledger_of

MAX_RESTARTS = 3
"""Deaths of a worker in a row without an image after which it is not started again; a death that convicts an
image does not count."""

MAX_CONVICTED = 16
"""Images that a worker convicts in a row without drawing one; after so many its device is at fault."""

MAX_DEATHS = 50
"""Deaths of a worker in one run after which it is not started again, whatever it drew between them; those
that convict an image do not count. Each costs the loading of the model."""

IsFinished = Callable[[], bool]


class WorkerError(TypedDict):
    """Why a worker could not go on; ``kind`` is the name of the error's class."""

    kind: str
    exit_code: int
    message: str
    hint: str | None


def error_of(error: OffdiffError) -> WorkerError:
    """An error as it is told by a worker's process.

    Raises:
        SystemExit: It is a crash. A process whose engine is broken is of no use to anybody: it ends, as by a
            fatal signal, and whoever started it goes by that.
    """
    if isinstance(error, CrashError):
        raise SystemExit(str(error))
    return WorkerError(
        kind=type(error).__name__, exit_code=error.exit_code, message=error.message, hint=error.hint
    )


def error_from(told: WorkerError) -> OffdiffError:
    """The error that a worker's process told of."""
    kind = getattr(every_error, told["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, OffdiffError)):
        kind = JobError
    return kind(told["message"], hint=told["hint"])


class LastWords(NamedTuple):
    """What a life that ended in a death left: whether it drew an image, and whether it crashed with one image
    alone in flight, which is not drawn again or not much longer."""

    has_drawn: bool
    has_convicted: bool


def last_words(out: Path, host: str, pid: int, cause: str = "") -> LastWords:
    """What a dead process left in the output folder, written before each image, so nothing is missing.

    Args:
        out: The output folder.
        host, pid: Of the process.
        cause: Of its death, where that is known to be a crash though it left no trace.
    """
    start = re.sub(r"[^\w.-]", "_", f"{host}:{pid}:")
    has_drawn = False
    for log in (out / FLIGHTS).glob(f"{start}*.log"):
        try:
            has_drawn |= tells_of_drawn(log.read_bytes().splitlines())
        except FileNotFoundError:  # whoever takes its shard over is quicker
            continue
        with contextlib.suppress(
            OSError, JobError
        ):  # of a disk that is full; whoever comes later tries again
            record_death(out, log.stem)
    records = list((out / DEATHS).glob(f"{start}*.json"))
    for record in records if cause else ():
        give_cause(out, record, cause)
    told = [_words_of(record) for record in records]
    return LastWords(has_drawn or any(each[0] for each in told), any(each[1] for each in told))


def _words_of(record: Path) -> LastWords:
    try:
        death: dict[str, Any] = read_json(record)
        is_conviction = bool(death["crash"]) and len(death["in_flight"]) == 1
        return LastWords(bool(death.get("has_drawn")), is_conviction)
    except (OSError, KeyError, TypeError, JobError):
        return LastWords(False, False)


@dataclass(eq=False, kw_only=True)
class Record:
    """How a worker has fared over its lives.

    Args:
        name: For people.
        summaries: Of lives that ended in good order.
        error: Why it could not go on, or was given up.
        num_deaths, num_convicted: In a row without an image drawn.
        num_unexplained: Deaths of all its lives, but for those that convicted an image.
    """

    name: str
    summaries: list[dict[str, Any]] = field(default_factory=list)
    error: WorkerError | None = None
    is_given_up: bool = False
    num_deaths: int = 0
    num_convicted: int = 0
    num_unexplained: int = 0

    @property
    def has_done_all(self) -> bool:
        """Whether it ended in good order because nothing was left for it."""
        return self.error is None and bool(self.summaries) and not self.summaries[-1]["interrupted"]

    def may_live_again(self, words: LastWords) -> bool:
        """Counts a death; False when there were too many, in a row without an image or at all."""
        if words.has_drawn:
            self.num_deaths = self.num_convicted = 0
        self.num_deaths += 1
        self.num_convicted += words.has_convicted
        self.num_unexplained += not words.has_convicted
        is_stuck = self.num_deaths - self.num_convicted > MAX_RESTARTS or self.num_convicted > MAX_CONVICTED
        return not is_stuck and self.num_unexplained < MAX_DEATHS

    @property
    def how_often(self) -> str:
        """How often it has died, in the words of the bound that it came to."""
        if self.num_unexplained >= MAX_DEATHS:
            return f"{self.num_unexplained} times in this run"
        return f"{self.num_deaths} times without an image"

    def give_up(self, how: str) -> str:
        """After a death too many; returns its error's message."""
        self.is_given_up = True
        message = f"{self.name} died of {how}, {self.how_often}: given up"
        self.error = WorkerError(
            kind="JobError",
            exit_code=JobError.exit_code,
            message=message,
            hint="what is finished is kept, the same command goes on",
        )
        return message


RecordT = TypeVar("RecordT", bound=Record)


def helper_of(records: Sequence[RecordT]) -> RecordT | None:
    """Who can do what those that were given up left; None where nobody was, or nobody can."""
    if not any(record.is_given_up for record in records) or too_many_failures(records) is not None:
        return None
    return next((record for record in records if record.has_done_all), None)


def forgive(records: Iterable[Record]) -> None:
    """Once another one did what those that were given up left."""
    for record in records:
        if record.is_given_up:
            record.error = None


def too_many_failures(records: Iterable[Record]) -> WorkerError | None:
    """The error that ends a job whatever the other workers do."""
    errors = (record.error for record in records if record.error is not None)
    return next((error for error in errors if error["kind"] == TooManyFailuresError.__name__), None)


def summaries_of(
    records: Sequence[Record], *, is_finished: bool, why_stopped: str | None
) -> list[dict[str, Any]]:
    """The summaries of workers of which none is left.

    Args:
        records: Of all workers.
        is_finished: Whether every shard is published.
        why_stopped: If the workers were asked to stop.

    Raises:
        TooManyFailuresError: One of them came to ``--max-failures``.
        JobError: Shards are left that a worker could not do.
        JobInterrupted: Likewise, but the same command may be able to; or they stopped before they began.
    """
    if (error := too_many_failures(records)) is not None:
        raise TooManyFailuresError(error["message"], hint=error["hint"])
    summaries = [summary for record in records for summary in record.summaries]
    errors = [] if is_finished else [record.error for record in records if record.error is not None]
    if errors:
        worst = next((each for each in errors if each["exit_code"] != JobInterrupted.exit_code), errors[0])
        is_final = worst["exit_code"] != JobInterrupted.exit_code
        raise (JobError if is_final else JobInterrupted)(worst["message"], hint=worst["hint"])
    if why_stopped is not None and not summaries and not is_finished:
        raise JobInterrupted(
            f"{why_stopped}: no worker came to an end of its own", hint="the same command goes on"
        )
    return summaries


def folder_is_finished(config: JobConfig) -> bool:
    """Whether every shard is published and whole; False under ``--retry-failed``: there it tells nothing."""
    if config.retry_failed:
        return False
    try:
        ledger = ledger_of(config, give_up_after_s=0.0)
        ledger.pull(signs=False)
        return status_of(ledger).finished and not find_broken(ledger, ledger.shards)
    except (OSError, JobError, JobInterrupted):  # a disk that fails tells nothing
        return False


def refuse_standard_input(config: JobConfig, option: str) -> None:
    """Raises `UsageError` when the manifest is standard input, which several workers cannot share."""
    if STDIN in config.manifests:
        raise UsageError(
            f"{option}: the manifest cannot be '-', standard input, which workers cannot share",
            hint="write it to a file, and name that",
        )
