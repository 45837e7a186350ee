"""The images that a task has to draw, read shard by shard as the engine asks for them. Free of torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING

from offline_diffusion.config import JobConfig
from offline_diffusion.data.deaths import Flight, FlightLog, Suspicion, suspicions_of
from offline_diffusion.data.disk_full import Patience
from offline_diffusion.data.failures import FailuresElsewhere
from offline_diffusion.data.layout import Shard, make_shards
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.manifest import Manifest
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.partial import ImageKey
from offline_diffusion.data.row_reader import RowReader
from offline_diffusion.data.rows import ImageTask, ManifestRow, RowDefaults, RowFault, RowImages, resolve_row
from offline_diffusion.data.scan import ManifestIndex
from offline_diffusion.data.shard_queue import ClaimedShard, ShardQueue
from offline_diffusion.data.sink import Sink
from offline_diffusion.errors import ManifestError
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.progress import Say, Tally, plural
from offline_diffusion.request import RequestMetrics, RequestOutput
from offline_diffusion.step_saver import States, StepSaver

if TYPE_CHECKING:
    from offline_diffusion.engine.engine import Engine


IDLE_S = 0.002
"""Between two looks for a shard while the engine has nothing to do; a loop may look many times before it
sees a request to stop."""


def row_defaults(config: JobConfig) -> RowDefaults:
    """What the job's options say for silent rows."""
    return RowDefaults(
        height=config.height,
        width=config.width,
        num_inference_steps=config.num_inference_steps,
        true_cfg_scale=config.true_cfg_scale,
        guidance_scale=config.guidance_scale,
        negative_prompt=config.negative_prompt,
        seed=config.seed,
        on_bad_size=config.on_bad_size,
    )


def unfinished_shards(
    markers: Mapping[int, Marker],
    config: JobConfig,
    manifest: Manifest,
    index: ManifestIndex,
    capabilities: Capabilities,
    retried: Collection[int],
) -> dict[int, Marker | None]:
    """Shards not published yet, and those to retry where something may go better now.

    Args:
        markers: What is published, by shard.
        config: The job.
        manifest, index: All rows.
        capabilities: Of the model.
        retried: Published shards whose failures may be made again, by index.

    Returns:
        By index, each with the publication that is to be made again, if any.
    """
    shards = make_shards(index.num_rows, config.shard_size)
    wanted = set(range(len(shards))) - markers.keys()
    failed = {n: each for n, each in markers.items() if n in retried and each.has_failures}
    if failed:
        wanted |= {number for number, marker in failed.items() if marker.num_failed}
        wanted |= with_other_faults(
            [(shards[number], each.num_invalid_rows) for number, each in failed.items()],
            manifest=manifest,
            index=index,
            capabilities=capabilities,
            defaults=row_defaults(config),
        )
    return {number: markers.get(number) for number in sorted(wanted)}


def with_other_faults(
    published: Sequence[tuple[Shard, int]],
    *,
    manifest: Manifest,
    index: ManifestIndex,
    capabilities: Capabilities,
    defaults: RowDefaults,
) -> set[int]:
    """The shards, by index, whose faulty rows are not as many as when they were published.

    Args:
        published: Shards in order, each with its number of quarantined rows.
        manifest, index: All rows; those of the shards are read once.
        capabilities: Of the model.
        defaults: The job's.
    """
    ranges = [range(shard.start, shard.stop) for shard, _ in published]
    rows = manifest.read(ranges, duplicates=index.duplicates)
    changed = set()
    for shard, num_before in published:
        resolved = (_resolve(row, capabilities, defaults) for row in islice(rows, shard.num_rows))
        if sum(isinstance(each, RowFault) for each in resolved) != num_before:
            changed.add(shard.index)
    return changed


def _resolve(
    row: ManifestRow | RowFault, capabilities: Capabilities, defaults: RowDefaults
) -> RowImages | RowFault:
    return row if isinstance(row, RowFault) else resolve_row(row, capabilities, defaults)


@dataclass(frozen=True, slots=True)
class _OpenShard:
    """A shard whose images are handed out.

    Args:
        shard: Which.
        number: Of the publication that is being made.
        row_hashes: By row.
    """

    shard: Shard
    number: int
    row_hashes: Mapping[int, str]

    def flight(self, image: ImageTask, step: int) -> Flight:
        """What the log is told of an image that is begun at a step."""
        row, index = image.key
        return Flight(
            row=row, image_index=index, row_hash=self.row_hashes[row], number=self.number, step=step
        )


