"""Runs one task of a job: shards of the manifest → engine → writer. The only place where they meet."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offline_diffusion.config import LAYOUT_OPTIONS, PIXEL_OPTIONS, JobConfig
from offline_diffusion.data.job_file import JobIdentity
from offline_diffusion.data.layout import Shard, make_shards
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.manifest import Manifest, open_manifest, same_manifest
from offline_diffusion.data.plan import task_shards
from offline_diffusion.data.rows import ImageTask, ManifestRow, RowDefaults, RowFault, resolve_row
from offline_diffusion.data.scan import ManifestIndex, scan
from offline_diffusion.data.sink import Sink
from offline_diffusion.errors import TooManyFailuresError
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.registry import Checkpoint, find_checkpoint
from offline_diffusion.request import RequestOutput

if TYPE_CHECKING:
    from offline_diffusion.engine.engine import Engine

DRAIN_S = 20.0
"""After a first signal, running images may still finish for this long: less than the 30 s that
Slurm and Kubernetes commonly leave between SIGTERM and SIGKILL."""

PROGRESS_INTERVAL_S = 0.25
SCAN_REPORT_ROWS = 5_000
NUM_ENCODE_THREADS = min(8, os.cpu_count() or 1)

MIN_SHARE_SAMPLE = 100
"""Images that must be done before a share of failures (``--max-failures 5%``) can stop a job."""


@dataclass
class StopFlag:
    """Set by signal handlers, read between steps. 0: go on, 1: drain, 2: stop now."""

    requests: int = 0
    why: str = ""

    def request(self, why: str) -> None:
        """One more request to stop; ``why`` names the first."""
        self.why = self.why or why
        self.requests += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A snapshot for displays. ``work`` is in FLOPs; ``num_images`` and ``work_total`` are estimates
    until the last shard is opened."""

    phase: Literal["scanning", "loading", "running", "finishing"]
    num_images: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_resumed: int = 0
    work_done: float = 0.0
    work_total: float = 0.0
    images_per_s: float = 0.0
    eta_s: float | None = None
    step_fill: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_rows_scanned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """What a task did. Counts are of this task's shards, earlier runs included; ``seconds`` and
    ``images_per_s`` are of this run."""

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


Observer = Callable[[Progress], None]
Say = Callable[[str], None]


def run_task(
    config: JobConfig,
    *,
    observer: Observer | None = None,
    stop: StopFlag | None = None,
    say: Say | None = None,
    make_engine: Callable[[JobConfig, Checkpoint], Engine] | None = None,
) -> JobSummary:
    """Runs what is left of one task's shards.

    Args:
        config: The job.
        observer: Called a few times a second.
        stop: Ask for a stop through it, from any thread or signal handler.
        say: Called with lines for the user.
        make_engine: Replaces the loading of the model in tests.

    Raises:
        OffdiffError: The job cannot start or go on; what is finished is durable.
    """
    task = _Task(config, observer or (lambda _: None), stop or StopFlag(), say or (lambda _: None))
    return task.run(make_engine or _load_engine)


def _load_engine(config: JobConfig, checkpoint: Checkpoint) -> Engine:
    from offline_diffusion.engine.engine import Engine
    from offline_diffusion.models.loader import load_model

    return Engine(load_model(config, checkpoint), config)


def row_defaults(config: JobConfig) -> RowDefaults:
    """What the job's options say for silent rows."""
    return RowDefaults(
        height=config.height,
        width=config.width,
        num_inference_steps=config.num_inference_steps,
        true_cfg_scale=config.true_cfg_scale,
        negative_prompt=config.negative_prompt,
        seed=config.seed,
        on_bad_size=config.on_bad_size,
    )


@dataclass
class _Counts:
    """Images and work of this run."""

    num_ok: int = 0
    num_failed: int = 0
    num_resumed: int = 0
    num_truncated: int = 0
    num_guidance_off: int = 0
    work_done: float = 0.0
    work_opened: float = 0.0
    images_opened: int = 0
    rows_opened: int = 0


