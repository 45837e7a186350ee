"""Where finished images go: encoded in threads, written by one, published shard by shard.

The engine hands outputs in and goes on; it waits only when too much is unwritten.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from offline_diffusion.config import ImageFormat
from offline_diffusion.data.adoption import Superseded, published_failures, published_records
from offline_diffusion.data.card import write_card
from offline_diffusion.data.disk_full import Patience
from offline_diffusion.data.heartbeat import INTERVAL_S, Heartbeat, OpenShard
from offline_diffusion.data.layout import Shard
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.partial import Record
from offline_diffusion.data.publication import ShardLostError
from offline_diffusion.data.record import make_record
from offline_diffusion.data.rows import ImageTask, ManifestRow, RowFault
from offline_diffusion.data.shard_images import ImageKeys, ShardImages
from offline_diffusion.data.shard_writer import ShardWriter
from offline_diffusion.data.sink_progress import RecentRate, SinkProgress
from offline_diffusion.errors import DiskFullError, JobError
from offline_diffusion.request import RequestOutput
from offline_diffusion.stages import NO_STAGES, Stages, in_stage

MAX_PENDING_BYTES = 512 * 2**20
"""Most bytes of pixels that wait to be encoded and written."""

MAX_PUBLISHING = 4
"""Most shards that wait to be uploaded: they lie on the disk."""


class Sink:
    """Takes the outputs of one task.

    ``open_shard``, ``submit``, ``drain`` and ``close`` belong to one thread.

    Args:
        ledger: The open output folder.
        image_format, image_level: Of the encoded images; no level is the format's default.
        task, num_tasks, worker: Recorded with every image.
        num_threads: Encoders.
        max_pending: Most images that wait to be encoded and written.
        say: Called with lines for the user, from any thread.
        stages: Hears of the stages of an image here.
        gets_on: Whether the worker gets on; while it does not, its sign of life stays as it is.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        image_format: ImageFormat = "png",
        image_level: int | None = None,
        task: int = 0,
        num_tasks: int = 1,
        worker: str = "",
        num_threads: int = 4,
        max_pending: int = 64,
        say: Callable[[str], None] = lambda _: None,
        stages: Stages = NO_STAGES,
        gets_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self.stages, self._gets_on = stages, gets_on
        self._ledger, self._image_format, self._image_level = ledger, image_format, image_level
        self._task, self._worker, self._max_pending = task, worker, max_pending
        self._say, self._patience = say, Patience(ledger.out, say)
        self._superseded, self._open = Superseded(ledger), dict[int, ShardWriter]()
        self._lost, self._tables_seen = set[int](), set[str]()
        self._room = threading.Condition()  # guards everything below
        self._progress, self._rate = SinkProgress(), RecentRate()
        self._pending_bytes = self._num_publishing = 0
        self._error: BaseException | None = None
        self._error_raised = self._is_abandoned = False
        self._encoders = ThreadPoolExecutor(num_threads, thread_name_prefix="offdiff-encode")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="offdiff-write")
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="offdiff-publish")
        self._heartbeat = Heartbeat(task=task, num_tasks=num_tasks, worker=worker)
        self._beat()
        self._stopped = threading.Event()
        self._beater = threading.Thread(target=self._beat_on, name="offdiff-heartbeat", daemon=True)
        self._beater.start()

    def open_shard(
        self,
        shard: Shard,
        rows: Sequence[ManifestRow | RowFault],
        *,
        retry_failed: bool = False,
        generation: int | None = None,
    ) -> ImageKeys:
        """Begins or resumes a shard; it is published as soon as all its images are in.

        Args:
            shard: Which rows.
            rows: Those rows, in order; a ``RowFault`` for each that is quarantined.
            retry_failed: Make images again that failed before, also of a published shard.
            generation: Of this owner of the shard, see `ShardWriter`.

        Returns:
            Images that are here already: only the others are to be submitted.

        Raises:
            JobInterrupted: The disk is full and stayed so.
            JobError: The disk failed.
        """
        self._raise_error()
        self._ledger.refresh(shard)
        number, marker = self._ledger.next_number(shard), self._ledger.marker(shard)
        if marker is None and self._patience.do(lambda: self._superseded.restore(shard, rows, number)):
            number, marker = number + 1, self._ledger.marker(shard)
        if marker is not None and not (retry_failed and marker.has_failures):
            images = ShardImages(rows)
            self._count(num_recovered=len(images), num_shards=1)
            return ImageKeys.all_of(images)
        make = functools.partial(
            ShardWriter,
            self._ledger,
            shard,
            rows,
            number=number,
            generation=generation,
            task=self._task,
            worker=self._worker,
            image_format=self._image_format,
            retry_failed=retry_failed,
        )
        writer = self._patience.do(make)
        if marker is not None:
            self._adopt_published(writer)
        else:
            self._patience.do(lambda: writer.adopt(self._superseded.records(rows, writer.missing)))
        finished = writer.finished
        with self._room:
            self._open[shard.index] = writer
            self._lost.discard(shard.index)
            self._heartbeat.shards[shard.index] = OpenShard(
                num_images=len(writer.images), num_ok=writer.num_ok, num_failed=writer.num_failed
            )
        self._count(num_recovered=len(finished))
        if writer.complete:
            self._complete(writer)
        return finished

    def _adopt_published(self, writer: ShardWriter) -> None:
        out, shard = self._ledger.out, writer.shard
        self._patience.do(lambda: self._ledger.roll_forward(shard))
        with self._ledger.tables_at_hand(shard):
            self._patience.do(lambda: writer.adopt(record for _, record in published_records(out, shard)))
            writer.count_failures(published_failures(out, shard))

    @in_stage("wait_sink")
    def submit(self, shard_index: int, image: ImageTask, output: RequestOutput) -> None:
        """Hands a finished or failed image in; waits while too much is unwritten.

        An image of a shard that was lost is dropped.

        Raises:
            JobInterrupted: The disk is full and stayed so.
            JobError: Writing failed, now or for an earlier image.
        """
        assert output.status != "aborted", "an aborted request has nothing to record"
        num_bytes = output.pixels.nbytes if output.pixels is not None else 0
        with self._room:
            writer = self._open.get(shard_index)
            if shard_index in self._lost:
                return
        assert writer is not None, f"shard {shard_index} is not open"
        self._admit(num_bytes)
        self._encoders.submit(self._encode, writer, image, output, num_bytes)

    def finished(self, shard_index: int) -> ImageKeys | None:
        """Images of a shard that a kill cannot lose any more, as of now; None when it is not open here."""
        return None if (writer := self._open.get(shard_index)) is None else writer.finished

    def num_failed(self, shard_index: int) -> int:
        """Failed images of an open shard that are written; 0 when it is not open here."""
        return 0 if (writer := self._open.get(shard_index)) is None else writer.num_failed

    def is_open(self, shard_index: int) -> bool:
        """Whether a shard is still made or published here; any thread may ask."""
        return shard_index in self._open

    def abandon(self) -> None:
        """The job stops early: no upload is begun any more, and no space waited for."""
        self._is_abandoned = True
        self._patience.end()

    def drain(self) -> None:
        """Waits until everything handed in is written and survives a power loss.

        Raises:
            JobError: Writing failed.
        """
        self._settle()
        self._raise_error()

    @in_stage("wait_sink")
    def close(self, *, abandon: bool = False) -> None:
        """Writes what was handed in and ends the threads.

        Args:
            abandon: The job stops early: unfinished shards stay behind as partials. Otherwise every
                opened shard must be complete.

        Raises:
            JobError: Writing failed, and nobody was told yet.
        """
        if self._stopped.is_set():
            return
        if abandon:
            self.abandon()
        self._settle()
        self._stopped.set()
        self._beater.join()
        self._encoders.shutdown()
        self._writer.shutdown()
        self._publisher.shutdown()
        for writer in self._open.values():
            writer.close()
        failed = abandon or self._error is not None
        assert failed or not self._open, f"shards {sorted(self._open)} are not complete"
        self._heartbeat.state = "stopped" if failed else "done"
        with contextlib.suppress(DiskFullError):
            self._beat()
        if not self._error_raised:
            self._raise_error()

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(abandon=kind is not None)

    @property
    def progress(self) -> SinkProgress:
        """A snapshot; any thread may ask."""
        with self._room:
            return self._progress

    def _count(self, **more: int) -> None:
        with self._room:
            sums = {name: getattr(self._progress, name) + number for name, number in more.items()}
            self._progress = replace(self._progress, **sums)
            self._room.notify_all()

    def _admit(self, num_bytes: int) -> None:
        def has_room() -> bool:
            pending, total = self._progress.num_pending, self._pending_bytes + num_bytes
            is_full = pending >= self._max_pending or total > MAX_PENDING_BYTES
            return pending == 0 or not (is_full or self._num_publishing > MAX_PUBLISHING)

        with self._room:
            self._room.wait_for(lambda: self._error is not None or has_room())
            self._raise_error()
            self._pending_bytes += num_bytes
            self._count(num_pending=1)

    def _release(self, num_bytes: int) -> None:
        with self._room:
            self._pending_bytes -= num_bytes
            self._count(num_pending=-1)

    def _raise_error(self) -> None:
        if self._error is not None:
            self._error_raised = True
            raise self._error

    def _fail(self, error: BaseException) -> None:
        with self._room:
            if self._error is None:
                self._error = error
            self._room.notify_all()

    @in_stage("image_encode")
    def _encode(self, writer: ShardWriter, image: ImageTask, output: RequestOutput, num_bytes: int) -> None:
        try:
            record = make_record(
                image,
                output,
                row_hash=writer.row_hash(image.row),
                earlier_attempts=writer.earlier_attempts((image.row, image.image_index)),
                image_format=self._image_format,
                image_level=self._image_level,
                task=self._task,
                worker=self._worker,
            )
            self._writer.submit(self._guarded, lambda: self._write(writer, record), num_bytes)
        except BaseException as error:
            self._fail(error)
            self._release(num_bytes)

    def _guarded(self, work: Callable[[], None], num_bytes: int | None) -> None:
        """Runs in the writing thread: after an error nothing more is written."""
        try:
            if self._error is None:
                work()
        except BaseException as error:
            self._fail(error)
        finally:
            if num_bytes is not None:
                self._release(num_bytes)

    @in_stage("write")
    def _write(self, writer: ShardWriter, record: Record) -> None:
        is_lost = self._open.get(writer.shard.index) is not writer
        if is_lost or not self._patience.do(lambda: writer.append(record)):
            return
        is_ok = record.status == "ok"
        with self._room:
            shard = self._heartbeat.shards[writer.shard.index]
            shard.num_ok += is_ok
            shard.num_failed += not is_ok
            self._rate.count()
        self._count(num_ok=is_ok, num_failed=not is_ok)
        if writer.complete:
            self._complete(writer)

    def _complete(self, writer: ShardWriter) -> None:
        """Uploads have a thread of their own: other images are not durable until they are written."""
        self._patience.do(writer.sync)
        if self._ledger.remote is None:
            self._publish(writer)
            return
        with self._room:
            self._num_publishing += 1
            self._count(num_pending=1)
        self._publisher.submit(self._guarded, lambda: self._publish_next(writer), 0)

    def _publish_next(self, writer: ShardWriter) -> None:
        """One that waited; not when the job stops, since its partials are whole: the next run does it."""
        with self._room:
            self._num_publishing -= 1
        if not self._is_abandoned:
            self._publish(writer)

    @in_stage("publish")
    def _publish(self, writer: ShardWriter) -> None:
        try:
            marker = self._patience.do(writer.publish)
        except ShardLostError:
            self._lose(writer)
            return
        self._forget(writer)
        self._count(num_shards=1, num_invalid_rows=marker.num_invalid_rows)
        tables = {file.path.split("/")[0] for file in marker.files}
        if not tables <= self._tables_seen:
            self._tables_seen |= tables
            self._patience.do(lambda: write_card(self._ledger))

    def _lose(self, writer: ShardWriter) -> None:
        """Somebody else has the shard: that is his work, and no fault."""
        index = writer.shard.index
        with self._room:
            self._lost.add(index)
        self._forget(writer)
        self._count(num_lost_shards=1)
        writer.forget()
        self._say(f"shard {index} was published or taken over by another process: left to it")

    def _forget(self, writer: ShardWriter) -> None:
        with self._room:
            del self._open[writer.shard.index]
            del self._heartbeat.shards[writer.shard.index]

    def _settle(self) -> None:
        with self._room:
            self._room.wait_for(lambda: self._progress.num_pending == 0)
        self._writer.submit(self._guarded, self._sync, None).result()

    @in_stage("write")
    def _sync(self) -> None:
        """A power loss costs at most what was written since."""
        with self._room:
            writers = list(self._open.values())  # the other thread may open one meanwhile
        for writer in writers:
            if not writer.complete:  # else it is about to be published, elsewhere perhaps
                writer.sync()

    def _beat_on(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self._writer.submit(self._guarded, self._sync, None)
            if self._gets_on():
                with contextlib.suppress(JobError):  # not worth stopping for: the next image will tell
                    self._beat()

    def _beat(self) -> None:
        with self._room:
            beat = self._heartbeat
            beat.images_per_s = self._rate.per_s
            beat.num_ok, beat.num_failed = self._progress.num_ok, self._progress.num_failed
            snapshot = replace(beat, shards=dict(beat.shards))
        self._ledger.beat(snapshot)
