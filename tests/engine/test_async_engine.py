"""An engine that takes requests while it runs: from threads, from event loops, bounded, and never silent."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from engine_fakes import Clock, FakeModel, make_engine, make_request, random_requests, same_picture

from offline_diffusion import AsyncOfflineDiffusion, SamplingParams
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.async_engine import AsyncEngine
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.model_runner import DecodedImage
from offline_diffusion.errors import CrashError, OffdiffError, QueueFullError
from offline_diffusion.models.base import PackedInput
from offline_diffusion.request import Request, RequestOutput

PATIENCE_S = 60


def by_hand(model: FakeModel | None = None, *, max_num_requests: int = 100, **options: Any) -> AsyncEngine:
    """Stepped by the test, so that nothing happens in between."""
    engine = make_engine(model, **options)
    return AsyncEngine(engine, max_num_requests=max_num_requests, threaded=False)


def threaded(model: FakeModel | None = None, *, max_num_requests: int = 100, **options: Any) -> AsyncEngine:
    return AsyncEngine(make_engine(model, **options), max_num_requests=max_num_requests)


def run_out(engine: AsyncEngine) -> None:
    while engine.num_requests:
        engine.step()


async def collect(engine: AsyncEngine, *requests: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(*requests)]


class Gate:
    """Holds the denoiser until it is opened; tells when it got there."""

    def __init__(self, model: FakeModel) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()
        model.on_denoise = self._hold

    def _hold(self, _: PackedInput) -> None:
        self.reached.set()
        assert self._opened.wait(PATIENCE_S)

    def open(self) -> None:
        self._opened.set()


# --- from threads ---------------------------------------------------------------------------------


def test_requests_of_many_threads_get_their_own_pictures() -> None:
    """With aborts in between, and fewer places than requests."""
    requests = random_requests(1, 60)
    outputs: SimpleQueue[RequestOutput] = SimpleQueue()

    def ask(own: list[Request], seed: int) -> None:
        rng = random.Random(seed)
        for request in own:
            engine.add_request(request, outputs.put, timeout=PATIENCE_S)
            if rng.random() < 0.2:
                engine.abort(request.request_id)

    with threaded(max_num_requests=7, max_num_seqs=4) as engine:
        threads = [threading.Thread(target=ask, args=(requests[n::6], n)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        done = [outputs.get(timeout=PATIENCE_S) for _ in requests]
    assert outputs.empty()
    by_id = {output.request_id: output for output in done}
    assert by_id.keys() == {request.request_id for request in requests}
    for request in requests:
        output = by_id[request.request_id]
        assert output.request is request
        assert output.status in ("ok", "aborted")
        if output.status == "ok":
            assert same_picture(output.pixels, request)
    assert sum(output.status == "ok" for output in done) > 30


def test_a_request_that_comes_while_others_run_joins_them() -> None:
    model, sizes = FakeModel(), []
    gate = Gate(model)
    outputs: SimpleQueue[RequestOutput] = SimpleQueue()
    with threaded(model) as engine:
        engine.add_request(make_request("first", num_inference_steps=5), outputs.put)
        assert gate.reached.wait(PATIENCE_S)  # it is in its first step
        engine.add_request(make_request("second", num_inference_steps=2), outputs.put)
        model.on_denoise = lambda batch: sizes.append(len(batch.seqlens))
        gate.open()
        names = [outputs.get(timeout=PATIENCE_S).request_id for _ in range(2)]
    assert names == ["second", "first"]
    assert sizes[:2] == [2, 2]


# --- bounded --------------------------------------------------------------------------------------


def test_no_more_are_at_hand_than_may_be() -> None:
    engine, outputs = by_hand(max_num_requests=2), []
    for name in "ab":
        engine.add_request(make_request(name), outputs.append)
    with pytest.raises(QueueFullError, match="has 2 requests at hand, its most"):
        engine.add_request(make_request("c"), outputs.append, timeout=0)
    with pytest.raises(QueueFullError):
        engine.add_request(make_request("c"), outputs.append, timeout=0.01)
    run_out(engine)
    engine.add_request(make_request("c"), outputs.append, timeout=0)
    run_out(engine)
    assert [(output.request_id, output.status) for output in outputs] == [(name, "ok") for name in "abc"]


def test_whoever_waits_for_a_place_gets_it_in_order() -> None:
    model = FakeModel()
    gate, order = Gate(model), []

    def ask(name: str) -> None:
        engine.add_request(make_request(name), lambda output: order.append(output.request_id))

    with threaded(model, max_num_requests=1) as engine:
        ask("0")
        assert gate.reached.wait(PATIENCE_S)
        threads = []
        for number in range(1, 5):
            thread = threading.Thread(target=ask, args=(str(number),))
            thread.start()
            threads.append(thread)
            while len(engine._outside) < number:
                time.sleep(0.001)
        gate.open()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert order == list("01234")


def test_time_counts_from_the_asking() -> None:
    """Not from when the engine, busy with a step, takes a request in."""
    clock = Clock()
    engine = AsyncEngine(Engine(FakeModel(), EngineConfig(max_num_seqs=1), clock), threaded=False)
    outputs: list[RequestOutput] = []
    engine.add_request(make_request("a", num_inference_steps=1), outputs.append)
    clock.now = 7.0
    run_out(engine)
    assert outputs[0].metrics.queue_s == 7.0
    assert outputs[0].metrics.total_s == 7.0


def test_an_id_at_hand_is_refused_and_free_again_afterwards() -> None:
    engine, outputs = by_hand(max_num_requests=1), []
    engine.add_request(make_request("a"), outputs.append)
    with pytest.raises(ValueError, match="'a' is already at hand"):
        engine.add_request(make_request("a"), outputs.append)
    run_out(engine)
    engine.add_request(make_request("a"), outputs.append)
    run_out(engine)
    assert [output.status for output in outputs] == ["ok", "ok"]


# --- abort ----------------------------------------------------------------------------------------


def test_an_abort_reaches_a_request_wherever_it_is() -> None:
    engine = by_hand(max_num_requests=4, max_num_seqs=2, scheduling_policy="fifo")
    outputs: list[RequestOutput] = []
    for name in "abcd":
        engine.add_request(make_request(name, num_inference_steps=6), outputs.append)
    engine.step()
    assert engine.engine.num_running == 2
    engine.abort("a")  # running
    engine.abort("c")  # waiting
    engine.abort("c")
    engine.abort("nobody")
    run_out(engine)
    assert {output.request_id: output.status for output in outputs} == {
        "a": "aborted",
        "b": "ok",
        "c": "aborted",
        "d": "ok",
    }
    assert len(outputs) == 4


def test_an_abort_before_the_engine_knows_of_the_request() -> None:
    engine, outputs = by_hand(), []
    engine.add_request(make_request("a"), outputs.append)
    engine.abort("a")
    run_out(engine)
    assert [output.status for output in outputs] == ["aborted"]


def test_one_that_has_no_place_yet_can_be_aborted() -> None:
    model = FakeModel()
    gate = Gate(model)
    outputs: SimpleQueue[RequestOutput] = SimpleQueue()
    with threaded(model, max_num_requests=1) as engine:
        engine.add_request(make_request("a"), outputs.put)
        assert gate.reached.wait(PATIENCE_S)
        thread = threading.Thread(target=engine.add_request, args=(make_request("b"), outputs.put))
        thread.start()
        while "b" not in engine._outside:
            thread.join(0.001)
        engine.abort("b")
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        first = outputs.get(timeout=PATIENCE_S)
        assert (first.request_id, first.status) == ("b", "aborted")
        gate.open()


# --- the end --------------------------------------------------------------------------------------


def test_closing_finishes_what_is_at_hand_and_lets_nobody_in() -> None:
    outputs: list[RequestOutput] = []
    with threaded(max_num_seqs=1) as engine:
        for name in "abc":
            engine.add_request(make_request(name), outputs.append)
    assert [output.status for output in outputs] == ["ok"] * 3
    with pytest.raises(OffdiffError, match="the engine is closed"):
        engine.add_request(make_request("d"), outputs.append)


def test_closing_may_drop_what_is_at_hand() -> None:
    model, outputs = FakeModel(), []
    gate = Gate(model)
    engine = threaded(model, max_num_seqs=1)
    for name in "ab":
        engine.add_request(make_request(name, num_inference_steps=100), outputs.append)
    assert gate.reached.wait(PATIENCE_S)

    def open_when_dropped() -> None:
        while len(engine._aborts) < 2:
            time.sleep(0.001)
        gate.open()

    helper = threading.Thread(target=open_when_dropped)
    helper.start()
    engine.close(abort=True)
    helper.join(PATIENCE_S)
    assert {output.request_id: output.status for output in outputs} == dict.fromkeys("ab", "aborted")


def test_a_wave_waits_for_nobody_when_the_engine_is_closed() -> None:
    options: dict[str, Any] = {"step_execution": False, "request_batch_max_wait_ms": 3_600_000}
    outputs: list[RequestOutput] = []
    with threaded(**options) as engine:
        engine.add_request(make_request("a"), outputs.append)
    assert [output.status for output in outputs] == ["ok"]


def test_what_was_ready_when_the_engine_broke_is_handed_out_and_the_others_are_told() -> None:
    """Both begin together; the shorter one's image comes in the very step in which the device is lost."""
    model, outputs = FakeModel(), []
    engine = by_hand(model)

    def lose_the_device() -> None:
        engine.engine._collect(wait=False)
        raise torch.AcceleratorError("illegal memory access")

    engine.engine._prepare_ahead = lose_the_device  # type: ignore[method-assign]
    refused = make_request("refused", height=17)
    for request in (short := make_request("short", num_inference_steps=1), make_request("long"), refused):
        engine.add_request(request, outputs.append)
    with pytest.raises(torch.AcceleratorError):
        engine.step()
    assert {output.request_id: (output.status, output.error_type) for output in outputs} == {
        "short": ("ok", None),
        "long": ("failed", "crash"),
        "refused": ("failed", "invalid_request"),
    }
    assert len(outputs) == 3
    assert same_picture(next(o for o in outputs if o.request is short).pixels, short)


