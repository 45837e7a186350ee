"""What the engine counts and measures, and request mode, over a model with a closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_fakes import (
    MODES,
    FakeModel,
    ManualClock,
    make_engine,
    make_request,
    random_requests,
    same_picture,
)

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine


def test_device_time_is_shared_out_whole() -> None:
    engine = make_engine(**MODES["pack"])
    outputs = list(engine.generate(random_requests(4)))
    shares = sum(output.metrics.device_s for output in outputs)
    assert shares == pytest.approx(engine.stats.device_s, rel=1e-9)
    assert all(output.metrics.device_s > 0 for output in outputs)


def test_device_time_is_shared_by_tokens() -> None:
    small = make_request("small", "a", height=16, width=16)  # 2 tokens
    large = make_request("large", "ab", height=32, width=64)  # 10 tokens
    outputs = {o.request_id: o.metrics for o in make_engine().generate([small, large])}
    assert outputs["large"].device_s == pytest.approx(5 * outputs["small"].device_s)


def test_mean_batch_seqs_counts_branches() -> None:
    # steps 1-2: a (2 branches) + b = 3 sequences; steps 3-6: a alone = 2
    a = make_request("a", negative_prompt=" ", true_cfg_scale=3.0, num_inference_steps=6)
    b = make_request("b", num_inference_steps=2)
    engine = make_engine()
    outputs = {o.request_id: o.metrics for o in engine.generate([a, b])}
    assert outputs["b"].mean_batch_seqs == 3
    assert outputs["a"].mean_batch_seqs == pytest.approx((2 * 3 + 4 * 2) / 6)
    assert (engine.stats.num_steps, engine.stats.num_step_seqs) == (6, 14)


def test_step_fill_is_the_mean_share_of_the_budget() -> None:
    engine = make_engine(max_num_batched_tokens=100)
    # 13 and 9 tokens; two steps together, two more of the first
    list(
        engine.generate(
            [
                make_request("a", "a red cup", num_inference_steps=4),
                make_request("b", "a cup", num_inference_steps=2),
            ]
        )
    )
    assert engine.stats.step_fill == pytest.approx((22 + 22 + 13 + 13) / 400)


def test_counts_of_tokens_and_cuts() -> None:
    limit = FakeModel.capabilities.max_prompt_tokens
    long = make_request("a", "x" * (limit + 7), negative_prompt="y" * (limit + 2), true_cfg_scale=2.0)
    (output,) = make_engine().generate([long])
    metrics = output.metrics
    assert metrics.cfg_active
    assert metrics.prompt_tokens == limit
    assert metrics.truncated_tokens == 7 + 2
    assert metrics.num_tokens == 2 * (limit + 4)
    assert same_picture(output.pixels, long)


def test_the_scheduler_knows_the_text_of_both_branches() -> None:
    engine = make_engine()
    engine.add_request(make_request("a", "a red cup", negative_prompt="ugly", true_cfg_scale=2.0))
    engine.add_request(make_request("b", "a red cup"))
    assert [entry.num_text_tokens for entry in engine.scheduler.waiting] == [9 + 4, 9]
    assert [entry.num_tokens for entry in engine.scheduler.waiting] == [9 + 4 + 2 * 4, 9 + 4]


def test_times_of_a_request() -> None:
    clock = ManualClock()
    model = FakeModel()

    def take(seconds: float) -> Callable[..., None]:
        def pass_time(*_: Any) -> None:
            clock.now += seconds

        return pass_time

    model.on_encode, model.on_denoise = take(100.0), take(10.0)
    engine = Engine(model, EngineConfig(max_num_seqs=1, scheduling_policy="fifo"), clock)
    model.encode_rows = 1
    first, second = list(engine.generate([make_request(name, name, num_inference_steps=3) for name in "ab"]))
    assert first.metrics.encode_s == pytest.approx(100, abs=1)
    assert second.metrics.encode_s == pytest.approx(100, abs=1)
    assert first.metrics.queue_s == pytest.approx(100, abs=1)  # until its first step
    # b was encoded during a's run, right after its first step
    assert first.metrics.denoise_s == pytest.approx(30 + 100, abs=1)
    assert second.metrics.queue_s == pytest.approx(100 + 30 + 100, abs=1)
    assert second.metrics.denoise_s == pytest.approx(30, abs=1)
    assert second.metrics.total_s == pytest.approx(100 + 30 + 100 + 30, abs=1)
    assert second.metrics.attempts == 1


def test_prompts_encoded_together_share_the_time() -> None:
    clock = ManualClock()
    model = FakeModel()

    def take_a_minute(_: str) -> None:
        clock.now += 60.0

    model.on_encode = take_a_minute
    requests = [make_request(name, name, num_inference_steps=1) for name in "abc"]
    requests.append(make_request("d", "a", negative_prompt="e", true_cfg_scale=2.0))
    engine = Engine(model, EngineConfig(scheduling_policy="fifo"), clock)
    metrics = {o.request_id: o.metrics for o in engine.generate(requests)}
    assert model.encode_calls == [["a", "b", "c", "e"]]
    # four minutes for four prompts; the one that two requests have in common is the first request's
    assert [metrics[name].encode_s for name in "abcd"] == pytest.approx([60, 60, 60, 60], abs=1)


def test_finished_and_failed_are_counted() -> None:
    engine = make_engine()
    list(engine.generate([make_request("a"), make_request("b", height=17), make_request("c")]))
    assert (engine.stats.num_finished, engine.stats.num_failed) == (2, 1)


# --- request mode ---------------------------------------------------------------------------------


def test_request_mode_steps_like_requests_together() -> None:
    model = FakeModel()
    sizes: list[int] = []
    model.on_denoise = lambda batch: sizes.append(len(batch.conditioning))
    requests = [make_request(str(n), num_inference_steps=3 + n % 2) for n in range(6)]
    list(make_engine(model, step_execution=False, max_num_seqs=2).generate(requests))
    # like ones in twos: 0 and 2 (3 steps), 1 and 3 (4 steps), then 4, 5 alone
    assert sizes == [2] * 3 + [2] * 4 + [1] * 3 + [1] * 4


def test_the_admission_window_follows_the_clock() -> None:
    clock = ManualClock()
    config = EngineConfig(step_execution=False, request_batch_max_wait_ms=5_000)
    engine = Engine(FakeModel(), config, clock)
    engine.add_request(make_request("a", num_inference_steps=2))
    assert engine.step() == []
    assert engine.num_running == 0
    clock.now += 5
    engine.step()
    assert engine.num_running == 1


def test_a_window_does_not_delay_the_end_of_a_source() -> None:
    engine = make_engine(step_execution=False, request_batch_max_wait_ms=3_600_000)
    assert [output.status for output in engine.generate([make_request("a")])] == ["ok"]
