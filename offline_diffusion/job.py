"""Runs one task of a job: shards of the manifest → engine → writer. The only place where they meet."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from offline_diffusion.config import JobConfig
from offline_diffusion.data.card import write_card
from offline_diffusion.data.deaths import FlightLog, forget_deaths, sweep_flights
from offline_diffusion.data.disk_full import Patience
from offline_diffusion.data.failures import FailuresElsewhere
from offline_diffusion.data.files import delete
from offline_diffusion.data.layout import PREVIEWS, PROFILE
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.plan import assign_shards
from offline_diffusion.data.previews import PreviewFolder
from offline_diffusion.data.process import new_worker_name
from offline_diffusion.data.quick_check import broken_lines, find_broken
from offline_diffusion.data.retries import drop_old_notes, numbers_at_begin, tell_workers, told_to_workers
from offline_diffusion.data.scan import ManifestIndex
from offline_diffusion.data.shard_queue import LOOK_INTERVAL_S, ShardQueue, claims_of
from offline_diffusion.data.sink import Sink
from offline_diffusion.draw_loop import DrawLoop
from offline_diffusion.engine.cost import MeasuredCost, measured_cost
from offline_diffusion.engine_watch import EngineWatch
from offline_diffusion.errors import CrashError, OffdiffError
from offline_diffusion.feed import Feed, row_defaults, unfinished_shards
from offline_diffusion.models.registry import Checkpoint
from offline_diffusion.preparation import Preparation, Prepared
from offline_diffusion.progress import Observer, Progress, Say, StopFlag, Tally, check_faults, plural
from offline_diffusion.pulse import Pulse, hung_line
from offline_diffusion.stages import NO_STAGES, Stages
from offline_diffusion.step_saver import StepSaver, latents_shape
from offline_diffusion.summary import JobSummary, summary_of_task
from offline_diffusion.time_limit import TimeLimit

if TYPE_CHECKING:
    from offline_diffusion.engine.engine import Engine
    from offline_diffusion.engine.profile import Profiler

__all__ = ["JobSummary", "Progress", "StopFlag", "row_defaults", "run_task"]

NUM_ENCODE_THREADS = min(8, os.cpu_count() or 1)

MakeEngine = Callable[[JobConfig, Checkpoint], "Engine"]


def run_task(
    config: JobConfig,
    *,
    observer: Observer | None = None,
    stop: StopFlag | None = None,
    say: Say | None = None,
    make_engine: MakeEngine | None = None,
    own_process: bool = False,
    is_part: bool = False,
    on_hung: Callable[[float], None] | None = None,
) -> JobSummary:
    """Runs what is left of one task's share, then helps with what nobody works on.

    Args:
        config: The job.
        observer: Called a few times a second.
        stop: Ask for a stop through it, from any thread or signal handler.
        say: Called with lines for the user.
        make_engine: Replaces the loading of the model.
        own_process: This process does nothing else: the traceback of a crash goes to the output folder, where
            the next run finds it.
        is_part: Of a command that began with `prepare_job`.
        on_hung: Called with its seconds when the engine hangs in a step, see `pulse`; None says it.

    Raises:
        JobInterrupted: Asked to stop before the manifest was read through.
        CrashError: The engine is broken; see `engine_watch`.
        OffdiffError: The job cannot start or go on; what is finished is durable.
    """
    stop, say, make_engine = stop or StopFlag(), say or _ignore, make_engine or _load_engine
    task = _Task(config, observer or _ignore, stop, say, make_engine, own_process, is_part, on_hung)
    with task.time_limit.stopping(task.stop):
        return _run_profiled(task) if config.profile else task.run()


def prepare_job(config: JobConfig, *, observer: Observer, stop: StopFlag, say: Say) -> ManifestIndex:
    """Does once what several workers of a job would each do before they begin; see `run_task`."""
    task = _Task(config, observer, stop, say, _load_engine)
    prepared = task.prepare()
    if config.retry_failed:
        numbers = task.numbers_to_retry(prepared.ledger)
        task.patience.do(lambda: tell_workers(prepared.ledger.files, numbers))
    return prepared.index


def _run_profiled(task: _Task) -> JobSummary:
    """Runs a task with a profile, which is written also when it stops early or fails."""
    from offline_diffusion.engine.profile import Profiler

    profiler = task.profiler = Profiler(task.config.folder / PROFILE, task.config.task_index)
    summary: JobSummary | None = None
    try:
        with profiler.stage("other"):
            summary = task.run()
    finally:
        profile = profiler.finish(interrupted=summary is None or summary.interrupted)
        for warning in profiler.warnings:
            task.say(f"warning: {warning}")
        if profile is None:
            task.say("no image was drawn: there is no profile")
    return replace(summary, profile=profile)


def _ignore(_: object) -> None:
    pass


def _nothing() -> None:
    pass


def _load_engine(config: JobConfig, checkpoint: Checkpoint) -> Engine:
    from offline_diffusion.engine.engine import Engine
    from offline_diffusion.models.loader import load_model

    return Engine(load_model(config, checkpoint), config)


@dataclass
class _Task:
    config: JobConfig
    observer: Observer
    stop: StopFlag
    say: Say
    make_engine: MakeEngine
    own_process: bool = False
    is_part: bool = False
    on_hung: Callable[[float], None] | None = None
    tally: Tally = field(default_factory=Tally)
    profiler: Profiler | None = None
    cost: MeasuredCost | None = None
    worker: str = field(default_factory=new_worker_name)

    def __post_init__(self) -> None:
        self.time_limit = TimeLimit(self.config.time_limit)
        self.patience = Patience(self.config.folder, self.say, lambda: self.stop.requests > 0)
        self.pulse = Pulse(self.on_hung or (lambda seconds: self.say(hung_line(seconds))))

    @property
    def stages(self) -> Stages:
        return self.profiler or NO_STAGES

    def prepare(self) -> Prepared:
        return Preparation(
            config=self.config,
            observer=self.observer,
            stop=self.stop,
            say=self.say,
            stages=self.stages,
            patience=self.patience,
        ).run()

    def numbers_to_retry(self, ledger: Ledger) -> dict[int, int]:
        """Publications whose failures ``--retry-failed`` makes again, as the command found them."""
        if not self.config.retry_failed:
            return {}
        if self.is_part:
            return told_to_workers(ledger.files)
        numbers = ledger.publications.numbers()
        return self.patience.do(lambda: numbers_at_begin(ledger.files, numbers, os.environ))

    def run(self) -> JobSummary:
        config = self.config
        prepared = self.prepare()
        manifest, ledger, index = prepared.manifest, prepared.ledger, prepared.index
        sweep_flights(ledger.out)
        for line in broken_lines(find_broken(ledger, ledger.shards)):
            self.say(line)
        # By cost: every task comes to the same shares, and draws its own first.
        share = assign_shards(index.shard_costs, config.num_tasks)[config.task_index]
        noted, numbers = self.numbers_to_retry(ledger), ledger.publications.numbers()
        retried = {number for number in noted if noted[number] == numbers.get(number)}
        before = ledger.markers()
        capabilities = prepared.checkpoint.capabilities
        todo = unfinished_shards(before, config, manifest, index, capabilities, retried)
        queue = self._queue(ledger, index, todo, share, ascending=not manifest.can_jump)
        queue.clear_leftovers(before)
        finished = not todo
        if todo and not self.stop.requests:
            finished = self._work(prepared, queue, self._failures_elsewhere(prepared, todo))
        self.patience.do(lambda: write_card(ledger))
        if ledger.finish():
            delete(ledger.out / PREVIEWS)  # of images that other runs finished, without
            drop_old_notes(ledger.out, lambda: any(m.has_failures for m in ledger.markers().values()))
        forget_deaths(ledger.out, ledger.publications.numbers(), config.shard_size)
        covered = sorted({*share, *queue.taken})
        kept = {number: before[number] for number in covered if number in before and number not in todo}
        return summary_of_task(ledger, index, self.tally, covered, kept, finished=finished, cost=self.cost)

    def _failures_elsewhere(self, prepared: Prepared, todo: Mapping[int, Marker | None]) -> FailuresElsewhere:
        """Raises `TooManyFailuresError` when so much has failed that the job need not begin."""
        index, limit = prepared.index, self.config.max_failures
        elsewhere = FailuresElsewhere(prepared.ledger, self.worker, todo)
        if limit is not None:
            check_faults(index.num_faults, index.num_rows, limit)
            Tally().check_failures(limit, elsewhere.count(()))
        return elsewhere

    def _queue(
        self,
        ledger: Ledger,
        index: ManifestIndex,
        todo: Mapping[int, Marker | None],
        share: Sequence[int],
        *,
        ascending: bool,
    ) -> ShardQueue:
        claims = claims_of(ledger, worker=self.worker, task=self.config.task_index)
        costs = index.shard_costs
        return ShardQueue(ledger, claims, todo=todo, share=share, costs=costs, ascending=ascending)

    # --- drawing -----------------------------------------------------------------------------

    def _work(self, prepared: Prepared, queue: ShardQueue, elsewhere: FailuresElsewhere) -> bool:
        """Draws what the queue gives; False when the stop flag ended it early.

        No model is loaded when all that is left is in other workers' hands.
        """
        if (has_work := queue.has_work()) is None:
            self.say("all that is left is other workers': looking whether these are alive")
        while has_work is None:
            if self.stop.requests:
                return False
            time.sleep(LOOK_INTERVAL_S)
            has_work = queue.has_work()
        finished = True
        if has_work:
            self.observer(Progress(phase="loading", num_images=prepared.index.num_images))
            with queue.watching():
                with self.stages.stage("load"):
                    engine = self.make_engine(self.config, prepared.checkpoint)
                with self.stages.stage("engine"):
                    finished = self._draw(engine, prepared, queue, elsewhere)
        if finished and (num_left := queue.num_left_to_others):
            self.say(f"{plural(num_left, 'shard')} left to other workers, which are at work on them")
        return finished

    def _draw(
        self, engine: Engine, prepared: Prepared, queue: ShardQueue, elsewhere: FailuresElsewhere
    ) -> bool:
        """Draws what the queue gives; False when the stop flag ended it early."""
        if self.profiler is not None:
            self.profiler.attach(engine)
        ledger = prepared.ledger
        sink = self.patience.do(lambda: self._sink(ledger))
        saver = StepSaver(
            ledger,
            sink,
            latents_shape=latents_shape(engine),
            interval_s=self.config.checkpoint_interval,
            stop=self.stop,
            say=self.say,
        )
        ledger.drop_old_heartbeats(self.config.task_index, self.worker)
        self.tally = Tally()
        flights = FlightLog(ledger.out, self.worker)
        feed = Feed(
            config=self.config,
            tally=self.tally,
            ledger=ledger,
            manifest=prepared.manifest,
            index=prepared.index,
            capabilities=engine.model.capabilities,
            sink=sink,
            saver=saver,
            queue=queue,
            flights=flights,
            elsewhere=elsewhere,
            patience=self.patience,
            say=self.say,
        )
        engine.on_start = feed.on_start
        loop = DrawLoop(
            engine=engine,
            feed=feed,
            sink=sink,
            watch=EngineWatch(flights, self.pulse),
            previews=PreviewFolder(ledger.out / PREVIEWS, self.say),
            tally=self.tally,
            time_limit=self.time_limit,
            stop=self.stop,
            say=self.say,
            observer=self.observer,
            stages=self.stages,
            on_step=_nothing if self.profiler is None else self.profiler.next_step,
        )
        finished = has_crashed = False
        try:
            signals = flights.catching_crashes() if self.own_process else contextlib.nullcontext()
            with loop.watch.watching(), signals:
                finished = loop.run()
                self.cost = measured_cost(engine)
        except CrashError as error:
            has_crashed = True  # nothing of the engine can be saved
            if self.is_part:
                self.say(error.message)
            raise
        except (OffdiffError, OSError):  # of the manifest or the disk: the engine itself is sound
            with contextlib.suppress(Exception):  # what is told is the failure
                saver.save_now(engine, feed.pending)
            raise
        finally:
            flights.close()  # before the last heartbeat: who says that it ends has nothing in flight
            told = contextlib.suppress(Exception) if has_crashed else contextlib.nullcontext()
            with told, contextlib.ExitStack() as ends:  # all of them, the last one first, whatever fails
                ends.callback(queue.close)
                ends.callback(loop.previews.close)
                ends.callback(saver.close)
                ends.callback(sink.close, abandon=not finished)
                if not finished and ledger.remote is not None:  # before it says that others may go on
                    with contextlib.suppress(OffdiffError, OSError):
                        sink.abandon()
                        sink.drain()
                        saver.close()
                        queue.park()
        return finished

    def _sink(self, ledger: Ledger) -> Sink:
        return Sink(
            ledger,
            image_format=self.config.image_format,
            image_level=self.config.image_level,
            task=self.config.task_index,
            num_tasks=self.config.num_tasks,
            worker=self.worker,
            num_threads=NUM_ENCODE_THREADS,
            say=self.say,
            stages=self.stages,
            gets_on=self.pulse.gets_on,
        )