def test_an_image_that_is_lost_on_its_way_to_the_host_is_not_ready() -> None:
    engine, outputs = by_hand(), []
    plain = engine.engine.runner.collect

    def collect(*, wait: bool) -> list[DecodedImage]:
        images = plain(wait=wait)
        for image in images:
            image.pixels = None  # type: ignore[assignment]
        return images

    engine.engine.runner.collect = collect  # type: ignore[method-assign]
    engine.add_request(make_request("a", num_inference_steps=1), outputs.append)
    with pytest.raises(AttributeError):
        engine.step()
    assert [(output.status, output.error_type) for output in outputs] == [("failed", "crash")]


@pytest.mark.parametrize("broken", ["_wait_for_work", "_take_in", "_deliver", "device"])
def test_whatever_ends_the_engines_thread_everybody_is_told(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    outputs: SimpleQueue[RequestOutput] = SimpleQueue()
    engine, calls = threaded(), []

    def fail(*_: Any) -> None:
        if not calls:
            calls.append("once")
            raise SystemExit("enough")
        engine.__class__._deliver(engine, *_)  # as it is, for what is ready

    if broken == "device":
        engine._device_index = 7
        monkeypatch.setattr(torch.cuda, "set_device", fail)
    else:
        monkeypatch.setattr(engine, broken, fail)
    engine.add_request(make_request("a", num_inference_steps=1), outputs.put)
    output = outputs.get(timeout=PATIENCE_S)
    assert (output.status, output.error_type, output.error) == ("failed", "crash", "SystemExit: enough")
    with pytest.raises(CrashError, match="the engine is broken: SystemExit: enough"):
        engine.add_request(make_request("b"), outputs.put)
    engine.close()
    assert outputs.empty()
    assert caplog.messages == ["the engine is broken"]  # once


@pytest.mark.parametrize("is_threaded", [True, False])
def test_when_the_engine_breaks_everybody_is_told(is_threaded: bool) -> None:
    model = FakeModel()

    def lost(_: PackedInput) -> None:
        raise torch.AcceleratorError("illegal memory access")

    model.on_denoise = lost
    outputs: SimpleQueue[RequestOutput] = SimpleQueue()
    engine = threaded(model) if is_threaded else by_hand(model)
    if is_threaded:
        engine.add_request(make_request("a"), outputs.put)
    else:
        engine.add_request(make_request("a"), outputs.put)
        with pytest.raises(torch.AcceleratorError):
            engine.step()
    output = outputs.get(timeout=PATIENCE_S)
    assert (output.status, output.error_type) == ("failed", "crash")
    assert output.error == "AcceleratorError: illegal memory access"
    with pytest.raises(CrashError, match="the engine is broken: AcceleratorError: illegal memory access"):
        engine.add_request(make_request("b"), outputs.put)
    engine.close()


@pytest.mark.parametrize("error", [RuntimeError("closed"), SystemExit("closed"), CancelledError("closed")])
def test_a_listener_that_fails_hurts_nobody(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    engine, outputs = by_hand(), []

    def fail(_: RequestOutput) -> None:
        raise error

    caplog.set_level(logging.WARNING)
    engine.add_request(make_request("a"), fail)
    engine.add_request(make_request("b"), outputs.append)
    run_out(engine)
    assert [output.status for output in outputs] == ["ok"]
    assert f"request 'a': nobody takes its output: {error!r}" in caplog.text


def test_an_interrupt_is_not_a_listeners_fault() -> None:
    """It hits whoever steps the engine, wherever that is."""
    engine, outputs = by_hand(), []

    def interrupt(_: RequestOutput) -> None:
        raise KeyboardInterrupt

    engine.add_request(make_request("a", num_inference_steps=1), interrupt)
    engine.add_request(make_request("b"), outputs.append)
    with pytest.raises(KeyboardInterrupt):
        run_out(engine)
    assert [(output.status, output.error_type) for output in outputs] == [("failed", "crash")]


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", [1]), ("cuda", [3]), ("cpu", [])])
def test_the_thread_works_on_the_gpu_that_was_current(
    device: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model's device has no number, in the thread that made the engine."""
    engine, chosen = make_engine(), list[int]()
    monkeypatch.setattr(engine.model, "device", torch.device(device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with AsyncEngine(engine) as made:
        monkeypatch.setattr(engine.model, "device", torch.device("cpu"))  # to have the steps done here
        made.add_request(make_request("a"), lambda _: None)
    assert chosen == expected


def test_an_idle_engine_does_not_step() -> None:
    engine = threaded()
    steps: list[None] = []
    plain = engine.engine.step
    engine.engine.step = lambda: steps.append(None) or plain()  # type: ignore[method-assign,func-returns-value]
    done = threading.Event()
    with engine:
        engine.add_request(make_request("a", num_inference_steps=3), lambda _: done.set())
        assert done.wait(PATIENCE_S)
    assert len(steps) <= 4


# --- from an event loop ---------------------------------------------------------------------------


def run_async(scenario: Callable[[AsyncEngine], Any], engine: AsyncEngine) -> Any:
    with engine:
        return asyncio.run(asyncio.wait_for(scenario(engine), PATIENCE_S))


def test_generate_yields_previews_and_then_the_image() -> None:
    request = make_request("a", num_inference_steps=7)

    async def scenario(engine: AsyncEngine) -> list[RequestOutput]:
        return await collect(engine, request)

    options: dict[str, Any] = {"diffusion_streaming_output": True, "preview_interval": 2}
    outputs = run_async(scenario, threaded(**options))
    assert [(o.status, o.step_index) for o in outputs] == [
        ("running", 2),
        ("running", 4),
        ("running", 6),
        ("ok", 7),
    ]
    assert same_picture(outputs[-1].pixels, request)


def test_many_tasks_share_steps_and_few_places() -> None:
    model, requests = FakeModel(), random_requests(2, 40)
    sizes: list[int] = []
    model.on_denoise = lambda batch: sizes.append(len(batch.seqlens))

    async def scenario(engine: AsyncEngine) -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, request) for request in requests))

    outputs = run_async(scenario, threaded(model, max_num_requests=9))
    assert max(sizes) > 1
    for (output,), request in zip(outputs, requests, strict=True):
        assert output.request is request
        assert same_picture(output.pixels, request)


def test_several_requests_come_in_one_stream_even_if_they_are_more_than_may_be_at_hand() -> None:
    requests = random_requests(3, 8)

    async def scenario(engine: AsyncEngine) -> list[RequestOutput]:
        return await collect(engine, *requests)

    outputs = run_async(scenario, threaded(max_num_requests=2))
    assert sorted(o.request_id for o in outputs) == sorted(r.request_id for r in requests)


def test_whoever_stops_listening_aborts() -> None:
    model = FakeModel()
    gate = Gate(model)

    async def scenario(engine: AsyncEngine) -> tuple[RequestOutput, int]:
        left = asyncio.create_task(collect(engine, make_request("left", num_inference_steps=50)))
        outside = asyncio.create_task(collect(engine, make_request("outside")))
        await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
        while not engine._outside:
            await asyncio.sleep(0.001)
        for task in (left, outside):
            task.cancel()
        await asyncio.gather(left, outside, return_exceptions=True)
        gate.open()
        (output,) = await collect(engine, make_request("stays"))
        return output, engine.engine.stats.num_finished

    output, num_finished = run_async(scenario, threaded(model, max_num_requests=1))
    assert (output.request_id, output.status) == ("stays", "ok")
    assert num_finished == 1


def test_a_late_goodbye_does_not_hit_the_next_of_that_name() -> None:
    """The output was on its way when its listener left; the id is free by then."""
    engine, outputs = by_hand(), []

    async def scenario() -> None:
        listening = engine.generate(make_request("a"))
        first = asyncio.create_task(anext(listening))
        while not engine.num_requests:
            await asyncio.sleep(0)
        run_out(engine)  # handed over, not yet taken
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        engine.add_request(make_request("a"), outputs.append)
        await listening.aclose()

    asyncio.run(scenario())
    run_out(engine)
    assert [output.status for output in outputs] == ["ok"]


def test_generate_tells_of_a_broken_engine() -> None:
    model = FakeModel()
    gate = Gate(model)

    async def scenario(engine: AsyncEngine) -> tuple[Any, Any]:
        at_hand = asyncio.create_task(collect(engine, make_request("a")))
        outside = asyncio.create_task(collect(engine, make_request("b")))
        await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
        while not engine._outside:
            await asyncio.sleep(0.001)

        def post_decode(*_: Any) -> torch.Tensor:
            raise torch.AcceleratorError("lost")

        model.post_decode = post_decode  # type: ignore[method-assign]
        gate.open()
        return tuple(await asyncio.gather(at_hand, outside, return_exceptions=True))

    (output,), refused = run_async(scenario, threaded(model, max_num_requests=1))
    assert (output.status, output.error_type) == ("failed", "crash")
    assert isinstance(refused, CrashError)


# --- the Python API -------------------------------------------------------------------------------


def test_prompts_of_many_tasks_over_the_small_model(tiny_model: Any) -> None:
    params = SamplingParams(height=64, width=64, num_inference_steps=3, seed=5, num_images_per_prompt=2)

    async def scenario() -> tuple[list[list[RequestOutput]], list[RequestOutput]]:
        async def one(prompt: str, name: str) -> list[RequestOutput]:
            return [output async for output in engine.generate(prompt, params, request_id=name)]

        async with AsyncOfflineDiffusion(str(tiny_model), device="cpu", max_num_requests=3) as engine:
            named = await asyncio.gather(one("a cup", "cup"), one("a lamp", "lamp"))
            alone = [output async for output in engine.generate("a cup", SamplingParams(height=64, width=64))]
            with pytest.raises(ValueError, match="prompt 1 is blank"):
                await anext(engine.generate(" "))
            return named, alone

    (cups, lamps), (alone,) = asyncio.run(asyncio.wait_for(scenario(), 5 * PATIENCE_S))
    assert sorted(output.request_id for output in (*cups, *lamps)) == ["cup-0", "cup-1", "lamp-0", "lamp-1"]
    assert [output.request.seed for output in sorted(cups, key=lambda own: own.request_id)] == [5, 6]
    assert all(output.image.size == (64, 64) for output in (*cups, *lamps, alone))
    assert alone.request_id == "0"