@dataclass
class _Task:
    config: JobConfig
    observer: Observer
    stop: StopFlag
    say: Say
    counts: _Counts = field(default_factory=_Counts)
    started: float = field(default_factory=time.monotonic)
    running_since: float | None = None
    _last_report: float = 0.0

    def run(self, make_engine: Callable[[JobConfig, Checkpoint], Engine]) -> JobSummary:
        config = self.config
        manifest = open_manifest(config.manifests, column_map=config.map, limit=config.limit)
        for note in manifest.notes:
            self.say(note)
        checkpoint = find_checkpoint(config.model, config.revision)
        ledger = Ledger(config.out)
        index = self._index(manifest, ledger)
        ledger.open(self._identity(checkpoint, index), allow_manifest_change=config.allow_manifest_change)
        index.save(self._index_folder(ledger))
        shards = self._my_shards(ledger, index)
        todo = self._unfinished(ledger, shards)
        ledger.clear_leftovers(shards)
        if todo:
            self._report("loading", None, index)
            engine = make_engine(config, checkpoint)
            self._draw(engine, manifest, index, ledger, todo)
        ledger.finish()
        return self._summary(ledger, index, shards)

    # --- what is to be done ------------------------------------------------------------------

    def _index_folder(self, ledger: Ledger) -> Path:
        return ledger.out / "_state" / "manifest"

    def _index(self, manifest: Manifest, ledger: Ledger) -> ManifestIndex:
        """The index of an earlier run where the manifest is the same, else one pass over all rows."""
        index = ManifestIndex.load(self._index_folder(ledger))
        if index is not None and not same_manifest(index.fingerprint, manifest):
            return index
        num_rows = 0

        def count(_: ManifestRow | RowFault) -> None:
            nonlocal num_rows
            num_rows += 1
            if num_rows % SCAN_REPORT_ROWS == 0:
                self.observer(Progress(phase="scanning", num_rows_scanned=num_rows))

        return scan(manifest, on_row=count)

    def _identity(self, checkpoint: Checkpoint, index: ManifestIndex) -> JobIdentity:
        options = self.config.model_dump(mode="json", include=set(PIXEL_OPTIONS + LAYOUT_OPTIONS))
        return JobIdentity(
            model=checkpoint.identity,
            manifest=index.fingerprint,
            options=options,
            num_rows=index.num_rows,
            shard_size=self.config.shard_size,
            carried_schema=index.carried_schema,
        )

    def _my_shards(self, ledger: Ledger, index: ManifestIndex) -> list[Shard]:
        shards = make_shards(index.num_rows, self.config.shard_size)
        mine = task_shards(len(shards), self.config.num_tasks, self.config.task_index)
        return [shards[number] for number in mine]

    def _unfinished(self, ledger: Ledger, shards: Sequence[Shard]) -> list[Shard]:
        published = ledger.published()
        if not self.config.retry_failed:
            return [shard for shard in shards if shard.index not in published]
        markers = ledger.markers()
        return [
            shard for shard in shards if shard.index not in markers or markers[shard.index].has_failures
        ]

    # --- drawing -----------------------------------------------------------------------------

    def _draw(
        self, engine: Engine, manifest: Manifest, index: ManifestIndex, ledger: Ledger, todo: list[Shard]
    ) -> None:
        sink = Sink(
            ledger,
            image_format=self.config.image_format,
            task=self.config.task_index,
            num_tasks=self.config.num_tasks,
            worker=f"{socket.gethostname()}:{os.getpid()}",
            num_threads=NUM_ENCODE_THREADS,
        )
        feed = _Feed(self, manifest, index, engine.model.capabilities, sink, todo)
        self.running_since = time.monotonic()
        finished = False
        try:
            finished = self._loop(engine, feed, sink, index)
            self._report("finishing", engine, index)
        finally:
            sink.close(abandon=not finished)

    def _loop(self, engine: Engine, feed: _Feed, sink: Sink, index: ManifestIndex) -> bool:
        """Steps until the shards are done, True, or the stop flag has had its way, False."""
        from offline_diffusion.engine.scheduler import LOOK_AHEAD

        give_up_at: float | None = None
        while True:
            if self.stop.requests and give_up_at is None:
                give_up_at = time.monotonic() + DRAIN_S
                self._stop_admission(engine)
            while not self.stop.requests and feed.open and engine.num_waiting < LOOK_AHEAD:
                feed.add_to(engine)
            for output in engine.step():
                self._take(output, feed, sink)
            self._report("running", engine, index)
            if give_up_at is not None and (self.stop.requests > 1 or time.monotonic() > give_up_at):
                return False
            if not engine.has_unfinished and (self.stop.requests or not feed.open):
                return not self.stop.requests

    def _stop_admission(self, engine: Engine) -> None:
        self.say(
            f"{self.stop.why}: finishing {engine.num_running} running images, at most {DRAIN_S:.0f} s; "
            "once more to stop now"
        )
        for entry in list(engine.scheduler.waiting):
            engine.abort(entry.request_id)

    def _take(self, output: RequestOutput, feed: _Feed, sink: Sink) -> None:
        shard_index, image = feed.pending.pop(output.request_id)
        if output.status == "aborted":
            return
        sink.submit(shard_index, image, output)
        counts = self.counts
        counts.num_ok += output.status == "ok"
        counts.num_failed += output.status == "failed"
        counts.num_truncated += output.metrics.truncated_tokens > 0
        counts.work_done += feed.work(image)
        self._check_max_failures(feed.num_faults)

    def _check_max_failures(self, num_faults: int) -> None:
        limit, counts = self.config.max_failures, self.counts
        if limit is None:
            return
        failures = counts.num_failed + num_faults
        attempted = counts.num_ok + failures
        if limit.endswith("%"):
            too_many = (
                attempted >= MIN_SHARE_SAMPLE and failures > attempted * float(limit.removesuffix("%")) / 100
            )
        else:
            too_many = failures > int(limit)
        if too_many:
            raise TooManyFailuresError(
                f"{failures} of {attempted} images and rows failed, --max-failures is {limit}",
                hint=f"see {self.config.out}/failures; what is finished is kept, the same command goes on",
            )

    # --- telling -----------------------------------------------------------------------------

    def _report(self, phase: Literal["loading", "running", "finishing"], engine: Engine | None, index: ManifestIndex) -> None:
        now = time.monotonic()
        if phase == "running" and now - self._last_report < PROGRESS_INTERVAL_S:
            return
        self._last_report = now
        counts = self.counts
        scale = self._rows_to_do(index) / counts.rows_opened if counts.rows_opened else 1.0
        work_total, seconds = counts.work_opened * scale, now - (self.running_since or now)
        done = counts.num_ok + counts.num_failed
        left = max(0.0, work_total - counts.work_done)
        self.observer(
            Progress(
                phase=phase,
                num_images=round(counts.images_opened * scale),
                num_done=done + counts.num_resumed,
                num_failed=counts.num_failed,
                num_resumed=counts.num_resumed,
                work_done=counts.work_done,
                work_total=work_total,
                images_per_s=done / seconds if seconds > 0 else 0.0,
                eta_s=seconds * left / counts.work_done if counts.work_done else None,
                step_fill=engine.stats.step_fill if engine else 0.0,
                num_running=engine.num_running if engine else 0,
                num_waiting=engine.num_waiting if engine else 0,
                num_rows_scanned=index.num_rows,
            )
        )

    def _rows_to_do(self, index: ManifestIndex) -> int:
        return max(self.counts.rows_opened, self._num_rows_to_do)

    _num_rows_to_do: int = 0

    def _summary(self, ledger: Ledger, index: ManifestIndex, shards: Sequence[Shard]) -> JobSummary:
        markers = ledger.markers()
        done = [markers[shard.index] for shard in shards if shard.index in markers]
        counts, seconds = self.counts, time.monotonic() - (self.running_since or self.started)
        unfinished = len(done) < len(shards)
        num_ok = counts.num_ok + counts.num_resumed if unfinished else sum(marker.num_ok for marker in done)
        num_failed = counts.num_failed if unfinished else sum(marker.num_failed for marker in done)
        return JobSummary(
            out=self.config.out,
            num_rows=sum(shard.num_rows for shard in shards),
            num_images=index.num_images if self.config.num_tasks == 1 else num_ok + num_failed,
            num_ok=num_ok,
            num_failed=num_failed,
            num_quarantined_rows=sum(marker.num_invalid_rows for marker in done),
            num_resumed=max(0, num_ok + num_failed - counts.num_ok - counts.num_failed),
            num_shards=len(done),
            seconds=seconds,
            images_per_s=(counts.num_ok + counts.num_failed) / seconds if seconds > 0 else 0.0,
            interrupted=unfinished,
            warnings=self._warnings(),
        )

    def _warnings(self) -> list[str]:
        """What happened to many rows, said once with a count."""
        counts, lines = self.counts, []
        if counts.num_truncated:
            lines.append(
                f"{counts.num_truncated} images: the prompt is longer than the model reads and was cut; "
                "see truncated_tokens in metrics"
            )
        if counts.num_guidance_off:
            lines.append(
                f"{counts.num_guidance_off} images: true_cfg_scale > 1 but no negative_prompt, so guidance is off; "
                'give negative_prompt (" " is one); see cfg_active in metrics'
            )
        return lines


