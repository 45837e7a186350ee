"""Runs one task of a job: shards of the manifest → engine → writer. The only place where they meet."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_diffusion.config import JobConfig
from offline_diffusion.data.card import write_card
from offline_diffusion.data.layout import PROFILE, Shard, make_shards
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.manifest import Manifest, open_manifest, same_manifest
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.plan import task_shards
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.scan import ManifestIndex, scan
from offline_diffusion.data.sink import Sink
from offline_diffusion.engine.cost import MeasuredCost, measured_cost
from offline_diffusion.engine.scheduler import LOOK_AHEAD
from offline_diffusion.errors import JobInterrupted, OffdiffError
from offline_diffusion.feed import Feed, row_defaults, with_other_faults
from offline_diffusion.identity import job_identity
from offline_diffusion.models.registry import Checkpoint, find_checkpoint
from offline_diffusion.progress import (
    Observer,
    Phase,
    Progress,
    Say,
    StopFlag,
    Tally,
    check_faults,
    plural,
)
from offline_diffusion.request import RequestOutput
from offline_diffusion.stages import NO_STAGES, Stages
from offline_diffusion.step_saver import StepSaver, latents_shape
from offline_diffusion.time_limit import REASON, TimeLimit

if TYPE_CHECKING:
    from offline_diffusion.engine.engine import Engine
    from offline_diffusion.engine.profile import Profiler

__all__ = ["JobSummary", "Progress", "StopFlag", "row_defaults", "run_task"]

PROGRESS_INTERVAL_S = 0.25
SCAN_REPORT_ROWS = 5_000
NUM_ENCODE_THREADS = min(8, os.cpu_count() or 1)

MakeEngine = Callable[[JobConfig, Checkpoint], "Engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """What a task did. Counts are of this task's shards, earlier runs included; ``seconds``,
    ``images_per_s`` and ``cost`` are of this run, ``cost`` None when it drew too little to tell;
    ``profile`` is what ``--profile`` measured, see ``engine.profile``."""

    out: Path
    num_rows: int
    num_images: int
    num_ok: int
    num_failed: int
    num_quarantined_rows: int
    num_resumed: int
    num_shards: int
    seconds: float
    images_per_s: float
    interrupted: bool
    warnings: list[str]
    cost: MeasuredCost | None = None
    profile: dict[str, Any] | None = None


def run_task(
    config: JobConfig,
    *,
    observer: Observer | None = None,
    stop: StopFlag | None = None,
    say: Say | None = None,
    make_engine: MakeEngine | None = None,
) -> JobSummary:
    """Runs what is left of one task's shards.

    Args:
        config: The job.
        observer: Called a few times a second.
        stop: Ask for a stop through it, from any thread or signal handler.
        say: Called with lines for the user.
        make_engine: Replaces the loading of the model.

    Raises:
        JobInterrupted: Asked to stop before the manifest was read through.
        OffdiffError: The job cannot start or go on; what is finished is durable.
    """
    task = _Task(config, observer or _ignore, stop or StopFlag(), say or _ignore, make_engine or _load_engine)
    with task.time_limit.stopping(task.stop):
        return _run_profiled(task) if config.profile else task.run()


def _run_profiled(task: _Task) -> JobSummary:
    """Runs a task with a profile, which is written also when it stops early or fails."""
    from offline_diffusion.engine.profile import Profiler

    profiler = task.profiler = Profiler(task.config.out / PROFILE, task.config.task_index)
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
    tally: Tally = field(default_factory=Tally)
    profiler: Profiler | None = None
    cost: MeasuredCost | None = None
    _last_report: float = 0.0

    def __post_init__(self) -> None:
        self.time_limit = TimeLimit(self.config.time_limit)

    @property
    def stages(self) -> Stages:
        return self.profiler or NO_STAGES

    def run(self) -> JobSummary:
        config = self.config
        manifest = open_manifest(config.manifests, column_map=config.map, limit=config.limit)
        checkpoint = find_checkpoint(config.model, config.revision)
        ledger = Ledger(config.out)
        index_folder = ledger.out / "_state" / "manifest"
        index = self._index(manifest, index_folder)
        for note in manifest.notes:
            self.say(note)
        ledger.open(
            job_identity(config, checkpoint, index), allow_manifest_change=config.allow_manifest_change
        )
        index.save(index_folder)
        shards = self._my_shards(index)
        before = ledger.markers()
        todo = self._unfinished(shards, before, manifest, index, checkpoint)
        unfinished = {shard.index for shard in todo}
        retried = unfinished & before.keys()  # their leftovers are what an earlier retry has made
        ledger.clear_leftovers(shard for shard in shards if shard.index not in retried)
        finished = not todo
        if todo and not self.stop.requests:
            check_faults(index.num_faults, index.num_rows, config.max_failures)
            self.observer(Progress(phase="loading", num_images=index.num_images))
            with self.stages.stage("load"):
                engine = self.make_engine(config, checkpoint)
            with self.stages.stage("engine"):
                finished = self._draw(engine, manifest, index, ledger, todo)
        write_card(ledger)
        ledger.finish()
        kept = [before[shard.index] for shard in shards if shard.index not in unfinished]
        return self._summary(ledger, index, shards, kept, finished=finished)

    # --- what is to be done ------------------------------------------------------------------

    def _index(self, manifest: Manifest, folder: Path) -> ManifestIndex:
        """The index of an earlier run where the manifest is the same, else one pass over all rows."""
        index = ManifestIndex.load(folder)
        if index is not None and not same_manifest(index.fingerprint, manifest):
            return index
        num_rows = 0

        def count(_: ManifestRow | RowFault) -> None:
            nonlocal num_rows
            num_rows += 1
            if self.stop.requests:
                raise JobInterrupted(
                    f"{self.stop.why}: stopped while scanning the manifest, at row {num_rows:,}",
                    hint="the same command starts again",
                )
            if num_rows % SCAN_REPORT_ROWS == 0:
                self.observer(Progress(phase="scanning", num_rows_scanned=num_rows))

        with self.stages.stage("scan"):
            return scan(manifest, on_row=count)

    def _my_shards(self, index: ManifestIndex) -> list[Shard]:
        shards = make_shards(index.num_rows, self.config.shard_size)
        mine = task_shards(len(shards), self.config.num_tasks, self.config.task_index)
        return [shards[number] for number in mine]

    def _unfinished(
        self,
        shards: Sequence[Shard],
        markers: Mapping[int, Marker],
        manifest: Manifest,
        index: ManifestIndex,
        checkpoint: Checkpoint,
    ) -> list[Shard]:
        """Shards not published yet, and with ``--retry-failed`` those where something may go better now."""
        wanted = {shard.index for shard in shards if shard.index not in markers}
        if self.config.retry_failed:
            published = [(shard, markers[shard.index]) for shard in shards if shard.index in markers]
            wanted |= {shard.index for shard, marker in published if marker.num_failed}
            wanted |= with_other_faults(
                [(shard, marker.num_invalid_rows) for shard, marker in published if marker.has_failures],
                manifest=manifest,
                index=index,
                capabilities=checkpoint.capabilities,
                defaults=row_defaults(self.config),
            )
        return [shard for shard in shards if shard.index in wanted]

    # --- drawing -----------------------------------------------------------------------------

    def _draw(
        self, engine: Engine, manifest: Manifest, index: ManifestIndex, ledger: Ledger, todo: list[Shard]
    ) -> bool:
        """Draws what is left of ``todo``; False when the stop flag ended it early."""
        if self.profiler is not None:
            self.profiler.attach(engine)
        sink = Sink(
            ledger,
            image_format=self.config.image_format,
            image_level=self.config.image_level,
            task=self.config.task_index,
            num_tasks=self.config.num_tasks,
            worker=f"{socket.gethostname()}:{os.getpid()}",
            num_threads=NUM_ENCODE_THREADS,
            stages=self.stages,
        )
        saver = StepSaver(
            ledger,
            sink,
            latents_shape=latents_shape(engine),
            interval_s=self.config.checkpoint_interval,
            stop=self.stop,
            say=self.say,
        )
        self.tally = Tally(num_rows=sum(shard.num_rows for shard in todo))
        feed = Feed(
            config=self.config,
            tally=self.tally,
            manifest=manifest,
            index=index,
            capabilities=engine.model.capabilities,
            sink=sink,
            saver=saver,
            shards=todo,
        )
        finished = False
        try:
            finished = self._loop(engine, feed, sink)
            self._report("finishing", engine)
            self.cost = measured_cost(engine)
        except (OffdiffError, OSError):  # of the manifest or the disk: the engine itself is sound
            with contextlib.suppress(Exception):  # what is told is the failure
                saver.save_now(engine, feed.pending)
            raise
        finally:
            try:
                sink.close(abandon=not finished)
            finally:
                saver.close()
        return finished

    def _loop(self, engine: Engine, feed: Feed, sink: Sink) -> bool:
        """Steps until the shards are done, True, or the stop flag or the time left ends it early, False."""
        while engine.has_unfinished or (feed.open and not feed.num_dropped):
            if self.stop.requests:
                self._stop(engine, feed, sink)
                break
            self._admit(engine, feed)
            for output in engine.step():
                self._take(output, feed, sink)
            feed.saver.tick(engine, feed.pending)
            if self.profiler is not None:
                self.profiler.next_step()
            self._report("running", engine)
        return not feed.open and not feed.pending and not feed.num_dropped

    def _admit(self, engine: Engine, feed: Feed) -> None:
        """Fills the engine's queue, but for what cannot be finished in the time left."""
        for _ in range(LOOK_AHEAD - engine.num_waiting):
            if feed.open and not feed.num_dropped:
                with self.stages.stage("read"):
                    feed.add_to(engine)
        if not self.time_limit.is_known:
            return
        for entry in list(engine.scheduler.waiting):
            if self.time_limit.is_too_late_for(entry.num_steps):
                if not feed.num_dropped:
                    self.say(f"{REASON}: too little time is left to begin more images")
                feed.num_dropped += 1
                engine.abort(entry.request_id)

    def _stop(self, engine: Engine, feed: Feed, sink: Sink) -> None:
        """Keeps what is done: images past their last step, and of the others how far they have come."""
        if self.stop.requests > 1:
            self.say(f"{self.stop.why}: stopping without saving unfinished images")
            return
        count = plural(engine.num_running, "unfinished image")
        self.say(f"{self.stop.why}: saving {count} at their step; once more to stop without saving")
        for output in engine.finish_decoding():
            self._take(output, feed, sink)
        feed.saver.save_now(engine, feed.pending)

    def _take(self, output: RequestOutput, feed: Feed, sink: Sink) -> None:
        shard_index, image = feed.pending.pop(output.request_id)
        if output.status == "aborted":
            return
        if output.status == "ok":
            self.time_limit.learn(output.metrics)
        sink.submit(shard_index, image, output)
        self.tally.num_ok += output.status == "ok"
        self.tally.num_failed += output.status == "failed"
        self.tally.num_truncated += output.metrics.truncated_tokens > 0
        self.tally.work_done += feed.work(image)
        self.tally.check_failures(self.config.max_failures)

    # --- telling -----------------------------------------------------------------------------

    def _report(self, phase: Phase, engine: Engine) -> None:
        now = time.monotonic()
        if phase == "running" and now - self._last_report < PROGRESS_INTERVAL_S:
            return
        self._last_report = now
        self.observer(
            self.tally.progress(
                phase,
                step_fill=engine.stats.step_fill,
                num_running=engine.num_running,
                num_waiting=engine.num_waiting,
            )
        )

    def _summary(
        self,
        ledger: Ledger,
        index: ManifestIndex,
        shards: Sequence[Shard],
        kept: Sequence[Marker],
        *,
        finished: bool,
    ) -> JobSummary:
        """``kept``: markers of the shards that were finished before this run."""
        markers, tally = ledger.markers(), self.tally
        done = [markers[shard.index] for shard in shards if shard.index in markers]
        num_ok = sum(marker.num_ok for marker in kept) + tally.num_resumed + tally.num_ok
        num_failed = sum(marker.num_failed for marker in kept) + tally.num_failed
        num_rows = sum(shard.num_rows for shard in shards)
        if finished:  # exact, from what is published
            num_ok, num_failed = sum(m.num_ok for m in done), sum(m.num_failed for m in done)
            num_images = num_ok + num_failed
        else:
            share = num_rows / max(1, index.num_rows)
            num_images = max(num_ok + num_failed, round(index.num_images * share))
        return JobSummary(
            out=self.config.out,
            num_rows=num_rows,
            num_images=num_images,
            num_ok=num_ok,
            num_failed=num_failed,
            num_quarantined_rows=sum(marker.num_invalid_rows for marker in done),
            num_resumed=max(0, num_ok + num_failed - tally.num_finished),
            num_shards=len(done),
            seconds=tally.seconds,
            images_per_s=tally.images_per_s,
            interrupted=not finished,
            warnings=tally.warnings(),
            cost=self.cost,
        )
