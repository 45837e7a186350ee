"""Clocks and counters of the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from offline_diffusion.engine.cost import CostMeter, StepSample
from offline_diffusion.request import RequestMetrics
from offline_diffusion.stages import HasStages

MAX_STEPS_IN_FLIGHT = 2
"""Steps the host may be ahead of the device: enough to hide launches, few enough to stay responsive."""

SAMPLE_S = 0.2
"""Longer than a decode beside the steps mostly lasts."""

NUM_WARM_UP_STEPS = 3
"""Libraries start up in the first steps: these tell nothing of the next."""


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started. ``step_fill`` is the mean share of the token budget in use."""

    num_steps: int = 0
    num_step_images: int = 0
    num_step_tokens: int = 0
    num_step_seqs: int = 0
    budget_tokens: int = 0
    device_s: float = 0.0
    num_finished: int = 0
    num_failed: int = 0

    def count_step(self, num_images: int, num_seqs: int, num_tokens: int, budget_tokens: int) -> None:
        """One step more, with what was in it; its time comes later."""
        self.num_steps += 1
        self.num_step_images += num_images
        self.num_step_seqs += num_seqs
        self.num_step_tokens += num_tokens
        self.budget_tokens += budget_tokens

    @property
    def step_fill(self) -> float:
        return self.num_step_tokens / self.budget_tokens if self.budget_tokens else 0.0


@dataclass(frozen=True, slots=True)
class StepShare:
    """One request's part in a step: its tokens, and the squares of its sequences' lengths."""

    metrics: RequestMetrics
    num_tokens: int
    sum_squares: int


@dataclass(slots=True)
class WorkCounts:
    """What was done beside the steps since the start, counted by ``ModelRunner``."""

    num_prompts: int = 0
    num_images: int = 0
    num_pixels: int = 0


class RunsSteps(HasStages, Protocol):
    """What a `StepTimer` asks of a ``ModelRunner``."""

    counts: WorkCounts


Mark = torch.cuda.Event | float
"""A point in time: on the device, or on the host where work is synchronous."""


@dataclass(slots=True)
class _TimedStep:
    since: Mark
    start: Mark
    end: Mark
    shares: Sequence[StepShare]
    work: StepSample

    def is_finished(self) -> bool:
        return isinstance(self.end, float) or bool(self.end.query())


class StepTimer:
    """Measures steps on the device without waiting for them, shares their time out by tokens, and
    hands what they did in which time to ``costs``.

    Args:
        device: Where steps run.
        stats: Takes their time.
        runner: Its ``counts`` are read at the end of every step; its ``stages`` hear of it when the host
            had to wait all the same.
    """

    def __init__(self, device: torch.device, stats: EngineStats, runner: RunsSteps) -> None:
        self.costs = CostMeter(SAMPLE_S if device.type == "cuda" else 0.0)
        self._runner = runner
        self._on_gpu = device.type == "cuda"
        self._stats = stats
        self._counted = replace(runner.counts)
        self._pending: deque[_TimedStep] = deque()
        self._last_end: Mark | None = None
        self._num_to_warm_up = NUM_WARM_UP_STEPS

    def resume(self) -> None:
        """Work begins; after a pause time counts from here on, not only from the first step."""
        if self._last_end is None:
            self._last_end = self._mark()

    def begin(self) -> Mark:
        """The start of a step on the current stream."""
        return self._mark()

    def end(self, start: Mark, shares: Sequence[StepShare]) -> None:
        """Closes a step; ``shares`` lists the requests of the pack."""
        end = self._mark()
        since = start if self._last_end is None else self._last_end
        self._append(_TimedStep(since, start, end, shares, self._work_of(shares)))
        self._last_end = end

    def lap(self) -> None:
        """Tells what was done since a step apart from the next; where work is not done at once that cannot
        be told."""
        if not self._on_gpu and self._last_end is not None and self._runner.counts != self._counted:
            self._close_lap(self._last_end)

    def pause(self) -> None:
        """Nothing runs now: closes what followed the last step, and counts no time until the next."""
        if self._last_end is not None:
            self._close_lap(self._last_end)
            self._last_end = None

    def _close_lap(self, since: Mark) -> None:
        now = self._mark()
        self._append(_TimedStep(since, now, now, (), self._work_of(())))
        self._last_end = now

    def settle_all(self) -> None:
        """Books the time of all steps; waits for the device."""
        while self._pending:
            self._settle(self._pending.popleft())

    def settle_finished(self) -> None:
        """Books the time of steps that the device is through with, waiting for none.

        Called when an image has arrived, which its own steps preceded.
        """
        while self._pending and self._pending[0].is_finished():
            self._settle(self._pending.popleft())

    def _append(self, step: _TimedStep) -> None:
        self._pending.append(step)
        while len(self._pending) > MAX_STEPS_IN_FLIGHT or (self._pending and not self._on_gpu):
            self._settle(self._pending.popleft())

    def _work_of(self, shares: Sequence[StepShare]) -> StepSample:
        """The work since the last look, and that of a step; its time comes when it is settled."""
        last, self._counted = self._counted, replace(self._runner.counts)
        return StepSample(
            num_tokens=sum(share.num_tokens for share in shares),
            sum_squares=sum(share.sum_squares for share in shares),
            seconds=0.0,
            num_steps=bool(shares),
            num_images=self._counted.num_images - last.num_images,
            num_pixels=self._counted.num_pixels - last.num_pixels,
            num_prompts=self._counted.num_prompts - last.num_prompts,
        )

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self, step: _TimedStep) -> None:
        if isinstance(step.end, torch.cuda.Event):
            with self._runner.stages.stage("wait_device"):
                step.end.synchronize()
        elapsed = _seconds(step.start, step.end)
        self._stats.device_s += elapsed
        for share in step.shares:
            share.metrics.device_s += elapsed * share.num_tokens / step.work.num_tokens
        if step.shares and self._num_to_warm_up:
            self._num_to_warm_up -= 1
        else:
            self.costs.add(replace(step.work, seconds=_seconds(step.since, step.end)))


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return float(start.elapsed_time(end)) / 1000
