"""How seconds become numbers: diffusers' scaled calls, stalls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clock import Clock
from ours import EngineRun, StepWatch, longest_gap, make_engine, run, run_shape_by_shape, trace_requests
from plan import RivalOptions
from rival import Rival
from workloads import make_workloads

from offline_diffusion.models.loader import model_from_pipeline
from offline_diffusion.models.registry import find_checkpoint


class FakeClock(Clock):
    """Seconds are what the fake pipeline says."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now = 0.0

    def mark(self) -> float:
        return self.now


class FakePipeline:
    """A step takes a second per image and 100 px of height, the first of a call ten times as long."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **call: Any) -> None:
        self.calls.append(call)
        for step in range(call["num_inference_steps"]):
            self.clock.now += len(call["prompt"]) * call["height"] / 100 * (10 if step == 0 else 1)
            assert call["callback_on_step_end"](self, step, 0, {}) == {}


@pytest.fixture
def fake() -> tuple[FakePipeline, Rival]:
    clock = FakeClock()
    pipeline = FakePipeline(clock)
    return pipeline, Rival(pipeline, clock, RivalOptions(num_steps=3, num_samples=2))


def test_diffusers_is_scaled_from_its_timed_steps(fake: tuple[FakePipeline, Rival]) -> None:
    pipeline, rival = fake
    requests = make_workloads(20)["mixed16"].requests
    timed = rival.time(requests, 1)
    assert timed.seconds == pytest.approx(20 * (8 * 5.12 + 5 * 7.68 + 3 * 10.24))
    assert (timed.num_timed_steps, timed.num_timed_images) == (3 * 2 * 3, 3 * 2)
    assert len(pipeline.calls) == 6
    assert all(call["num_inference_steps"] == 4 for call in pipeline.calls)  # one warms up


def test_a_batch_takes_its_own_time_and_singles_are_not_run_again(fake: tuple[FakePipeline, Rival]) -> None:
    pipeline, rival = fake
    requests = make_workloads(20)["256"].requests[:17]
    rival.time(requests, 1)
    del pipeline.calls[:]
    timed = rival.time(requests, 8)
    assert timed.seconds == pytest.approx(20 * 17 * 2.56)  # two batches of eight, one left over
    assert [len(call["prompt"]) for call in pipeline.calls] == [8, 8]


def test_guidance_is_off_where_the_request_has_none(fake: tuple[FakePipeline, Rival]) -> None:
    pipeline, rival = fake
    rival.time(make_workloads(20)["uniform"].requests, 8)
    told = {(call["negative_prompt"] is None, call["true_cfg_scale"]) for call in pipeline.calls}
    assert told == {(False, 4.0), (True, 1.0)}


def test_the_real_pipeline_takes_the_call(tiny_pipeline: Any) -> None:
    rival = Rival(tiny_pipeline, Clock(torch.device("cpu")), RivalOptions(num_steps=1, num_samples=1))
    requests = make_workloads(2, scale=8)["uniform"].requests[3:5]
    assert [request.cfg_active for request in requests] == [True, False]
    forwards: list[int] = []
    hook = tiny_pipeline.transformer.register_forward_hook(lambda *_: forwards.append(1))
    try:
        timed = rival.time(requests, 8)
    finally:
        hook.remove()
    assert timed.seconds > 0
    assert len(forwards) == 2 * 2 + 2  # two steps with both branches, two with one


def test_compiled_blocks_are_dropped_afterwards(tiny_pipeline: Any) -> None:
    rival = Rival(tiny_pipeline, Clock(torch.device("cpu")), RivalOptions(num_steps=1, num_samples=1))
    requests = make_workloads(2, scale=8)["256"].requests[:1]
    blocks = list(tiny_pipeline.transformer.transformer_blocks)
    with rival.compiled("eager"):
        assert all(block._compiled_call_impl is not None for block in blocks)
        compiled = rival.time(requests, 1)
    assert compiled.seconds > 0
    assert all(block._compiled_call_impl is None for block in blocks)
    assert blocks == list(tiny_pipeline.transformer.transformer_blocks)


def test_a_large_step_is_no_stall() -> None:
    gaps = [(0.1, 1000)] * 8 + [(2.0, 20_000), (1.5, 5000)]
    found = longest_gap(gaps)
    assert (found["longest_gap_s"], found["longest_gap_tokens"]) == (2.0, 20_000)
    assert found["longest_stall_s"] == pytest.approx(1.0)
    assert longest_gap([])["longest_stall_s"] is None


@pytest.fixture(scope="module")
def model(tiny_pipeline: Any) -> Any:
    from offline_diffusion.models.tiny import tiny_model_folder

    return model_from_pipeline(tiny_pipeline, find_checkpoint(str(tiny_model_folder())), torch.device("cpu"))


def test_a_run_counts_itself_alone(model: Any) -> None:
    """Steps and fill of a second run must not hold those of the first."""
    engine = make_engine(model, max_num_seqs=8, max_num_batched_tokens=400)
    requests = make_workloads(3, scale=8)["256"].requests[:2]
    clock = Clock(torch.device("cpu"))
    first, second = run(engine, requests, clock), run(engine, requests, clock)
    for done in (first, second):
        assert (done.num_images, done.num_steps) == (2, 3)
        assert 0 < done.denoise_s < done.wall_s
        tokens = sum(_num_tokens(model, request) for request in requests)
        assert done.step_fill == pytest.approx(tokens / 400)


def _num_tokens(model: Any, request: Any) -> int:
    texts = (request.prompt, request.negative_prompt)
    return sum(4 + model.tokenize(text).num_tokens for text in texts)


def test_presorted_packs_hold_one_shape(model: Any) -> None:
    """Guided or not, equal shapes share a step: 3 requests of 2 shapes take 2 × 2 steps."""
    uniform = make_workloads(2, scale=8)["uniform"].requests
    (first, *_), shape = uniform, (uniform[0].height, uniform[0].width)
    twin = next(own for own in uniform[1:] if (own.height, own.width) == shape)
    other = next(own for own in uniform if (own.height, own.width) != shape)
    engine = make_engine(model, max_num_seqs=8)
    clock = Clock(torch.device("cpu"))
    presorted = run_shape_by_shape(engine, [first, other, twin], clock)
    assert isinstance(presorted, EngineRun)
    assert (presorted.num_images, presorted.num_steps) == (3, 4)
    assert run(engine, [first, other, twin], clock).num_steps == 2


def test_a_traced_run_is_longer_than_a_pack(model: Any) -> None:
    engine = make_engine(model, max_num_seqs=3)
    requests = make_workloads(2, scale=8)["256"].requests[:2]
    traced = trace_requests(engine, requests)
    assert len(traced) == 8
    assert len({request.request_id for request in traced}) == 8


def test_the_watch_sees_tokens_move(model: Any) -> None:
    engine = make_engine(model)
    with StepWatch(engine) as watch:
        for tokens in (100, 350):
            engine.stats.num_step_tokens = tokens
            while len(watch._seen) < (1 if tokens == 100 else 2):
                pass
    ((seconds, tokens),) = watch.gaps()
    assert tokens == 250
    assert seconds > 0
