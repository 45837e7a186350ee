"""Saves how far unfinished images have come, while the engine goes on, and finds it again. Free of torch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offline_diffusion.data.layout import Shard
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.partial import ImageKey
from offline_diffusion.data.rows import ImageTask, ManifestRow, RowFault, RowImages
from offline_diffusion.data.shard_images import ImageKeys
from offline_diffusion.data.shard_queue import ClaimedShard
from offline_diffusion.data.sink import Sink
from offline_diffusion.data.step_checkpoint import ExpectedImage, StepFiles
from offline_diffusion.errors import JobError
from offline_diffusion.progress import Say, StopFlag, plural
from offline_diffusion.request import StepState

if TYPE_CHECKING:
    from offline_diffusion.engine.engine import Engine
    from offline_diffusion.engine.snapshot import Snapshot

POLL_S = 0.05
"""How often a second request to stop is looked for while a last checkpoint is written."""

Pending = Mapping[str, tuple[int, ImageTask]]
"""Images at the engine by request id, each with its shard's index."""

States = dict[ImageKey, StepState]


@dataclass(slots=True)
class _OpenShard:
    """A shard with unfinished images.

    Args:
        shard, rows: Which, and its rows in order.
        generation: Of this owner.
        states: The last that is known of each image that is begun and not durable: what its file holds.
        has_file: Whether there is a file, of whatever generation.
    """

    shard: Shard
    rows: Sequence[ManifestRow | RowFault]
    generation: int
    states: States
    has_file: bool

    def row_hash(self, row: int) -> str:
        return self.rows[row - self.shard.start].content_hash


def latents_shape(engine: Engine) -> Callable[[ImageTask], tuple[int, int]]:
    """Tokens and channels of the latents that an engine has of an image."""
    model = engine.model

    def shape(image: ImageTask) -> tuple[int, int]:
        request = image.request
        num_tokens = model.capabilities.num_image_tokens(request.height, request.width)
        return num_tokens, model.num_latent_channels

    return shape


class StepSaver:
    """Writes step checkpoints in a thread, one at a time. All methods belong to the engine's thread.

    Args:
        ledger: The open output folder.
        sink: Tells which images are durable without.
        latents_shape: Of an image's latents.
        interval_s: Seconds between two checkpoints; 0 is only when asked.
        stop: Asked twice, nothing is waited for.
        say: Hears of files that do not fit, and once of a checkpoint that could not be written.
    """

    def __init__(
        self,
        ledger: Ledger,
        sink: Sink,
        *,
        latents_shape: Callable[[ImageTask], tuple[int, int]],
        interval_s: float,
        stop: StopFlag,
        say: Say,
    ) -> None:
        self._files = StepFiles(ledger.out, ledger.job.job_id)
        self._sink, self._stop, self._say = sink, stop, say
        self._latents_shape = latents_shape
        self._interval_s = interval_s
        self._next_at = time.monotonic() + interval_s
        self._open: dict[int, _OpenShard] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offdiff-steps")
        self._writing: Future[dict[int, States]] | None = None
        self._is_failure_told = False

    def open_shard(
        self,
        claimed: ClaimedShard,
        rows: Sequence[ManifestRow | RowFault],
        asked: Sequence[RowImages],
        finished: ImageKeys,
    ) -> States:
        """How far the unfinished images of a shard have come that was just opened in the sink.

        Args:
            claimed, rows: Which, and its rows in order.
            asked: The images of its good rows.
            finished: Those that are durable.
        """
        shard, generation = claimed
        if self._writing is None:
            self._forget_durable()  # also without an interval rows of published shards must not pile up
        by_row = {images.row: images for images in asked}

        def expected(key: ImageKey) -> ExpectedImage | None:
            row, image_index = key
            if (images := by_row.get(row)) is None or not 0 <= image_index < len(images):
                return None
            num_steps = images.first.request.num_inference_steps
            row_hash = rows[row - shard.start].content_hash
            return ExpectedImage(row_hash, num_steps, self._latents_shape(images.first))

        found, notes = self._files.read(shard, expected)
        for note in notes:
            self._say(note)
        states = {key: state for key, state in found.items() if key not in finished}
        if states:
            self._say(f"{shard.stem}: {plural(len(states), 'unfinished image')} resumed at their step")
        self._open[shard.index] = _OpenShard(shard, rows, generation, states, bool(found or notes))
        return dict(states)

    # --- saving ------------------------------------------------------------------------------

    def tick(self, engine: Engine, pending: Pending) -> None:
        """Begins a checkpoint when it is time for one and the last is written; called between steps."""
        if self._writing is not None and self._writing.done():
            self._settle()
        if self._interval_s and self._writing is None and time.monotonic() >= self._next_at:
            self._begin(engine, pending)

    def save_now(self, engine: Engine, pending: Pending) -> None:
        """Writes a checkpoint and waits for it, unless a stop was asked for twice."""
        if self._wait():
            self._begin(engine, pending)
            self._wait()

    def close(self) -> None:
        """Ends the thread and removes the files of shards that are published by now."""
        self._wait()
        self._thread.shutdown(wait=self._stop.requests < 2)
        if self._writing is None:
            self._forget_durable()

    def _begin(self, engine: Engine, pending: Pending) -> None:
        self._next_at = time.monotonic() + self._interval_s
        self._forget_durable()
        from offline_diffusion.engine.memory import is_out_of_memory

        try:
            snapshot = engine.snapshot()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._tell(error)
            return
        shards = {index: (own, dict(own.states)) for index, own in self._open.items()}
        self._writing = self._thread.submit(self._write, snapshot, dict(pending), shards)

    def _write(
        self, snapshot: Snapshot, pending: Pending, shards: Mapping[int, tuple[_OpenShard, States]]
    ) -> dict[int, States]:
        """In the thread; returns what is new, by shard."""
        fresh: dict[int, States] = defaultdict(dict)
        for request_id, state in snapshot.states().items():
            shard_index, image = pending[request_id]
            fresh[shard_index][image.row, image.image_index] = state
        for index, (own, known) in shards.items():
            states = known | fresh[index]
            if states or own.has_file:
                images = {key: (own.row_hash(key[0]), state) for key, state in states.items()}
                self._files.write(own.shard, own.generation, images)
                own.has_file = bool(states)
        return fresh

    def _wait(self) -> bool:
        """Waits for the thread; False when a stop is asked for twice."""
        while self._writing is not None and self._stop.requests < 2:
            wait([self._writing], POLL_S)
            if self._writing.done():
                self._settle()
        return self._stop.requests < 2

    def _settle(self) -> None:
        assert self._writing is not None
        writing, self._writing = self._writing, None
        try:
            fresh = writing.result()
        except JobError as error:
            self._tell(error)
            return
        for index, states in fresh.items():
            if index in self._open:
                self._open[index].states |= states

    def _tell(self, error: BaseException) -> None:
        if not self._is_failure_told:
            self._is_failure_told = True
            self._say(f"warning: no step checkpoint: {error}\nthe job goes on and tries again")

    def _forget_durable(self) -> None:
        """Nothing is written meanwhile."""
        for index, own in list(self._open.items()):
            finished = self._sink.finished(index)
            if finished is None:
                own.states = {}
                del self._open[index]
            else:
                own.states = {key: state for key, state in own.states.items() if key not in finished}
            if own.has_file and not own.states:
                self._remove(own)

    def _remove(self, own: _OpenShard) -> None:
        try:
            self._files.write(own.shard, own.generation, {})
            own.has_file = False
        except JobError as error:
            self._tell(error)
