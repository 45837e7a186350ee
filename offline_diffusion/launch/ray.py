"""A job on a Ray cluster: workers are tasks that draw shards from the folder's one queue.

The driver draws nothing and needs no GPU: what depends on one is found out by a task, too. Ray places
tasks, one a GPU, and waits for machines that come later. Those whose process or node is lost are submitted
again by the driver, by the rules of `outcome`: Ray's own retries would not know who has drawn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline_diffusion.config import BUILT_IN_MODELS, JobConfig
from offline_diffusion.errors import JobInterrupted
from offline_diffusion.launch.local import joined, parts_of
from offline_diffusion.launch.outcome import (
    IsFinished,
    LastWords,
    Record,
    WorkerError,
    folder_is_finished,
    forgive,
    helper_of,
    last_words,
    refuse_standard_input,
    summaries_of,
    too_many_failures,
)
from offline_diffusion.launch.ray_cluster import Cluster, line_of
from offline_diffusion.launch.ray_task import (
    POLL_S,
    Board,
    Life,
    Place,
    load_ray,
    prepare,
    work,
)
from offline_diffusion.preparation import ledger_of
from offline_diffusion.progress import Observer, Progress, Say, StopFlag
from offline_diffusion.summary import JobSummary, summary_of_workers
from offline_diffusion.time_limit import REASON, TimeLimit

BOARD_TIMEOUT_S = 10.0
"""How long the driver waits for the board before it goes on without news."""

PREPARATION_RETRIES = 3
"""How often Ray tries again when the process or node of the preparation is lost."""


def run_on_ray(config: JobConfig, *, observer: Observer, say: Say, stop: StopFlag) -> JobSummary:
    """Runs a job on the cluster that ``RAY_ADDRESS`` names, else on one of this machine's own.

    As many workers run at a time as there are GPUs, or CPUs for a job on CPUs.

    Args:
        config: The job; manifest and output folder must be such that every node sees them.
        observer, say, stop: As of `job.run_task`, for all workers together.

    Raises:
        BackendError: Ray is not installed.
        UsageError: The manifest is standard input.
        JobError, JobInterrupted: See `summaries_of`.
        OffdiffError: As of `job.prepare_job`.
    """
    refuse_standard_input(config, "--launcher ray")
    ray = load_ray()
    started, limit = time.monotonic(), TimeLimit(config.time_limit)
    own = as_workers_see_it(config)
    with _cluster(ray):
        resources = {"num_gpus": 1} if _on_gpu(ray, own) else {"num_cpus": 1}
        board = _board(ray)
        cluster = Cluster(
            ray=ray,
            read_board=lambda *news: ray.get(board.read.remote(*news), timeout=BOARD_TIMEOUT_S),
            observer=observer,
            say=say,
            stop=stop,
        )
        # Nothing is drawn twice by it, so here Ray may try again by itself.
        first = ray.remote(max_retries=PREPARATION_RETRIES, **resources)(prepare)
        with limit.stopping(stop):
            found = cluster.prepare(first.remote(_options_of(own), board))
        task = ray.remote(max_retries=0, **resources)(work)
        driver = Driver(
            own,
            cluster,
            submit=lambda options, life: task.remote(options, life, board),
            resource="GPU" if "num_gpus" in resources else "CPU",
            max_workers=max(1, -(-found["num_rows"] // own.shard_size)),
            started=started,
            is_finished=lambda: folder_is_finished(own),
        )
        parts = driver.run()
    seconds, stopped = time.monotonic() - started, driver.why_stopped is not None
    ledger = ledger_of(own)
    ledger.pull(signs=False)
    return summary_of_workers(ledger, found["num_images"], parts, seconds, stopped=stopped)


def as_workers_see_it(config: JobConfig) -> JobConfig:
    """With paths that name the same on every node, and the one GPU that Ray shows to a task."""
    model = os.path.expanduser(config.model)
    is_folder = model not in BUILT_IN_MODELS and os.path.isdir(model)
    return config.model_copy(
        update={
            "launcher": "local",
            "device": "cuda" if config.device.startswith("cuda") else config.device,
            "manifests": tuple(map(_absolute, config.manifests)),
            "out": Path(os.path.abspath(config.out)) if isinstance(config.out, Path) else config.out,
            "work_dir": config.work_dir and Path(os.path.abspath(config.work_dir)),
            "model": os.path.abspath(model) if is_folder else config.model,
        }
    )


def _options_of(config: JobConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_none=True)


def _absolute(source: str) -> str:
    is_url = "://" in source or "::" in source
    return source if is_url else os.path.abspath(os.path.expanduser(source))


def _board(ray: Any) -> Any:
    """On the driver's own node: a node that is lost takes the job along only if it is the driver's."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=here)(Board).remote()


@dataclass(eq=False, kw_only=True)
class Worker(Record):
    """A task over its lives; ``place`` and ``progress`` are of the last one, None before they are known."""

    number: int
    life: int = 0
    place: Place | None = None
    progress: Progress | None = None
    is_cancelled: bool = False

    def last_words(self, out: Path) -> LastWords:
        """What its last life left, once it has died."""
        words = LastWords(False, False) if self.place is None else last_words(out, *self.place)
        has_told = self.progress is not None and self.progress.has_drawn
        return words._replace(has_drawn=words.has_drawn or has_told)


