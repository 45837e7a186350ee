"""Runs of our engine: every step of every image, from the prompt's text to pixels on the host."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from clock import Clock
from workloads import like

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.stats import EngineStats
from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.request import Request

WARM_UP_STEPS = 2

POLL_S = 0.01
"""Pause of the thread that watches steps: fine enough for stalls, too rare to slow the host."""


class RunFailed(Exception):
    """Not every request came back as an image: a benchmark of that would be of something else."""


@dataclass(frozen=True)
class EngineRun:
    """What a run took.

    Args:
        wall_s: From handing the requests over until the last image is on the host.
        denoise_s: Device seconds inside steps.
        encode_s, decode_s: Sums over requests, host and device seconds; both overlap with steps.
        step_fill: Mean share of the token budget in use.
        gaps: Seconds and tokens between one observed step and the next.
    """

    num_images: int
    wall_s: float
    denoise_s: float
    encode_s: float
    decode_s: float
    step_fill: float
    num_steps: int
    prompt_tokens: float
    gaps: list[tuple[float, int]]


def make_engine(model: DiffusionModel, **options: Any) -> Engine:
    """An engine over ``model``; options that are None keep the engine's default."""
    return Engine(
        model, EngineConfig(**{name: value for name, value in options.items() if value is not None})
    )


def warm_up(engine: Engine, requests: Sequence[Request]) -> None:
    """Two steps of about one full pack of requests like these."""
    count, room = 0, engine.scheduler.max_num_batched_tokens
    while room > 0 and count < min(len(requests), engine.scheduler.max_num_seqs):
        room -= _image_tokens(engine, requests[count])
        count += 1
    for _ in engine.generate(like(requests, "warm-up", steps=WARM_UP_STEPS, count=count)):
        pass


def trace_requests(engine: Engine, requests: Sequence[Request]) -> list[Request]:
    """Requests like these, two and a half packs of them."""
    num_tokens = sum(_image_tokens(engine, request) for request in requests) / len(requests)
    scheduler = engine.scheduler
    pack = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens / num_tokens)
    return like(requests, "trace", count=max(3, round(2.5 * pack)))


def _image_tokens(engine: Engine, request: Request) -> int:
    tokens = engine.model.capabilities.num_image_tokens(request.height, request.width)
    return tokens * (2 if request.cfg_active else 1)


def run(engine: Engine, requests: Sequence[Request], clock: Clock) -> EngineRun:
    """Draws ``requests`` in one go.

    Raises:
        RunFailed: A request failed.
    """
    clock.synchronize()
    before = _copy(engine.stats)
    with StepWatch(engine) as watch:
        start = time.perf_counter()
        outputs = list(engine.generate(requests))
        clock.synchronize()
        wall_s = time.perf_counter() - start
    errors = [output.error for output in outputs if output.status != "ok"]
    if errors or len(outputs) != len(requests):
        raise RunFailed(
            f"{len(outputs)} of {len(requests)} requests came back, {len(errors)} failed: {errors[:1]}"
        )
    stats = _difference(engine.stats, before)
    metrics = [output.metrics for output in outputs]
    return EngineRun(
        num_images=len(outputs),
        wall_s=wall_s,
        denoise_s=stats.device_s,
        encode_s=sum(own.encode_s for own in metrics),
        decode_s=sum(own.decode_s for own in metrics),
        step_fill=stats.step_fill,
        num_steps=stats.num_steps,
        prompt_tokens=statistics.fmean(own.prompt_tokens for own in metrics),
        gaps=watch.gaps(),
    )


def run_shape_by_shape(engine: Engine, requests: Sequence[Request], clock: Clock) -> EngineRun:
    """The same engine with presorted requests: only equal shapes share a step, guided or not."""
    shapes: dict[tuple[int, int], list[Request]] = defaultdict(list)
    for request in requests:
        shapes[(request.height, request.width)].append(request)
    runs = [run(engine, group, clock) for group in shapes.values()]
    num_images, num_steps = len(requests), sum(own.num_steps for own in runs)
    return EngineRun(
        num_images=num_images,
        wall_s=sum(own.wall_s for own in runs),
        denoise_s=sum(own.denoise_s for own in runs),
        encode_s=sum(own.encode_s for own in runs),
        decode_s=sum(own.decode_s for own in runs),
        step_fill=sum(own.step_fill * own.num_steps for own in runs) / num_steps,
        num_steps=num_steps,
        prompt_tokens=sum(own.prompt_tokens * own.num_images for own in runs) / num_images,
        gaps=[gap for own in runs for gap in own.gaps],
    )


def _copy(stats: EngineStats) -> EngineStats:
    return EngineStats(**{item.name: getattr(stats, item.name) for item in fields(stats)})


def _difference(after: EngineStats, before: EngineStats) -> EngineStats:
    """Counts and seconds since ``before``; what is no number is as it is now."""

    def since(name: str) -> Any:
        now = getattr(after, name)
        return now - getattr(before, name) if isinstance(now, int | float) else now

    return EngineStats(**{item.name: since(item.name) for item in fields(after)})


class StepWatch:
    """Notes from a thread of its own when a step's tokens are counted: the host's view of steps."""

    def __init__(self, engine: Engine) -> None:
        self._stats = engine.stats
        self._seen: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> StepWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        last = self._stats.num_step_tokens
        while not self._stop.wait(POLL_S):
            tokens = self._stats.num_step_tokens
            if tokens != last:
                self._seen.append((time.perf_counter(), tokens))
                last = tokens

    def gaps(self) -> list[tuple[float, int]]:
        """Seconds and tokens from each observation to the next; what comes before the first step is none."""
        pairs = pairwise(self._seen)
        return [(later - earlier, tokens - before) for (earlier, before), (later, tokens) in pairs]


def longest_gap(gaps: Sequence[tuple[float, int]]) -> dict[str, float | int | None]:
    """The longest gap between steps with its tokens, and the longest stall.

    A gap's stall is what it took beyond its tokens at the median rate: a large step is no stall.
    """
    if not gaps:
        return {"longest_gap_s": None, "longest_gap_tokens": None, "longest_stall_s": None}
    rate = statistics.median(seconds / max(1, tokens) for seconds, tokens in gaps)
    seconds, tokens = max(gaps)
    return {
        "longest_gap_s": seconds,
        "longest_gap_tokens": tokens,
        "longest_stall_s": max(0.0, *(own - rate * num for own, num in gaps)),
    }
