"""On a GPU a request that goes on at its step has the bits of one that nothing disturbed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compositions import pixels, random_job

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.request import Request, RequestOutput, StepState

pytestmark = pytest.mark.gpu


def _begin(engine: Engine, requests: list[Request], states: dict[str, StepState], num_steps: int) -> Any:
    """Some steps; the outputs so far."""
    for request in requests:
        engine.add_request(request, states.get(request.request_id))
    outputs: dict[str, RequestOutput] = {}
    for _ in range(num_steps):
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


@pytest.mark.parametrize("composition", range(8))
def test_interrupted_every_few_steps_equals_undisturbed(gpu_model: Any, composition: int) -> None:
    """A new engine every one to three steps, in other company each time."""
    requests = random_job(2000 + composition)
    whole = pixels(Engine(gpu_model, EngineConfig(max_num_seqs=1)), requests)
    outputs: dict[str, RequestOutput] = {}
    states: dict[str, StepState] = {}
    for number in range(200):
        left = [request for request in requests if request.request_id not in outputs]
        if not left:
            break
        engine = Engine(gpu_model, EngineConfig(max_num_seqs=2 + number % 5, max_num_batched_tokens=16_000))
        outputs |= _begin(engine, left[:: (-1) ** number], states, 1 + number % 3)
        states |= engine.snapshot().states()
        outputs |= {output.request_id: output for output in engine.finish_decoding()}
    assert len(outputs) == len(requests)
    for request, expected in zip(requests, whole, strict=True):
        output = outputs[request.request_id]
        assert output.status == "ok", output.error
        assert np.array_equal(output.pixels, expected), request
        assert output.metrics.steps_run == request.num_inference_steps


def test_a_replayed_pack_goes_on_elsewhere(gpu_model: Any) -> None:
    request = replace(random_job(7)[0], height=256, width=256, num_inference_steps=10)
    (expected,) = pixels(Engine(gpu_model, EngineConfig()), [request])
    engine = Engine(gpu_model, EngineConfig())
    _begin(engine, [request], {}, 6)
    assert engine.runner._batch is not None
    assert engine.runner._batch.replay is not None
    states = engine.snapshot().states()
    assert states[request.request_id].step_index == 6
    again = Engine(gpu_model, EngineConfig())
    again.add_request(request, states[request.request_id])
    again.close_source()
    outputs: list[RequestOutput] = []
    while again.has_unfinished:
        outputs += again.step()
    assert np.array_equal(outputs[0].pixels, expected)  # type: ignore[arg-type]


def test_a_snapshot_does_not_wait_for_the_device_and_is_of_its_moment(gpu_model: Any, no_sync: Any) -> None:
    requests = [replace(request, num_inference_steps=12) for request in random_job(11)]
    engine = Engine(gpu_model, EngineConfig())
    _begin(engine, requests, {}, 3)
    engine.snapshot().states()  # the first allocates pinned memory
    with no_sync():
        snapshot = engine.snapshot()
    for _ in range(3):
        engine.step()
    later = engine.snapshot().states()
    for name, state in snapshot.states().items():
        assert state.latents.dtype == np.float32
        assert later[name].step_index == state.step_index + 3
        assert np.isfinite(state.latents).all()
        assert not np.array_equal(later[name].latents, state.latents)