class Driver:
    """Submits tasks until the job is finished or they can do no more.

    Args:
        config: The job.
        cluster: Where.
        submit: Submits a task with these options for a life, and returns its reference.
        resource: What a task takes one of: as many run at a time as the cluster has.
        max_workers: More would have nothing to do.
        started: When the job began, on the monotonic clock; its time limit counts from there.
        is_finished: Whether every shard is published.
    """

    def __init__(
        self,
        config: JobConfig,
        cluster: Cluster,
        *,
        submit: Callable[[dict[str, Any], Life], Any],
        resource: str,
        max_workers: int,
        started: float,
        is_finished: IsFinished,
    ) -> None:
        self._config, self._cluster, self._submit_task = config, cluster, submit
        self._ray, self._say, self._stop = cluster.ray, cluster.say, cluster.stop
        self._resource, self._max_workers, self._is_finished = resource, max_workers, is_finished
        self._deadline = None if config.time_limit is None else started + config.time_limit
        self._parts = parts_of(config, max(1, min(max_workers, self._num_slots())))
        self._pending: dict[Any, Worker] = {}
        self.workers: list[Worker] = []

    @property
    def why_stopped(self) -> str | None:
        """Why no worker may begin any more; None while they may."""
        if self._stop.requests:
            return self._stop.why
        left = self._seconds_left()
        return REASON if left is not None and left <= 0 else None

    def run(self) -> list[dict[str, Any]]:
        """Runs all workers to their ends, and one of them again for what others that kept dying left.

        Returns:
            The summaries of those that ended in good order.

        Raises:
            JobError, JobInterrupted: See `summaries_of`.
        """
        self._run()
        helper = None if self.why_stopped else helper_of(self.workers)
        if helper is not None and not self._is_finished():
            self._say(f"{helper.name} is submitted again for what others left")
            self._submit(helper)
            self._run()
            if helper.has_done_all:
                forgive(self.workers)
        why = self.why_stopped
        has_error = any(worker.error is not None for worker in self.workers)
        is_finished = (has_error or why is not None) and self._is_finished()
        return summaries_of(self.workers, is_finished=is_finished, why_stopped=why)

    def _run(self) -> None:
        while True:
            if self.why_stopped is None:
                self._submit_new_ones()
            if not self._pending:
                return
            references = list(self._pending)
            done, _ = self._ray.wait(references, num_returns=len(references), timeout=POLL_S)
            has_talked = self._talk()
            if has_talked and self.why_stopped is not None:  # who begins now hears of it from the board
                self._cancel_those_that_wait()
            for reference in done:
                self._on_end(self._pending.pop(reference), reference)

    def _num_slots(self) -> int:
        return int(self._ray.cluster_resources().get(self._resource, 0))

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    def _submit_new_ones(self) -> None:
        """As many workers as can run at a time, and one that waits for a machine that comes later."""
        while len(self.workers) < min(self._max_workers, self._num_slots() + 1):
            number = len(self.workers)
            self.workers.append(Worker(name=f"worker {number}", number=number))
            self._submit(self.workers[-1])

    def _submit(self, worker: Worker) -> None:
        worker.life += 1
        worker.place = worker.progress = None
        left = self._seconds_left()
        part = self._parts[worker.number % len(self._parts)].model_copy(
            update={"time_limit": None if left is None else max(1.0, left)}
        )
        self._pending[self._submit_task(_options_of(part), (worker.number, worker.life))] = worker

    def _talk(self) -> bool:
        """Hears of workers; False if the board is lost."""
        news = self._cluster.talk(self._seconds_left())
        if news is None:
            return False
        places, progress = news
        for worker in self.workers:
            life = worker.number, worker.life
            worker.place = places.get(life, worker.place)
            if life in progress:
                worker.progress = Progress(**progress[life])
        if known := [worker.progress for worker in self.workers if worker.progress is not None]:
            self._cluster.observer(joined(known))
        return True

    def _cancel_those_that_wait(self) -> None:
        for reference, worker in self._pending.items():
            if worker.place is None and not worker.is_cancelled:
                worker.is_cancelled = True
                self._ray.cancel(reference)

    def _on_end(self, worker: Worker, reference: Any) -> None:
        try:
            outcome = self._cluster.outcome_of(reference)
        except self._ray.exceptions.RayError as error:  # its process or node was lost
            self._on_death(worker, line_of(error, 0))
            return
        if "summary" in outcome:
            worker.summaries.append(outcome["summary"])
        elif "error" in outcome:
            self._on_error(worker, outcome["error"])

    def _on_error(self, worker: Worker, error: WorkerError) -> None:
        worker.error = error
        if error["exit_code"] != JobInterrupted.exit_code:
            self._say(f"{worker.name} cannot go on: {error['message']}")
        if too_many_failures(self.workers) is not None and not self._stop.requests:
            self._stop.request("--max-failures")

    def _on_death(self, worker: Worker, how: str) -> None:
        if self.why_stopped is not None:
            self._say(f"{worker.name} was lost: {how}")
        elif worker.may_live_again(worker.last_words(self._config.folder)):
            self._say(f"{worker.name} was lost: {how}: submitted again")
            self._submit(worker)
        else:
            worker.give_up(how)
            self._say(f"{worker.name} was lost {worker.how_often}: given up")


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
