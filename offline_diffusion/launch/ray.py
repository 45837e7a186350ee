"""A job on a Ray cluster: workers are tasks that draw shards from the folder's one queue.

Ray places them, one a GPU, waits for machines that come later, and starts a task again whose process or node
is lost. A task that starts when nothing is left ends at once, so there may be more of them than GPUs.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from offline_diffusion.config import JobConfig, make_job_config
from offline_diffusion.errors import BackendError, JobError, JobInterrupted, OffdiffError
from offline_diffusion.launch.local import MAX_RESTARTS, joined, parts_of
from offline_diffusion.progress import Observer, Progress, Say, StopFlag
from offline_diffusion.summary import JobSummary, summary_of_workers

if TYPE_CHECKING:
    from types import ModuleType

POLL_S = 1.0

MAX_WORKERS = 256
"""Tasks that are submitted; those that find no GPU free wait for one."""


class Board:
    """What workers tell and are told; an actor."""

    def __init__(self) -> None:
        self._progress: dict[int, dict[str, Any]] = {}
        self._lines: list[str] = []
        self._stops: list[str] = []

    def report(self, worker: int, progress: dict[str, Any] | None, lines: Sequence[str]) -> list[str]:
        """A worker's news; returns the requests to stop so far."""
        if progress is not None:
            self._progress[worker] = progress
        self._lines += (f"worker {worker}: {line}" for line in lines)
        return self._stops

    def read(self, stops: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
        """For the driver: every worker's progress and the lines since last time."""
        self._stops = list(stops)
        lines, self._lines = self._lines, []
        return list(self._progress.values()), lines


def load_ray() -> ModuleType:
    """The library.

    Raises:
        BackendError: It is not installed.
    """
    try:
        import ray
    except ImportError:
        raise BackendError(
            "--launcher ray needs the package ray, which is not installed",
            hint="pip install 'offline-diffusion[ray]'",
        ) from None
    module: ModuleType = ray
    return module


def run_on_ray(config: JobConfig, *, observer: Observer, say: Say, stop: StopFlag) -> JobSummary:
    """Runs a job on the cluster that ``RAY_ADDRESS`` names, else on one of this machine's own.

    As many workers run at a time as there are GPUs, or CPUs for a job on CPUs.

    Args:
        config: The job; its output folder must be one that every node sees.
        observer, say, stop: As of `job.run_task`, for all workers together.

    Raises:
        BackendError: Ray is not installed.
        JobError: No worker could go on.
        JobInterrupted: Asked to stop before any of them had begun.
    """
    from offline_diffusion.job import prepare_job

    ray = load_ray()
    started = time.monotonic()
    own = config.model_copy(update={"launcher": "local"})
    index = prepare_job(own, observer=observer, stop=stop, say=say)
    num_workers = min(MAX_WORKERS, max(1, -(-index.num_rows // config.shard_size)))
    parts = _run_workers(ray, own, num_workers, observer, say, stop)
    return summary_of_workers(config.out, index.num_images, parts, time.monotonic() - started)


def _run_workers(
    ray: Any, config: JobConfig, num_workers: int, observer: Observer, say: Say, stop: StopFlag
) -> list[dict[str, Any]]:
    with _cluster(ray):
        resources = {"num_gpus": 1} if _on_gpu(ray, config) else {"num_cpus": 1}
        board = ray.remote(num_cpus=0)(Board).remote()
        task = ray.remote(max_retries=MAX_RESTARTS, **resources)(_work)
        options = [part.model_dump(mode="json", exclude_none=True) for part in parts_of(config, num_workers)]
        pending = [task.remote(part, number, board) for number, part in enumerate(options)]
        outcomes = []
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
            progress, lines = ray.get(board.read.remote([stop.why] * stop.requests))
            for line in lines:
                say(line)
            if progress:
                observer(joined([Progress(**each) for each in progress]))
            outcomes += [_outcome(ray, each, say) for each in done]
    return summaries_of(outcomes)


def summaries_of(outcomes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The summaries among what workers handed in; an error only where there is none."""
    summaries = [outcome["summary"] for outcome in outcomes if "summary" in outcome]
    if summaries:
        return summaries
    error = next(outcome["error"] for outcome in outcomes)
    kind = JobInterrupted if error["exit_code"] == JobInterrupted.exit_code else JobError
    raise kind(error["message"], hint=error["hint"])


@contextmanager
def _cluster(ray: Any) -> Iterator[None]:
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    try:
        yield
    finally:
        if is_ours:
            ray.shutdown()


def _on_gpu(ray: Any, config: JobConfig) -> bool:
    if config.device == "auto":
        return float(ray.cluster_resources().get("GPU", 0)) > 0
    return config.device.startswith("cuda")


def _outcome(ray: Any, reference: Any, say: Say) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = ray.get(reference)
    except ray.exceptions.RayError as error:  # its process or node was lost too often
        first = str(error).strip().splitlines()[0]
        outcome = {"error": {"exit_code": 1, "message": f"a worker was lost: {first}", "hint": None}}
    if "error" in outcome and outcome["error"]["exit_code"] != JobInterrupted.exit_code:
        say(f"a worker cannot go on: {outcome['error']['message']}")
    return outcome


def _work(options: dict[str, Any], number: int, board: Any) -> dict[str, Any]:
    """The task: what is left of the job, as far as nobody else works on it."""
    from offline_diffusion.job import run_task

    stop = StopFlag()
    with _reporting(number, board, stop) as reporter:
        try:
            config = make_job_config(options)
            summary = run_task(
                config,
                observer=reporter.observe,
                stop=stop,
                say=reporter.lines.append,
                own_process=True,
                is_part=True,
            )
        except OffdiffError as error:
            return {
                "error": {"exit_code": error.exit_code, "message": error.message, "hint": error.hint},
            }
    return {"summary": dataclasses.asdict(summary)}


class _Reporter:
    """What a worker has to say to the board since last time."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._progress: Progress | None = None

    def observe(self, progress: Progress) -> None:
        self._progress = progress

    def news(self) -> tuple[dict[str, Any] | None, list[str]]:
        lines, self.lines[:] = list(self.lines), []
        return None if self._progress is None else dataclasses.asdict(self._progress), lines


@contextmanager
def _reporting(number: int, board: Any, stop: StopFlag) -> Iterator[_Reporter]:
    """Inside, tells the board every second and hears of stops there."""
    ray = load_ray()
    reporter, ended = _Reporter(), threading.Event()

    def report() -> None:
        stops = ray.get(board.report.remote(number, *reporter.news()))
        for why in stops[stop.requests :]:
            stop.request(why)

    def keep_reporting() -> None:
        while not ended.wait(POLL_S):
            report()

    thread = threading.Thread(target=keep_reporting, daemon=True)
    thread.start()
    try:
        yield reporter
    finally:
        ended.set()
        thread.join()
        report()