@dataclass(kw_only=True)
class Feed:
    """Opens shards and hands their images to the engine, each made when its turn comes.

    A shard is claimed when its turn comes, so that no more are held than are worked on. When none can be
    claimed but owners are still watched (see `ShardQueue`), the feed stays open and waits with the engine.

    ``pending`` are those at the engine by request id; ``num_dropped`` those it gave back undrawn.
    ``steps_before`` has for images that go on the steps of earlier runs, by request id.

    An image that was in flight when a worker crashed is drawn alone, one that crashed twice not at all: see
    `data.deaths`.
    """

    config: JobConfig
    tally: Tally
    ledger: Ledger
    manifest: Manifest
    index: ManifestIndex
    capabilities: Capabilities
    sink: Sink
    saver: StepSaver
    queue: ShardQueue
    flights: FlightLog
    elsewhere: FailuresElsewhere
    patience: Patience
    say: Say
    open: bool = True
    pending: dict[str, tuple[int, ImageTask]] = field(default_factory=dict)
    num_dropped: int = 0
    steps_before: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = RowReader(self.manifest, duplicates=self.index.duplicates)
        self._images: Iterator[tuple[_OpenShard, ImageTask]] = iter(())
        self._begun: States = {}  # of the shard opened last, until they are at the engine
        self._suspects: deque[tuple[_OpenShard, ImageTask]] = deque()
        self._flights: dict[str, Flight] = {}  # of what is pending
        self._suspect_at_engine: str | None = None
        self.tally.num_rows = self.queue.num_rows_ahead

    def add_to(self, engine: Engine) -> None:
        """Hands the engine the next image, or opens the next shard; closes when there is none."""
        if self._suspects or self._suspect_at_engine in self.pending:
            if not engine.has_unfinished:
                shard, image = self._suspects.popleft()
                self._suspect_at_engine = image.request.request_id
                self._hand_over(engine, shard, image)
        elif (item := next(self._images, None)) is not None:
            self._hand_over(engine, *item)
        elif self.queue.is_helping and engine.num_waiting > engine.num_running:
            return  # enough to do: whoever needs the next shard first may have it
        elif (claimed := self.patience.do(self._take_shard)) is not None:
            self._images = self._open_shard(claimed)
            self.check_failures()
        elif self.queue.is_open:
            engine.close_source()  # as far as is known; what a dead worker left may follow
            if not engine.has_unfinished:
                time.sleep(IDLE_S)
        else:
            self.open = False
            engine.close_source()

    def check_failures(self) -> None:
        """Raises `TooManyFailuresError` when ``--max-failures`` says so of the whole job."""
        if (limit := self.config.max_failures) is not None:
            self.tally.check_failures(limit, self.elsewhere.count(self.queue.taken))

    def _take_shard(self) -> ClaimedShard | None:
        self.queue.let_go(self.sink.is_open)
        return self.queue.take()

    def _hand_over(self, engine: Engine, opened: _OpenShard, image: ImageTask) -> None:
        request_id = image.request.request_id
        self.pending[request_id] = (opened.shard.index, image)
        flight = self._flights[request_id] = opened.flight(image, self.steps_before.get(request_id, 0))
        with self.flights.during(flight):  # its text is read
            engine.add_request(image.request, self._begun.pop(image.key, None))

    def on_start(self, request_id: str) -> None:
        """The engine begins with an image: it is in flight until it is handed out."""
        self.flights.begin(self._flights[request_id])

    def take_back(self, request_id: str, *, is_drawn: bool) -> tuple[int, ImageTask]:
        """The engine has handed an image out or given it back; returns its shard's index and the image."""
        self.flights.end(self._flights.pop(request_id).key, is_drawn=is_drawn)
        return self.pending.pop(request_id)

    def work(self, image: ImageTask) -> float:
        """FLOPs of what an image's denoising takes in this run, its text tokens left out."""
        request, capabilities = image.request, self.capabilities
        tokens = capabilities.num_image_tokens(request.height, request.width)
        num_steps = request.num_inference_steps - self.steps_before.get(request.request_id, 0)
        return capabilities.forward_flops(tokens, tokens) * num_steps * (1 + request.cfg_active)

    def _read_rows(self, shard: Shard) -> list[ManifestRow | RowFault]:
        rows = self._rows.read(range(shard.start, shard.stop))
        if len(rows) < shard.num_rows:
            raise ManifestError(
                f"the manifest ends at row {shard.start + len(rows):,}; "
                f"it had {self.index.num_rows:,} rows when this run began",
                hint="a manifest must not change while a job runs",
            )
        return rows

    def _open_shard(self, claimed: ClaimedShard) -> Iterator[tuple[_OpenShard, ImageTask]]:
        """The images of a shard that are not there yet."""
        shard = claimed.shard
        rows = self._read_rows(shard)
        defaults = row_defaults(self.config)
        asked: list[RowImages] = []
        for position, row in enumerate(rows):
            resolved = _resolve(row, self.capabilities, defaults)
            if isinstance(resolved, RowFault):
                rows[position] = resolved
                self.tally.num_faults += 1
            else:
                asked.append(resolved)
        finished = self.sink.open_shard(
            shard, rows, retry_failed=self.config.retry_failed, generation=claimed.generation
        )
        self.tally.num_failed_before += self.sink.num_failed(shard.index)
        self.tally.num_rows_opened += shard.num_rows
        self.tally.num_rows = self.tally.num_rows_opened + self.queue.num_rows_ahead
        for images in asked:
            self._count(images, finished.num_in_row(images.row))
        self._begun = self.saver.open_shard(claimed, rows, asked, finished)
        begun = frozenset(self._begun)
        first = [
            images[index] for images in asked for index in range(len(images)) if (images.row, index) in begun
        ]
        self._count_begun(first)
        others = (
            images[index]
            for images in asked
            for index in range(len(images))
            if (images.row, index) not in finished and (images.row, index) not in begun
        )
        number = self.ledger.next_number(shard)
        opened = _OpenShard(shard, number, {row.row: row.content_hash for row in rows})
        images_left = zip(repeat(opened), chain(first, others), strict=False)
        steps = {key: state.step_index for key, state in self._begun.items()}
        suspicions = suspicions_of(self.config.folder, opened.row_hashes, number=number, steps=steps)
        if not suspicions:
            return images_left
        return self._without_suspects(opened, images_left, suspicions)

    def _without_suspects(
        self,
        opened: _OpenShard,
        images: Iterator[tuple[_OpenShard, ImageTask]],
        suspicions: Mapping[ImageKey, Suspicion],
    ) -> Iterator[tuple[_OpenShard, ImageTask]]:
        """Sets aside what is not to be drawn again, and for later what is to be drawn alone."""
        shard = opened.shard
        others = []
        for _, image in images:
            suspicion = suspicions.get(image.key, Suspicion())
            if (verdict := suspicion.verdict) is not None:
                output = RequestOutput(
                    image.request,
                    "failed",
                    None,
                    RequestMetrics(attempts=suspicion.num_deaths),
                    "crash",
                    verdict,
                )
                self.sink.submit(shard.index, image, output)
                self.tally.num_failed += 1
                self.tally.num_set_aside += 1
            elif suspicion.isolate:
                self._suspects.append((opened, image))
            else:
                others.append((opened, image))
        if self._suspects:
            count = plural(len(self._suspects), "image")
            self.say(f"{shard.stem}: {count} in flight when a worker died, now drawn one at a time")
        return iter(others)

    def _count_begun(self, images: Sequence[ImageTask]) -> None:
        """Work that earlier runs did is none of this run's."""
        for image in images:
            whole = self.work(image)
            state = self._begun[image.row, image.image_index]
            self.steps_before[image.request.request_id] = state.step_index
            self.tally.work_opened -= whole - self.work(image)

    def _count(self, images: RowImages, num_finished: int) -> None:
        tally, request, num_left = self.tally, images[0].request, len(images) - num_finished
        tally.num_images_opened += len(images)
        tally.num_resumed += num_finished
        tally.work_opened += self.work(images[0]) * num_left
        if request.true_cfg_scale > 1 and not request.cfg_active:
            tally.num_guidance_off += num_left
        if request.guidance_scale is not None and self.capabilities.guidance == "true_cfg":
            tally.num_guidance_scale_unused += num_left
