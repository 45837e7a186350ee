"""A request goes on at its step in another engine, to the same bytes as if nothing had happened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_fakes import (
    CHANNELS,
    MODES,
    FakeModel,
    FakeRecorder,
    ManualClock,
    expected_latents,
    make_engine,
    make_request,
    num_joint_tokens,
    random_requests,
    same_picture,
)

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.models.loader import load_model
from offline_diffusion.request import Request, RequestMetrics, RequestOutput, StepState

Outputs = dict[str, RequestOutput]


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_model(EngineConfig(model="tiny", device="cpu"))


TINY_REQUESTS = [
    make_request(
        f"t{index}",
        "a lantern " * (1 + index),
        height=32 + 16 * (index % 2),
        width=48 + 16 * index,
        num_inference_steps=4 + index % 2,
        true_cfg_scale=4.0 if index % 2 else 1.0,
        negative_prompt=[None, "grey", " "][index % 3],
    )
    for index in range(4)
]


@pytest.fixture(scope="module")
def whole(tiny: Any) -> Outputs:
    """Each drawn alone, undisturbed."""
    return run_on_new(tiny, TINY_REQUESTS, {}, max_num_seqs=1)


def run_on(engine: Engine) -> Outputs:
    """Runs an engine to its end."""
    engine.close_source()
    outputs: Outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def go_on(engine: Engine, requests: list[Request], states: dict[str, StepState]) -> None:
    for request in requests:
        engine.add_request(request, states.get(request.request_id))


def begin(engine: Engine, requests: list[Request], num_steps: int) -> tuple[Outputs, dict[str, StepState]]:
    go_on(engine, requests, {})
    outputs: Outputs = {}
    for _ in range(num_steps):
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs, engine.snapshot().states()


def assert_same(outputs: Outputs, whole: Outputs) -> None:
    for name, output in outputs.items():
        assert output.status == "ok", output.error
        assert np.array_equal(output.pixels, whole[name].pixels), name  # type: ignore[arg-type]
        assert output.metrics.steps_run == output.request.num_inference_steps


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_resumed_picture_has_the_bytes_of_an_undisturbed_one(tiny: Any, whole: Outputs, step: int) -> None:
    """Every kind in company until ``step``, then each alone, and once more together in another order."""
    outputs, states = begin(Engine(tiny, EngineConfig()), TINY_REQUESTS, step)
    assert states.keys() | outputs.keys() == {request.request_id for request in TINY_REQUESTS}
    assert all(state.step_index == state.metrics.steps_run == step for state in states.values())
    assert states
    begun = [request for request in TINY_REQUESTS if request.request_id in states]
    assert_same(outputs, whole)
    assert_same(run_on_new(tiny, begun, states, max_num_seqs=1), whole)
    fresh = make_request("new", "a cup", num_inference_steps=3)
    together = run_on_new(tiny, [*begun[::-1], fresh], states)
    together.pop("new")
    assert_same(together, whole)


def run_on_new(model: Any, requests: list[Request], states: dict[str, StepState], **options: Any) -> Outputs:
    engine = Engine(model, EngineConfig(**options))
    go_on(engine, requests, states)
    return run_on(engine)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_interrupted_after_every_step_pictures_are_those_worked_out_by_hand(mode: str, seed: int) -> None:
    """A new engine for every step; no step is done twice, and no noise is drawn again."""
    requests = random_requests(seed, 8)
    drawn: list[str] = []

    class Watched(FakeModel):
        def prepare_latents(self, request: Request) -> torch.Tensor:
            drawn.append(request.request_id)
            return super().prepare_latents(request)

    outputs: Outputs = {}
    states: dict[str, StepState] = {}
    num_rounds = 0
    while len(outputs) < len(requests):
        engine = make_engine(Watched(), **MODES[mode])
        left = [request for request in requests if request.request_id not in outputs]
        drawn.clear()
        go_on(engine, left, states)
        engine.close_source()
        before = {name: state.step_index for name, state in states.items()}
        outputs |= {output.request_id: output for output in engine.step()}
        states = engine.snapshot().states()
        assert not set(drawn) & before.keys()
        for name, step_index in before.items():
            assert name in outputs or states[name].step_index >= step_index
        num_rounds += 1
    assert num_rounds >= max(request.num_inference_steps for request in requests)
    for output in outputs.values():
        assert same_picture(output.pixels, output.request)
        assert output.metrics.steps_run == output.request.num_inference_steps


def test_a_snapshot_is_of_its_moment_and_its_own_memory() -> None:
    request = make_request("a", "abc", num_inference_steps=6)
    engine = make_engine()
    go_on(engine, [request], {})
    engine.step()
    engine.step()
    snapshot = engine.snapshot()
    first = snapshot.states()["a"].latents.copy()
    engine.step()
    engine.step()
    again = snapshot.states()["a"]
    assert (again.step_index, again.latents.dtype, again.latents.shape) == (2, np.float32, (4, CHANNELS))
    assert np.array_equal(again.latents, first)
    two_steps_by_hand = _latents_after(request, 2)
    assert np.allclose(first, two_steps_by_hand, atol=1e-5)
    assert not np.allclose(first, engine.snapshot().states()["a"].latents, atol=1e-3)


def _latents_after(request: Request, num_steps: int) -> np.ndarray:
    """The closed form of `expected_latents`, stopped early."""
    shift = sum(map(ord, request.prompt)) / len(request.prompt) / 100
    x = torch.randn(4, CHANNELS, generator=torch.Generator().manual_seed(request.seed)).double()
    n = request.num_inference_steps
    for i in range(num_steps):
        x = x - (x / 2 + shift + (n - i) / n) / n
    return x.numpy()


def test_a_replayed_pack_is_in_the_snapshot() -> None:
    """A recorded step changes the pack's tensors; the requests' own are old by then."""
    model, recorder = FakeModel(), FakeRecorder()
    engine = make_engine(model)
    engine.runner._recorder = recorder  # type: ignore[assignment]
    request = make_request("a", "abc", num_inference_steps=8)
    _, states = begin(engine, [request], 5)
    assert recorder.num_replayed == 4
    assert np.allclose(states["a"].latents, _latents_after(request, 5), atol=1e-5)
    final = run_on(engine)["a"]
    assert recorder.num_replayed == 7
    resumed = run_on_new(FakeModel(), [request], states)["a"]
    assert np.array_equal(final.pixels, resumed.pixels)  # type: ignore[arg-type]
    assert same_picture(resumed.pixels, request)


def test_those_who_are_begun_and_wait_are_in_the_snapshot_too() -> None:
    """Paused for want of memory, or resumed and not admitted yet."""
    model = FakeModel()
    requests = [make_request(name, name, num_inference_steps=6) for name in "abcd"]
    engine = make_engine(model)
    begin(engine, requests, 2)

    def shrinking_device(batch: Any) -> None:
        if num_joint_tokens(batch) > 12:
            raise torch.OutOfMemoryError("tried to allocate")

    model.on_denoise = shrinking_device
    engine.step()
    engine.step()
    assert engine.num_waiting > 0
    states = engine.snapshot().states()
    assert states.keys() == set("abcd")
    assert min(state.step_index for state in states.values()) == 2
    serial = make_engine(max_num_seqs=1, scheduling_policy="fifo")
    go_on(serial, requests, states)
    serial.step()
    later = serial.snapshot().states()
    assert later.keys() == set("abcd")
    assert [later[name].step_index - states[name].step_index for name in "abcd"] == [1, 0, 0, 0]
    assert np.array_equal(later["d"].latents, states["d"].latents)
    for output in run_on_new(FakeModel(), requests, later).values():
        assert same_picture(output.pixels, output.request)


def test_what_has_no_step_or_no_more_step_to_do_is_not_in_the_snapshot() -> None:
    engine = make_engine(max_num_seqs=1, scheduling_policy="fifo")
    go_on(engine, [make_request("a", num_inference_steps=1), make_request("b")], {})
    assert engine.snapshot().states() == {}
    engine.step()
    assert engine.snapshot().states() == {}
    assert [output.request_id for output in engine.finish_decoding()] == []  # a's came with the step


def test_the_scheduler_is_told_the_steps_that_are_left() -> None:
    requests = [make_request(name, name, num_inference_steps=9) for name in "ab"]
    _, states = begin(make_engine(), requests[:1], 7)
    engine = make_engine()
    go_on(engine, requests, states)
    assert [entry.num_steps for entry in engine.scheduler.waiting] == [2, 9]
    assert len({entry.wave_key for entry in engine.scheduler.waiting}) == 2
    run_on(engine)
    assert engine.stats.num_steps == 9
    assert engine.stats.num_step_seqs == 2 + 9


def test_metrics_go_on() -> None:
    clock = ManualClock()
    request, other = make_request("a", num_inference_steps=4), make_request("b", num_inference_steps=4)

    def engine() -> Engine:
        model = FakeModel()

        def take_time(*_: Any) -> None:
            clock.now += 10

        model.on_denoise = take_time
        return Engine(model, EngineConfig(), clock)

    first = engine()
    go_on(first, [request, other], {})
    clock.now += 100  # waits
    first.step()
    first.step()
    clock.now += 5
    (state, _) = first.snapshot().states().values()
    assert state.metrics.queue_s == pytest.approx(100, abs=1)
    assert state.metrics.denoise_s == pytest.approx(25, abs=1)
    assert state.metrics.total_s == pytest.approx(125, abs=1)
    assert (state.metrics.mean_batch_seqs, state.metrics.steps_run, state.metrics.attempts) == (2, 2, 1)
    before = state.metrics.device_s
    clock.now += 10_000  # nobody runs
    second = engine()
    go_on(second, [request], {"a": state})
    clock.now += 1000
    metrics = run_on(second)["a"].metrics
    assert metrics.queue_s == pytest.approx(1100, abs=1)
    assert metrics.denoise_s == pytest.approx(25 + 20, abs=1)
    assert metrics.total_s == pytest.approx(125 + 1020, abs=1)
    assert (metrics.steps_run, metrics.mean_batch_seqs, metrics.attempts) == (4, 1.5, 1)
    assert metrics.device_s == pytest.approx(before + second.stats.device_s)
    assert state.metrics.steps_run == 2, "the state must stay as it was"


@pytest.mark.parametrize(
    ("step_index", "shape"), [(0, (4, CHANNELS)), (4, (4, CHANNELS)), (2, (5, CHANNELS)), (2, (4, 7))]
)
def test_a_state_of_another_request_is_refused(step_index: int, shape: tuple[int, int]) -> None:
    engine = make_engine()
    state = StepState(step_index, np.zeros(shape, np.float32), RequestMetrics())
    with pytest.raises(ValueError, match="has 4 steps and latents"):
        engine.add_request(make_request("a"), state)
    assert not engine.has_unfinished


def test_a_snapshot_that_finds_no_memory_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_request("a")
    engine = make_engine()
    begin(engine, [request], 2)

    def no_memory(_: Any) -> None:
        raise torch.OutOfMemoryError("pinned")

    monkeypatch.setattr(engine.runner, "copy_latents", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        engine.snapshot()
    output = run_on(engine)["a"]
    assert same_picture(output.pixels, request)
    assert torch.isfinite(expected_latents(request)).all()
