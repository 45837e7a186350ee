"""Clocks and counters of the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offline_diffusion.request import RequestMetrics
from offline_diffusion.stages import HasStages

MAX_STEPS_IN_FLIGHT = 2
"""Steps the host may be ahead of the device: enough to hide launches, few enough to stay responsive."""


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started. ``step_fill`` is the mean share of the token budget in use."""

    num_steps: int = 0
    num_step_tokens: int = 0
    num_step_seqs: int = 0
    budget_tokens: int = 0
    device_s: float = 0.0
    num_finished: int = 0
    num_failed: int = 0

    @property
    def step_fill(self) -> float:
        return self.num_step_tokens / self.budget_tokens if self.budget_tokens else 0.0


@dataclass(slots=True)
class _TimedStep:
    start: torch.cuda.Event | float
    end: torch.cuda.Event | float
    shares: list[tuple[RequestMetrics, int]]
    num_tokens: int

    def is_finished(self) -> bool:
        return isinstance(self.end, float) or bool(self.end.query())


class StepTimer:
    """Measures steps on the device without waiting for them, and shares their time out by tokens.

    Args:
        device: Where the steps run.
        stats: Where their time is added up.
        runner: Whose ``stages`` hear of it when the host had to wait all the same.
    """

    def __init__(self, device: torch.device, stats: EngineStats, runner: HasStages) -> None:
        self._runner = runner
        self._on_gpu = device.type == "cuda"
        self._stats = stats
        self._pending: deque[_TimedStep] = deque()

    def begin(self) -> torch.cuda.Event | float:
        """The start of a step on the current stream."""
        return self._mark()

    def end(self, start: torch.cuda.Event | float, shares: Sequence[tuple[RequestMetrics, int]]) -> None:
        """Closes a step; ``shares`` lists each request's metrics and its tokens in the pack."""
        num_tokens = sum(tokens for _, tokens in shares)
        self._pending.append(_TimedStep(start, self._mark(), list(shares), num_tokens))
        while len(self._pending) > MAX_STEPS_IN_FLIGHT or (self._pending and not self._on_gpu):
            self._settle(self._pending.popleft())

    def settle_finished(self) -> None:
        """Books the time of steps that the device is through with, waiting for none.

        Called when an image has arrived, which its own steps preceded.
        """
        while self._pending and self._pending[0].is_finished():
            self._settle(self._pending.popleft())

    def _mark(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self, step: _TimedStep) -> None:
        if isinstance(step.start, float):
            assert isinstance(step.end, float)
            elapsed = step.end - step.start
        else:
            assert isinstance(step.end, torch.cuda.Event)
            with self._runner.stages.stage("wait_device"):
                step.end.synchronize()
            elapsed = step.start.elapsed_time(step.end) / 1000
        self._stats.device_s += elapsed
        for metrics, tokens in step.shares:
            metrics.device_s += elapsed * tokens / step.num_tokens
