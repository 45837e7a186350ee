"""The simulation against the real engine on this machine, through the cost model of the very run."""

from __future__ import annotations

import random

import pytest

from offline_diffusion.bench.replay import ReplayRequest, WallClock
from offline_diffusion.bench.session import Session
from offline_diffusion.config import EngineConfig, make_engine_config
from offline_diffusion.data.rows import ImageTask, RowImages
from offline_diffusion.request import Request


def mixed(count: int, rate: float, seed: int) -> list[ReplayRequest]:
    """Of three sizes and unlike steps, half guided, at Poisson times."""
    rng, requests, now = random.Random(seed), [], 0.0
    for row in range(count):
        side, steps = rng.choice((128, 192, 256)), rng.randint(6, 14)
        request = Request(
            request_id=f"{row}-0",
            prompt=f"a bowl of {row} plums on a table by the window",
            negative_prompt=rng.choice((None, "blurry")),
            height=side,
            width=side,
            num_inference_steps=steps,
            true_cfg_scale=4.0,
            seed=row,
        )
        images = RowImages(ImageTask(row, 0, str(row), request, side, side, side, side), 1)
        requests.append(ReplayRequest(images, now, None, str(row)))
        now += rng.expovariate(rate)
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fifo", "pack"])
def test_throughput_within_10_percent_and_p95_within_15(policy: str, tiny_model: object) -> None:
    from offline_diffusion.engine.cost import measured_cost
    from offline_diffusion.engine.engine import Engine
    from offline_diffusion.models.loader import load_model

    config: EngineConfig = make_engine_config(
        {"device": "cpu", "max_num_batched_tokens": 2200, "scheduling_policy": policy}
    )
    model = load_model(config)
    requests = mixed(60, 12.0, seed=1)
    session = Session(requests)
    engine = Engine(model, config)
    real = session.replay("real", {}, engine, WallClock()).numbers
    cost = measured_cost(engine)
    assert cost is not None
    [run] = session.simulated_runs({"m": config}, model.capabilities, cost.model, 2200)
    assert run.numbers["throughput_qps"] == pytest.approx(real["throughput_qps"], rel=0.10)
    assert run.numbers["latency_p95"] == pytest.approx(real["latency_p95"], rel=0.15)
    assert run.numbers["num_steps"] == pytest.approx(real["num_steps"], rel=0.15)
