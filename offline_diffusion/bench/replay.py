"""Replays a trace on an engine: adds what has arrived, steps, takes what is done. Free of torch.

The engine may be the real one or `simulate.SimulatedEngine`: this loop and the scheduler are the same.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from offline_diffusion.bench.records import Replayed, RequestRecord, StepSpan
from offline_diffusion.bench.trace import TraceRequest
from offline_diffusion.data.rows import ImageTask, RowDefaults, RowFault, RowImages, resolve_row
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import Request, RequestOutput

MAX_QUEUED = 256
"""Images that wait in the engine, the others before it: as many as ``pack`` looks at. ``shortest`` and
``deadline``, which look at all that wait, choose among these only when more are at hand."""


MAX_SLEEP_S = 0.2


class Clock(Protocol):
    """Time in seconds, real or simulated."""

    next_event: float
    """Set by the driver: when it next has something to do, on this clock."""

    def __call__(self) -> float: ...

    def wait_until(self, then: float) -> None:
        """Returns at ``then`` on this clock, or some time before."""


class WallClock:
    """Real time."""

    def __init__(self) -> None:
        self.next_event = math.inf

    def __call__(self) -> float:
        return time.perf_counter()

    def wait_until(self, then: float) -> None:
        """Sleeps, not for long: someone may want to stop."""
        time.sleep(min(MAX_SLEEP_S, max(0.0, then - self())))


class ReplayEngine(Protocol):
    """What a replay asks of an engine."""

    @property
    def stats(self) -> Any:
        """Counts as `engine.stats.EngineStats` has them."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def has_unfinished(self) -> bool: ...

    def add_request(self, request: Request, *, arrival: float) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def reset_peak_memory(self) -> None:
        """From now on peaks of memory are those of what comes."""


@dataclass(slots=True)
class ReplayRequest:
    """A request of a trace that the model can draw.

    Args:
        images: To be drawn.
        arrival: Seconds since the replay begins.
        slo_ms: As of the trace.
        id: Likewise.
    """

    images: RowImages
    arrival: float
    slo_ms: float | None
    id: str

    def record(self) -> RequestRecord:
        """Before it has run."""
        request = self.images.first.request
        return RequestRecord(
            id=self.id,
            width=request.width,
            height=request.height,
            num_inference_steps=request.num_inference_steps,
            num_images=len(self.images),
            arrival=self.arrival,
            slo_ms=self.slo_ms,
        )


def resolve_trace(
    requests: Sequence[TraceRequest], capabilities: Capabilities, defaults: RowDefaults
) -> tuple[list[ReplayRequest], list[RowFault]]:
    """What a model can draw of a trace, and what it cannot with reasons."""
    found, faults = [], []
    for request in requests:
        images = resolve_row(request.row, capabilities, defaults)
        if isinstance(images, RowFault):
            faults.append(images)
        else:
            found.append(ReplayRequest(images, request.arrival, request.slo_ms, request.row.id))
    return found, faults


@dataclass(slots=True)
class _InFlight:
    record: RequestRecord
    num_left: int


