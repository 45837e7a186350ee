"""diffusers' own pipeline, timed over a few steps of every kind of call that a workload takes."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from clock import Clock, Mark
from plan import RivalOptions, UnitKey, rival_units, sample

from offline_diffusion.request import Request

MAX_PROMPT_TOKENS = 512

NUM_COMPILE_STEPS = 2
"""Steps before timing where blocks are compiled: the second also meets both branches' text lengths."""


@dataclass(frozen=True)
class RivalTime:
    """Denoise seconds of a whole workload, from what was really run.

    ``num_timed_steps`` and ``num_timed_images`` count the latter, for this workload and earlier ones that had
    calls of the same kind.
    """

    seconds: float
    num_timed_steps: int
    num_timed_images: int


@dataclass(frozen=True)
class _UnitTime:
    step_s: float
    num_steps: int
    num_images: int


class Rival:
    """Times ``QwenImagePipeline`` as it is, its denoise loop alone: transformer, guidance, noise scheduler.

    Args:
        pipeline: With its weights.
        clock: Of its device.
        options: How much is run.
    """

    def __init__(self, pipeline: Any, clock: Clock, options: RivalOptions) -> None:
        self._pipeline, self._clock, self._options = pipeline, clock, options
        self._eager: dict[UnitKey, _UnitTime] = {}
        self._compiled: dict[UnitKey, _UnitTime] | None = None

    def time(self, requests: Sequence[Request], batch: int) -> RivalTime:
        """Seconds of all steps of ``requests`` in calls of at most ``batch`` images.

        A step takes the median of the timed ones of its kind; calls differ in prompt lengths alone.
        """
        seconds, num_steps, num_images = 0.0, 0, 0
        for key, units in rival_units(requests, batch).items():
            timed = self._unit_time(key, units)
            seconds += timed.step_s * sum(unit[0].num_inference_steps for unit in units)
            num_steps += timed.num_steps
            num_images += timed.num_images
        return RivalTime(seconds, num_steps, num_images)

    def _unit_time(self, key: UnitKey, units: list[list[Request]]) -> _UnitTime:
        known = self._eager if self._compiled is None else self._compiled
        is_single = key[-1] == 1
        if not (is_single and key in known):  # a batch of one is the serial call
            chosen = sample(units, self._options.num_samples)
            steps = [self._step_times(unit) for unit in chosen]
            known[key] = _UnitTime(
                statistics.fmean(map(statistics.median, steps)), sum(map(len, steps)), sum(map(len, chosen))
            )
        return known[key]

    def _step_times(self, unit: list[Request]) -> list[float]:
        if self._compiled is not None:
            self._run(unit, NUM_COMPILE_STEPS)
        marks = self._run(unit, self._options.num_steps + 1)
        return [self._clock.seconds(*pair) for pair in pairwise(marks)]

    def _run(self, unit: list[Request], num_steps: int) -> list[Mark]:
        """One call of the pipeline; a mark after each of its steps."""
        marks: list[Mark] = []

        def on_step_end(*_: Any) -> dict[str, Any]:
            marks.append(self._clock.mark())
            return {}

        first = unit[0]
        self._pipeline(
            prompt=[request.prompt for request in unit],
            negative_prompt=[request.negative_prompt for request in unit] if first.cfg_active else None,
            true_cfg_scale=first.true_cfg_scale if first.cfg_active else 1.0,
            height=first.height,
            width=first.width,
            num_inference_steps=num_steps,
            generator=[torch.Generator("cpu").manual_seed(request.seed) for request in unit],
            max_sequence_length=MAX_PROMPT_TOKENS,
            output_type="latent",
            callback_on_step_end=on_step_end,
        )
        return marks

    @contextlib.contextmanager
    def compiled(self, backend: str) -> Iterator[None]:
        """Inside, the transformer's blocks are compiled, as diffusers' documentation advises.

        Args:
            backend: Of ``torch.compile``.
        """
        transformer = self._pipeline.transformer
        transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
        self._compiled = {}
        try:
            yield
        finally:
            self._compiled = None
            for block in transformer.transformer_blocks:
                block._compiled_call_impl = None  # there is no public way back from Module.compile()
            torch.compiler.reset()
            if self._clock.on_gpu:
                torch.cuda.empty_cache()
