"""The engine over a model with a closed form: right pictures in any company, and honest counts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_fakes import FakeModel, expected_pixels, make_request, num_joint_tokens, same_picture

from offline_diffusion.attention.metadata import AttentionMetadata
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.scheduler import LOOK_AHEAD
from offline_diffusion.models.base import PackedInput
from offline_diffusion.request import Request, RequestOutput

MODES: dict[str, dict[str, Any]] = {
    "pack": {"scheduling_policy": "pack", "max_num_seqs": 5, "max_num_batched_tokens": 90},
    "fifo": {"scheduling_policy": "fifo", "max_num_seqs": 4, "max_num_batched_tokens": 120},
    "serial": {"max_num_seqs": 1},
    "waves": {"step_execution": False, "max_num_seqs": 3},
    "everything": {"max_num_seqs": 100},
}


class ManualClock:
    """Moves on by one millisecond a look, or by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def make_engine(model: FakeModel | None = None, **options: Any) -> Engine:
    return Engine(model or FakeModel(), EngineConfig(**options))


def random_requests(seed: int, count: int = 14) -> list[Request]:
    rng = random.Random(seed)
    return [
        make_request(
            f"{seed}-{index}",
            prompt="".join(rng.choices("abcdefgh ", k=rng.randint(1, 60))),
            negative_prompt=rng.choice([None, " ", "ugly"]),
            true_cfg_scale=rng.choice([0.0, 1.0, 2.0, 7.5]),
            height=16 * rng.randint(1, 4),
            width=16 * rng.randint(1, 4),
            num_inference_steps=rng.randint(1, 7),
            seed=rng.getrandbits(64),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_every_picture_is_the_one_worked_out_by_hand(mode: str, seed: int) -> None:
    requests = random_requests(seed)
    outputs = {output.request_id: output for output in make_engine(**MODES[mode]).generate(requests)}
    assert outputs.keys() == {request.request_id for request in requests}
    for request in requests:
        output = outputs[request.request_id]
        assert (output.status, output.error) == ("ok", None)
        assert output.request is request
        assert output.pixels is not None
        assert output.pixels.shape == (request.height, request.width, 3)
        assert same_picture(output.pixels, request)
        assert output.metrics.steps_run == request.num_inference_steps


def test_a_picture_has_the_same_bytes_alone_and_in_company() -> None:
    requests = random_requests(7)
    together = {o.request_id: o for o in make_engine(**MODES["everything"]).generate(requests)}
    alone = {o.request_id: o for o in make_engine(**MODES["serial"]).generate(requests)}
    for name, output in alone.items():
        assert output.pixels is not None
        assert np.array_equal(output.pixels, together[name].pixels)  # type: ignore[arg-type]


def test_requests_may_come_while_others_run() -> None:
    engine = make_engine()
    requests = random_requests(11)
    outputs: list[RequestOutput] = []
    for request in requests:
        engine.add_request(request)
        outputs += engine.step()
    while engine.has_unfinished:
        outputs += engine.step()
    assert len(outputs) == len(requests)
    assert all(same_picture(output.pixels, output.request) for output in outputs)


def test_an_idle_engine_steps_to_nothing() -> None:
    engine = make_engine()
    assert engine.step() == []
    assert not engine.has_unfinished
    assert list(engine.generate([])) == []


def test_a_finished_engine_holds_nothing() -> None:
    engine = make_engine()
    list(engine.generate(random_requests(2)))
    assert not engine._states
    assert engine.runner._batch is None
    assert engine.runner.num_decoding == 0
    assert (engine.num_running, engine.num_waiting) == (0, 0)


# --- composition and prompts --------------------------------------------------------------------


def test_the_pack_is_rebuilt_only_when_its_composition_changes() -> None:
    model = FakeModel()
    requests = [make_request(str(n), num_inference_steps=n) for n in (2, 5, 9)]
    list(make_engine(model).generate(requests))
    # one table a sequence and build: three sequences, then two, then one
    assert model.num_rotary == 3 + 2 + 1


def test_a_constant_composition_is_built_once() -> None:
    model = FakeModel()
    list(make_engine(model).generate([make_request(str(n), num_inference_steps=20) for n in range(4)]))
    assert model.num_rotary == 4


def test_each_distinct_prompt_is_encoded_once() -> None:
    model = FakeModel()
    requests = [
        make_request(str(n), f"prompt {n % 3}", negative_prompt=" ", true_cfg_scale=4.0) for n in range(9)
    ]
    list(make_engine(model, max_num_seqs=2).generate(requests))
    assert model.encoded == {"prompt 0": 1, "prompt 1": 1, "prompt 2": 1, " ": 1}


def test_an_inactive_negative_prompt_is_not_encoded() -> None:
    model = FakeModel()
    request = make_request("a", "cup", negative_prompt="never", true_cfg_scale=1.0)
    (output,) = make_engine(model).generate([request])
    assert model.encoded == {"cup": 1}
    assert not output.metrics.cfg_active


def test_the_prompt_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offline_diffusion.engine.model_runner.PROMPT_CACHE_TOKENS", 3)
    model = FakeModel()
    engine = make_engine(model, max_num_seqs=1)
    prompts = ["a", "b", "a", "c", "a", "d", "b"]  # a is used again and again, b is the oldest at d
    list(engine.generate([make_request(str(n), prompt) for n, prompt in enumerate(prompts)]))
    assert len(engine.runner._prompts) == 3
    assert model.encoded == {"a": 1, "b": 2, "c": 1, "d": 1}


def test_a_reused_id_is_another_request() -> None:
    """Not the pack that was built for the first of that name."""
    engine = make_engine()
    engine.add_request(make_request("a", "first", num_inference_steps=5))
    engine.step()
    assert engine.abort("a")
    second = make_request("a", "second", num_inference_steps=5, seed=99)
    outputs = list(engine.generate([second]))
    assert [output.status for output in outputs] == ["aborted", "ok"]
    assert same_picture(outputs[1].pixels, second)


# --- generate -------------------------------------------------------------------------------------


def test_generate_pulls_lazily_from_an_endless_source() -> None:
    num_pulled = 0

    def source() -> Iterator[Request]:
        nonlocal num_pulled
        for number in itertools.count():
            num_pulled += 1
            yield make_request(str(number), num_inference_steps=1, height=16, width=16)

    outputs = list(itertools.islice(make_engine(max_num_seqs=4).generate(source()), 50))
    assert len(outputs) == 50
    assert num_pulled <= 50 + 4 + LOOK_AHEAD


def test_generate_does_not_hoard_an_endless_source_of_bad_requests() -> None:
    source = (make_request(str(number), height=17) for number in itertools.count())
    outputs = list(itertools.islice(make_engine().generate(source), 3))
    assert [output.error_type for output in outputs] == ["invalid_request"] * 3
    assert int(next(source).request_id) <= 2 * LOOK_AHEAD


def test_what_a_caller_leaves_behind_is_dropped() -> None:
    engine = make_engine(max_num_seqs=2)
    outputs = engine.generate(random_requests(3))
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    assert not engine.has_unfinished
    again = random_requests(3)
    assert {output.request_id for output in engine.generate(again)} == {r.request_id for r in again}


def test_a_source_that_breaks_leaves_a_usable_engine() -> None:
    def source() -> Iterator[Request]:
        yield make_request("a")
        raise OSError("the manifest is gone")

    engine = make_engine()
    with pytest.raises(OSError, match="the manifest is gone"):
        list(engine.generate(source()))
    assert [output.status for output in engine.generate([make_request("a")])] == ["ok"]


def test_an_id_at_hand_is_refused() -> None:
    engine = make_engine()
    engine.add_request(make_request("a"))
    with pytest.raises(ValueError, match="'a' is already at hand"):
        engine.add_request(make_request("a"))


# --- abort ----------------------------------------------------------------------------------------


def test_abort_between_steps_leaves_the_others_alone() -> None:
    engine = make_engine(max_num_seqs=2, scheduling_policy="fifo")
    requests = {name: make_request(name, num_inference_steps=6) for name in "abc"}
    for request in requests.values():
        engine.add_request(request)
    assert engine.step() == []
    assert engine.num_running == 2
    assert engine.abort("a")  # running
    assert engine.abort("c")  # waiting
    assert not engine.abort("c")
    assert not engine.abort("unknown")
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    assert {name: output.status for name, output in outputs.items()} == {
        "a": "aborted",
        "b": "ok",
        "c": "aborted",
    }
    assert (outputs["a"].metrics.steps_run, outputs["c"].metrics.steps_run) == (1, 0)
    assert outputs["a"].pixels is None
    assert same_picture(outputs["b"].pixels, requests["b"])


def test_aborting_all_lets_go_of_the_pack() -> None:
    engine = make_engine()
    engine.add_request(make_request("a"))
    engine.step()
    engine.abort("a")
    assert engine.runner._batch is None
    assert [output.status for output in engine.step()] == ["aborted"]
    assert not engine.has_unfinished


# --- what is handed to the model ------------------------------------------------------------------


def test_no_step_has_more_tokens_than_the_budget_but_for_a_lone_request() -> None:
    model = FakeModel()
    packs: list[tuple[int, int]] = []

    def look(batch: PackedInput) -> None:
        packs.append((num_joint_tokens(batch), len(batch.timesteps)))

    model.on_denoise = look
    list(make_engine(model, max_num_batched_tokens=60).generate(random_requests(5)))
    assert max(tokens for tokens, _ in packs) > 60  # there was an oversize one
    assert all(tokens <= 60 or requests == 1 for tokens, requests in packs)


def test_both_branches_of_unlike_requests_share_a_forward() -> None:
    model = FakeModel()
    seen: list[PackedInput] = []
    model.on_denoise = seen.append
    requests = [
        make_request("a", "abc", negative_prompt="ugly", true_cfg_scale=4.0, height=16, width=48),
        make_request("b", "ab", height=32, width=32, num_inference_steps=2),
    ]
    list(make_engine(model, scheduling_policy="fifo").generate(requests))
    first = seen[0]
    # positive branches first, then the negative one: text + image tokens each
    assert first.attention.seqlens == (3 + 3, 2 + 4, 4 + 3)
    assert first.attention.cu_seqlens.tolist() == [0, 6, 12, 19]
    assert first.attention.max_seqlen == 7
    assert first.timesteps.tolist() == [750.0, 500.0]  # refreshed since: those of the last common step
    assert first.txt_request.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert first.img_request.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]
    assert first.txt_to_joint.tolist() == [0, 1, 2, 6, 7, 12, 13, 14, 15]
    assert first.img_to_joint.tolist() == [3, 4, 5, 8, 9, 10, 11, 16, 17, 18]


def test_an_empty_sequence_is_an_invariant_broken() -> None:
    with pytest.raises(AssertionError, match="empty sequence"):
        AttentionMetadata.from_seqlens([3, 0], torch.device("cpu"))


# --- metrics --------------------------------------------------------------------------------------


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


def test_times_of_a_request() -> None:
    clock = ManualClock()
    model = FakeModel()

    def take(seconds: float) -> Callable[..., None]:
        def pass_time(*_: Any) -> None:
            clock.now += seconds

        return pass_time

    model.on_encode, model.on_denoise = take(100.0), take(10.0)
    engine = Engine(model, EngineConfig(max_num_seqs=1, scheduling_policy="fifo"), clock)
    first, second = list(engine.generate([make_request(name, name, num_inference_steps=3) for name in "ab"]))
    assert first.metrics.encode_s == pytest.approx(100, abs=1)
    assert first.metrics.queue_s == pytest.approx(100, abs=1)  # until its first step
    # b was encoded during a's run, right after its first step
    assert first.metrics.denoise_s == pytest.approx(30 + 100, abs=1)
    assert second.metrics.queue_s == pytest.approx(100 + 30 + 100, abs=1)
    assert second.metrics.denoise_s == pytest.approx(30, abs=1)
    assert second.metrics.total_s == pytest.approx(100 + 30 + 100 + 30, abs=1)
    assert second.metrics.attempts == 1


def test_finished_and_failed_are_counted() -> None:
    engine = make_engine()
    list(engine.generate([make_request("a"), make_request("b", height=17), make_request("c")]))
    assert (engine.stats.num_finished, engine.stats.num_failed) == (2, 1)


# --- request mode ---------------------------------------------------------------------------------


def test_request_mode_steps_like_requests_together() -> None:
    model = FakeModel()
    sizes: list[int] = []
    model.on_denoise = lambda batch: sizes.append(len(batch.timesteps))
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


def test_the_pictures_are_not_all_alike() -> None:
    """Guards the tests above: the closed form tells requests apart."""
    a, b = expected_pixels(make_request("a")), expected_pixels(make_request("b", "another"))
    assert (a != b).mean() > 0.5