@dataclass
class _Feed:
    """The images to draw, read shard by shard as the engine asks for them."""

    task: _Task
    manifest: Manifest
    index: ManifestIndex
    capabilities: Capabilities
    sink: Sink
    shards: list[Shard]
    open: bool = True
    num_faults: int = 0
    pending: dict[str, tuple[int, ImageTask]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.task._num_rows_to_do = sum(shard.num_rows for shard in self.shards)
        self._images = self._read()

    def add_to(self, engine: Engine) -> None:
        """Hands the engine the next image; closes when there is none."""
        item = next(self._images, None)
        if item is None:
            self.open = False
            engine.close_source()
            return
        shard, image = item
        self.pending[image.request.request_id] = (shard.index, image)
        engine.add_request(image.request)

    def work(self, image: ImageTask) -> float:
        """FLOPs of an image's denoising, its text tokens left out."""
        request, capabilities = image.request, self.capabilities
        tokens = capabilities.num_image_tokens(request.height, request.width)
        return capabilities.forward_flops(tokens) * request.num_inference_steps * (1 + request.cfg_active)

    def _read(self) -> Iterator[tuple[Shard, ImageTask]]:
        ranges = [range(shard.start, shard.stop) for shard in self.shards]
        rows = self.manifest.read(ranges, duplicates=self.index.duplicates)
        for shard in self.shards:
            own = [next(rows) for _ in range(shard.num_rows)]
            yield from ((shard, image) for image in self._open_shard(shard, own))

    def _open_shard(self, shard: Shard, rows: list[ManifestRow | RowFault]) -> list[ImageTask]:
        """The images of a shard that are not there yet."""
        defaults = row_defaults(self.task.config)
        images: list[ImageTask] = []
        for position, row in enumerate(rows):
            resolved = row if isinstance(row, RowFault) else resolve_row(row, self.capabilities, defaults)
            if isinstance(resolved, RowFault):
                rows[position] = resolved
                self.num_faults += 1
            else:
                images.extend(resolved)
        finished = self.sink.open_shard(shard, rows, images, retry_failed=self.task.config.retry_failed)
        left = [image for image in images if (image.row, image.image_index) not in finished]
        self._count(shard, images, left)
        return left

    def _count(self, shard: Shard, images: list[ImageTask], left: list[ImageTask]) -> None:
        counts = self.task.counts
        counts.rows_opened += shard.num_rows
        counts.images_opened += len(images)
        counts.num_resumed += len(images) - len(left)
        counts.work_opened += sum(self.work(image) for image in left)
        for image in left:
            request = image.request
            counts.num_guidance_off += request.true_cfg_scale > 1 and request.negative_prompt is None
