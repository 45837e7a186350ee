"""What ``offdiff plan`` says of a job, against the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clock import Clock
from ours import run

from offline_diffusion.cli.plan import Estimate
from offline_diffusion.data.plan import PlanBuilder
from offline_diffusion.data.rows import ManifestRow, RowDefaults
from offline_diffusion.engine.cost import measured_cost
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.scheduler import LOOK_AHEAD
from offline_diffusion.request import Request, SamplingParams


def plan_estimate(
    engine: Engine, seen: Sequence[Request], planned: Sequence[Request], clock: Clock
) -> dict[str, Any]:
    """Fits the cost model to a run of ``seen``, then plans and runs ``planned``.

    Returns:
        Seconds, planned and real, and by what share of the real ones the plan is off.
    """
    run(engine, seen, clock)
    cost = measured_cost(engine)
    assert cost is not None, "too few steps to fit a cost model to"
    estimate = Estimate(cost.model, None, "").seconds(_plan(engine, planned).tasks[0])
    real = run(engine, planned, clock).wall_s
    return {"planned_s": estimate, "real_s": real, "error": abs(estimate / real - 1)}


def _plan(engine: Engine, requests: Sequence[Request]) -> Any:
    builder = PlanBuilder(
        engine.model.capabilities,
        RowDefaults(),
        shard_size=len(requests),
        max_num_batched_tokens=engine.scheduler.max_num_batched_tokens,
        max_num_seqs=engine.scheduler.max_num_seqs,
        look_ahead=LOOK_AHEAD,
    )
    for index, request in enumerate(requests):
        builder.add(_row(index, request))
    return builder.finish()


def _row(index: int, request: Request) -> ManifestRow:
    params = SamplingParams(
        height=request.height,
        width=request.width,
        num_inference_steps=request.num_inference_steps,
        true_cfg_scale=request.true_cfg_scale,
        negative_prompt=request.negative_prompt,
    )
    return ManifestRow(
        row=index,
        id=request.request_id,
        file="",
        line=index + 1,
        content_hash="",
        prompt=request.prompt,
        params=params,
        carried={},
    )
