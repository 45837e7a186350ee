"""diffusers' own pipeline of any family, timed over a few steps of every kind of call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from clock import Clock, Mark
from plan import rival_units, sample

from offline_diffusion.request import Request

NUM_SAMPLES = 2
"""Calls of each kind, whose mean holds for all."""


@dataclass(frozen=True)
class Times:
    """Seconds of a whole workload.

    Args:
        denoise_s: Of all steps of all images.
        wall_s: From text to pixels on the host.
        num_timed_steps: Steps that each timed image really took; the others are reckoned with the same time.
    """

    denoise_s: float
    wall_s: float
    num_timed_steps: int


def time_diffusers(
    pipeline: Any, requests: Sequence[Request], batch: int, clock: Clock, max_steps: int
) -> Times:
    """Seconds of ``requests`` in calls of at most ``batch`` images of one shape.

    Args:
        max_steps: Timed steps of a call, after one that warms up.
    """
    denoise_s, wall_s = 0.0, 0.0
    num_steps = requests[0].num_inference_steps
    num_run = min(num_steps, max_steps + 1)
    for units in rival_units(requests, batch).values():
        _call(pipeline, units[0], 1, clock)
        timed = [_call(pipeline, unit, num_run, clock) for unit in sample(units, NUM_SAMPLES)]
        steps = [statistics.median(own[1:] or own) for own, _ in timed]
        step_s = statistics.fmean(steps)
        beside_s = statistics.fmean(wall - sum(own) for own, wall in timed)
        denoise_s += num_steps * step_s * len(units)
        wall_s += (num_steps * step_s + beside_s) * len(units)
    return Times(denoise_s, wall_s, num_run)


def _call(pipeline: Any, unit: Sequence[Request], num_steps: int, clock: Clock) -> tuple[list[float], float]:
    """Device seconds of each step, and wall seconds of the call from text to pixels on the host."""
    marks: list[Mark] = []

    def on_start(*_: Any) -> None:
        if not marks:
            marks.append(clock.mark())

    def on_step_end(*_: Any) -> dict[str, Any]:
        marks.append(clock.mark())
        return {}

    denoiser = getattr(pipeline, "transformer", None) or pipeline.unet
    hook = denoiser.register_forward_pre_hook(on_start)
    clock.synchronize()
    start = time.perf_counter()
    pipeline(
        [own.prompt for own in unit],
        height=unit[0].height,
        width=unit[0].width,
        num_inference_steps=num_steps,
        guidance_scale=unit[0].guidance_scale,
        generator=[torch.Generator("cpu").manual_seed(own.seed) for own in unit],
        callback_on_step_end=on_step_end,
        output_type="np",
    )
    clock.synchronize()
    wall_s = time.perf_counter() - start
    hook.remove()
    return [clock.seconds(*pair) for pair in pairwise(marks)], wall_s
