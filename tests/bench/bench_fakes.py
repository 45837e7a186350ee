"""Requests and an engine for tests of the replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offline_diffusion.bench.replay import ReplayRequest
from offline_diffusion.bench.simulate import SimulatedClock, SimulatedEngine
from offline_diffusion.config import EngineConfig
from offline_diffusion.data.rows import ImageTask, RowImages
from offline_diffusion.engine.cost import CostModel
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import Request

CAPABILITIES = Capabilities(family="fake", pipeline="Fake")
TEXT = "four"  # bytes: one token


def asked(
    row: int, arrival: float, *, side: int = 16, steps: int = 1, count: int = 1, prompt: str = TEXT
) -> ReplayRequest:
    """``count`` images of ``side`` pixels, (side / 16)² + 1 tokens each."""
    request = Request(
        request_id=f"{row}-0",
        prompt=prompt,
        height=side,
        width=side,
        num_inference_steps=steps,
        true_cfg_scale=1.0,
        seed=0,
    )
    first = ImageTask(row, 0, str(row), request, side, side, side, side)
    return ReplayRequest(RowImages(first, count), arrival, None, f"r{row}")


def trace_of(arrivals: Sequence[float], **shape: int) -> list[ReplayRequest]:
    """Equal requests at these times."""
    return [asked(row, arrival, **shape) for row, arrival in enumerate(arrivals)]  # type: ignore[arg-type]


def engine_of(
    cost: CostModel, *, budget: int = 1000, seqs: int = 100, policy: str = "fifo", **options: Any
) -> tuple[SimulatedEngine, SimulatedClock]:
    """An engine in first-in-first-out order."""
    clock = SimulatedClock()
    config = EngineConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        scheduling_policy=policy,  # type: ignore[arg-type]
        **options,
    )
    return SimulatedEngine(CAPABILITIES, config, cost, clock), clock