@dataclass
class Replay:
    """One replay.

    Args:
        engine: Fresh, or at least idle.
        clock: That of the engine.
        closed_loop: Arrival times are ignored: a request arrives when another one is done, so that
            ``max_concurrency`` are in flight (all at once without it).
        max_concurrency: Most requests in flight. In an open loop those above it wait, and that counts.
        stopped: Asked between steps whether to end.
        observer: Hears how many requests are done.
    """

    engine: ReplayEngine
    clock: Clock
    closed_loop: bool = False
    max_concurrency: int | None = None
    stopped: Callable[[], bool] = lambda: False
    observer: Callable[[int], None] = lambda _: None
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)
    _queued: deque[ImageTask] = field(default_factory=deque)
    _spans: list[StepSpan] = field(default_factory=list)
    _start: float = 0.0
    _num_done: int = 0

    def run(self, requests: Sequence[ReplayRequest]) -> Replayed:
        """Replays ``requests``, which must be in order of arrival, to the end of the last."""
        records = [request.record() for request in requests]
        coming = deque(zip(requests, records, strict=True))
        self._start, busy_before = self.clock(), self.engine.stats.device_s
        while coming or self._in_flight:
            if self.stopped():
                break
            self._admit(coming)
            if self._in_flight:
                self._step()
            elif coming:
                self.clock.wait_until(self._time_of(coming[0][0]))
        finished = [record for record in records if record.finished is not None]
        return Replayed(
            finished,
            self._spans,
            duration=self._now(),
            device_s=self.engine.stats.device_s - busy_before,
            num_unfinished=len(records) - len(finished),
        )

    def _now(self) -> float:
        return self.clock() - self._start

    def _admit(self, coming: deque[tuple[ReplayRequest, RequestRecord]]) -> None:
        """Takes in what has arrived, and hands the engine what it looks at."""
        while coming and self._may_come(coming[0][0]):
            request, record = coming.popleft()
            if self.closed_loop:
                record.arrival = self._now()
            self._in_flight[request.images.row] = _InFlight(record, len(request.images))
            self._queued.extend(request.images)
        self._hand_over()
        is_full = self.max_concurrency is not None and len(self._in_flight) >= self.max_concurrency
        is_timed = coming and not self.closed_loop and not is_full
        self.clock.next_event = self._time_of(coming[0][0]) if is_timed else math.inf

    def _hand_over(self) -> None:
        """Gives the engine as many images as it looks at."""
        while self._queued and self.engine.num_waiting < MAX_QUEUED:
            image = self._queued.popleft()
            record = self._in_flight[image.row].record
            request = replace(image.request, slo_ms=record.slo_ms)
            self.engine.add_request(request, arrival=self._start + record.arrival)

    def _may_come(self, request: ReplayRequest) -> bool:
        if self.max_concurrency is not None and len(self._in_flight) >= self.max_concurrency:
            return False
        return self.closed_loop or self._time_of(request) <= self.clock()

    def _time_of(self, request: ReplayRequest) -> float:
        """Its arrival on the clock. What is waited for must be what is compared: floats round."""
        return self._start + request.arrival

    def _step(self) -> None:
        start, before = self._now(), self._counts()
        outputs = self.engine.step()
        end = self._now()
        steps, images, tokens, budget = (n - m for n, m in zip(self._counts(), before, strict=True))
        if steps:
            num_waiting = self.engine.num_waiting + len(self._queued)
            self._spans.append(StepSpan(start, end, steps, images, tokens, budget, num_waiting))
        for output in outputs:
            if output.finished:  # else it is a preview
                self._take(output, end)

    def _counts(self) -> tuple[int, int, int, int]:
        stats = self.engine.stats
        return stats.num_steps, stats.num_step_images, stats.num_step_tokens, stats.budget_tokens

    def _take(self, output: RequestOutput, now: float) -> None:
        row = int(output.request_id.partition("-")[0])  # as `resolve_row` names a row's images
        flight, metrics = self._in_flight[row], output.metrics
        record = flight.record
        if output.status != "ok":
            record.error = f"{output.error_type}: {output.error}"
        if metrics.steps_run:
            started = record.arrival + metrics.queue_s
            record.started = started if record.started is None else min(started, record.started)
        record.encode_s = max(record.encode_s, metrics.encode_s)
        record.denoise_s = max(record.denoise_s, metrics.denoise_s)
        record.decode_s = max(record.decode_s, metrics.decode_s)
        record.peak_memory_bytes = max(record.peak_memory_bytes, metrics.peak_memory_bytes)
        flight.num_left -= 1
        if not flight.num_left:
            record.finished = now
            del self._in_flight[row]
            self._num_done += 1
            self.observer(self._num_done)
