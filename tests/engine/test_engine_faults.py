"""A fault hits one request: it fails with a reason, and its neighbours' pictures do not change."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_fakes import FakeModel, has_text, make_engine, make_request, num_joint_tokens, same_picture

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine import engine as engine_module
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.faults import row_fault
from offline_diffusion.engine.memory import check_memory, is_out_of_memory
from offline_diffusion.models.base import PackedInput
from offline_diffusion.request import Request, RequestOutput


def run(model: FakeModel, requests: list[Request], **options: Any) -> dict[str, RequestOutput]:
    engine = Engine(model, EngineConfig(**options))
    outputs = list(engine.generate(requests))
    assert sorted(output.request_id for output in outputs) == sorted(r.request_id for r in requests)
    assert not engine._states
    assert engine.runner._batch is None
    return {output.request_id: output for output in outputs}


def neighbours(count: int = 4) -> list[Request]:
    return [
        make_request(
            f"good {n}",
            "a good prompt"[: 3 + n],
            negative_prompt=" " if n % 2 else None,
            true_cfg_scale=4.0,
            num_inference_steps=2 + n,
            width=16 * (1 + n),
        )
        for n in range(count)
    ]


def assert_untouched(outputs: dict[str, RequestOutput]) -> None:
    for name, output in outputs.items():
        if name.startswith("good"):
            assert output.status == "ok"
            assert same_picture(output.pixels, output.request)
            assert output.metrics.steps_run == output.request.num_inference_steps


def raising(error: Exception, when: Callable[..., bool]) -> Callable[..., None]:
    def hook(*arguments: Any) -> None:
        if when(*arguments):
            raise error

    return hook


# --- one bad request ------------------------------------------------------------------------------


def test_a_request_that_breaks_the_forward_is_found_and_fails_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = FakeModel()
    model.on_denoise = raising(ValueError("bad embedding"), lambda batch: has_text(batch, "!"))
    outputs = run(model, [*neighbours(2), make_request("bad", "boo!"), *neighbours(4)[2:]])
    bad = outputs["bad"]
    assert (bad.status, bad.error_type, bad.error) == ("failed", "model_error", "ValueError: bad embedding")
    assert bad.pixels is None
    assert bad.metrics.steps_run == 0
    assert_untouched(outputs)
    assert "bad embedding" in caplog.text


def test_a_forward_that_breaks_midway_loses_no_step_of_the_others() -> None:
    model = FakeModel()
    num_calls = 0

    def fail_third(batch: PackedInput) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("once")

    model.on_denoise = fail_third
    outputs = run(model, neighbours())
    assert len(outputs) == 4
    assert_untouched(outputs)


def test_a_lone_request_that_breaks_the_forward_fails() -> None:
    model = FakeModel()
    model.on_denoise = raising(ValueError("no"), lambda batch: True)
    outputs = run(model, [make_request("a")])
    assert outputs["a"].error == "ValueError: no"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_fail_by_name(value: float) -> None:
    model = FakeModel()
    plain = model.denoise_step

    def denoise_step(batch: PackedInput) -> torch.Tensor:
        noise_pred = plain(batch)
        starts = batch.img_attention.keys.cu_seqlens[1:].long()
        poisoned = batch.txt_to_joint[(batch.prompt_embeds.squeeze(1) * 100).round() == ord("?")]
        sequences = torch.searchsorted(starts, poisoned, right=True)
        own = torch.searchsorted(starts, batch.img_to_joint, right=True)
        return noise_pred.masked_fill(torch.isin(own, sequences).unsqueeze(1), value)

    model.denoise_step = denoise_step  # type: ignore[method-assign]
    outputs = run(model, [make_request("bad", "what?"), *neighbours()])
    assert (outputs["bad"].status, outputs["bad"].error_type) == ("failed", "nan")
    assert outputs["bad"].pixels is None
    assert_untouched(outputs)


def test_an_image_that_is_not_finite_fails_by_name() -> None:
    """NaN made by the decoder alone: it must not become a black picture."""
    model = FakeModel()
    plain = model.post_decode

    def post_decode(latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        image = plain(latents, height, width)
        if (height, width) == (48, 16):
            image[0, 0, 0] = float("nan")
        return image

    model.post_decode = post_decode  # type: ignore[method-assign]
    bad = make_request("bad", height=48, width=16)
    outputs = run(model, [make_request("a"), bad, make_request("b")])
    assert (outputs["bad"].status, outputs["bad"].error_type) == ("failed", "nan")
    assert [outputs[name].status for name in "ab"] == ["ok", "ok"]


def test_a_prompt_that_cannot_be_encoded() -> None:
    model = FakeModel()
    model.on_encode = raising(RuntimeError("text encoder"), lambda text: "!" in text)
    outputs = run(model, [make_request("bad", "boo!"), *neighbours()])
    assert outputs["bad"].error == "RuntimeError: text encoder"
    assert_untouched(outputs)


def test_a_waiting_prompt_that_cannot_be_encoded_ahead() -> None:
    model = FakeModel()
    model.on_encode = raising(RuntimeError("text encoder"), lambda text: "!" in text)
    requests = [*neighbours(2), make_request("bad", "boo!"), *neighbours(3)[2:]]
    outputs = run(model, requests, max_num_seqs=1, scheduling_policy="fifo")
    assert outputs["bad"].status == "failed"
    assert_untouched(outputs)


def test_a_prompt_that_cannot_be_tokenized() -> None:
    model = FakeModel()
    model.on_tokenize = raising(UnicodeError("surrogate"), lambda text: "!" in text)
    outputs = run(model, [make_request("bad", "boo!"), *neighbours()])
    assert (outputs["bad"].error_type, outputs["bad"].error) == ("model_error", "UnicodeError: surrogate")
    assert_untouched(outputs)


def test_an_image_that_cannot_be_decoded() -> None:
    model = FakeModel()
    model.on_decode = raising(RuntimeError("decoder"), lambda height, width: height == 128)
    outputs = run(model, [make_request("bad", height=128), *neighbours()])
    assert (outputs["bad"].status, outputs["bad"].error) == ("failed", "RuntimeError: decoder")
    assert outputs["bad"].metrics.steps_run == 4
    assert_untouched(outputs)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"height": 40}, "height must be a multiple of 16, got 40"),
        ({"width": 0}, "width must be a multiple of 16, got 0"),
        ({"height": -16}, "height must be a multiple of 16, got -16"),
        ({"width": 80_000}, "width must be at most 65536, got 80000"),
        ({"num_inference_steps": 0}, "num_inference_steps must be at least 1, got 0"),
        ({"lora": "style"}, "lora is not supported for model family 'fake'"),
    ],
)
def test_a_request_the_model_cannot_take(parameters: dict[str, Any], message: str) -> None:
    outputs = run(FakeModel(), [make_request("bad", **parameters), *neighbours()])
    bad = outputs["bad"]
    assert (bad.status, bad.error_type, bad.error) == ("failed", "invalid_request", message)
    assert_untouched(outputs)


# --- out of memory --------------------------------------------------------------------------------


def out_of_memory_over(limit: int) -> Callable[[PackedInput], None]:
    error = torch.OutOfMemoryError("tried to allocate")
    return raising(error, lambda batch: num_joint_tokens(batch) > limit)


@pytest.mark.parametrize("policy", ["fifo", "pack"])
def test_out_of_memory_shrinks_the_step_and_changes_no_picture(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    calm = run(FakeModel(), neighbours(6), scheduling_policy=policy)
    model = FakeModel()
    model.on_denoise = out_of_memory_over(45)
    caplog.set_level(logging.WARNING)
    outputs = run(model, neighbours(6), scheduling_policy=policy)
    assert_untouched(outputs)
    for name, output in outputs.items():
        assert np.array_equal(output.pixels, calm[name].pixels)  # type: ignore[arg-type]
    assert "out of memory at" in caplog.text


def test_memory_that_runs_out_midway_sends_requests_back_to_wait() -> None:
    model = FakeModel()
    num_calls = 0

    def shrinking_device(batch: PackedInput) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 2 and num_joint_tokens(batch) > 40:
            raise torch.OutOfMemoryError("tried to allocate")

    model.on_denoise = shrinking_device
    outputs = run(model, neighbours(6))
    assert len(outputs) == 6
    assert_untouched(outputs)


def test_a_request_that_fits_nowhere_fails_with_its_numbers() -> None:
    model = FakeModel()
    model.on_denoise = out_of_memory_over(45)
    huge = make_request("huge", "abcd", height=128, width=128)  # 64 + 4 tokens
    outputs = run(model, [huge, *neighbours()])
    assert (outputs["huge"].status, outputs["huge"].error_type) == ("failed", "out_of_memory")
    assert outputs["huge"].error == "68 tokens in a step do not fit: tried to allocate"
    assert_untouched(outputs)


def test_out_of_memory_in_a_wave() -> None:
    model = FakeModel()
    model.on_denoise = out_of_memory_over(20)
    requests = [make_request(f"good {n}") for n in range(5)]
    outputs = run(model, requests, step_execution=False)
    assert_untouched(outputs)


@pytest.mark.parametrize("stage", ["on_encode", "on_decode"])
def test_other_stages_try_once_more_when_memory_was_given_back(stage: str) -> None:
    model = FakeModel()
    failures = iter([True])
    error = torch.OutOfMemoryError("tried to allocate")
    setattr(model, stage, raising(error, lambda *_: next(failures, False)))
    assert_untouched(run(model, neighbours()))


@pytest.mark.parametrize("stage", ["on_encode", "on_decode"])
def test_other_stages_that_never_fit_fail_alone(stage: str) -> None:
    model = FakeModel()
    error = torch.OutOfMemoryError("tried to allocate")
    setattr(model, stage, raising(error, lambda *given: given in (("boo!",), (128, 32))))
    outputs = run(model, [make_request("bad", "boo!", height=128), *neighbours()])
    bad = outputs["bad"]
    assert (bad.status, bad.error_type, bad.error) == ("failed", "out_of_memory", "tried to allocate")
    assert_untouched(outputs)


def test_out_of_memory_gives_cached_prompts_back() -> None:
    model = FakeModel()
    engine = Engine(model, EngineConfig(max_num_seqs=1))
    list(engine.generate([make_request("a", "first")]))
    kept = weakref.ref(engine.runner.prompts.get([model.tokenize("first")])[0][0].stream)
    assert model.encoded == {"first": 1}
    failures = iter([True])
    model.on_denoise = raising(torch.OutOfMemoryError("no"), lambda _: next(failures, False))
    list(engine.generate([make_request("b", "second")]))
    gc.collect()
    assert kept() is None


# --- the machine's own failure --------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["on_encode", "on_denoise", "on_decode"])
def test_a_broken_device_stops_the_engine_and_blames_no_row(stage: str) -> None:
    """After an illegal access every later call fails: the rows must not be marked as failed."""
    model = FakeModel()
    setattr(model, stage, raising(torch.AcceleratorError("illegal memory access"), lambda *_: True))
    outputs: list[RequestOutput] = []
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        outputs.extend(Engine(model, EngineConfig()).generate(neighbours()))
    assert outputs == []


def test_a_device_that_is_lost_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may tell of it in words of its own: innocent rows would be marked as failed."""
    error, device = RuntimeError("Triton Error [CUDA]: an illegal memory access"), torch.device("cuda")

    def lost(_: torch.device) -> None:
        raise torch.AcceleratorError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(torch.AcceleratorError):
        row_fault(error, device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert row_fault(error, device)[0] == "model_error"


# --- what is kept alive ---------------------------------------------------------------------------


@pytest.mark.parametrize("error_class", [torch.OutOfMemoryError, ValueError])
def test_the_tensors_of_a_failed_step_are_gone_before_it_is_tried_again(
    error_class: type[Exception],
) -> None:
    model = FakeModel()
    scratches: list[weakref.ref[torch.Tensor]] = []
    num_alive: list[int] = []

    def hook(batch: PackedInput) -> None:
        num_alive.append(sum(scratch() is not None for scratch in scratches))
        scratch = torch.zeros(1000)
        scratches.append(weakref.ref(scratch))
        raise error_class("no")

    model.on_denoise = hook
    gc.disable()  # reference counts alone must do
    try:
        outputs = run(model, [make_request("a"), make_request("b")])
    finally:
        gc.enable()
    assert {output.status for output in outputs.values()} == {"failed"}
    assert len(num_alive) > 2
    assert set(num_alive) == {0}


def test_an_output_keeps_no_latents_alive() -> None:
    model = FakeModel()
    latents: list[weakref.ref[torch.Tensor]] = []
    plain = model.post_decode

    def post_decode(own: torch.Tensor, height: int, width: int) -> torch.Tensor:
        latents.append(weakref.ref(own))
        return plain(own, height, width)

    model.post_decode = post_decode  # type: ignore[method-assign,assignment]
    outputs = run(model, neighbours())
    gc.collect()
    assert len(outputs) == 4
    assert all(tensor() is None for tensor in latents)


def test_attempts_count_every_try() -> None:
    model = FakeModel()
    model.on_denoise = raising(ValueError("no"), lambda batch: has_text(batch, "?"))
    outputs = run(model, [make_request("bad", "what?"), make_request("a")])
    assert outputs["a"].metrics.attempts > 1
    assert outputs["a"].status == "ok"
    assert run(FakeModel(), [make_request("a")])["a"].metrics.attempts == 1


def test_a_picture_larger_than_all_memory_is_refused_with_its_numbers() -> None:
    """2**20 px a side take 27 TiB, which no machine has."""
    huge = make_request("huge", height=2**20, width=2**20)
    assert "at least 27648 GiB" in str(check_memory(huge, torch.device("cpu")))
    assert check_memory(make_request("a"), torch.device("cpu")) is None


def test_a_cpu_allocator_that_gives_up_is_out_of_memory() -> None:
    message = "[enforce fail at alloc_cpu.cpp:124] data. DefaultCPUAllocator: can't allocate memory"
    model = FakeModel()
    model.on_denoise = raising(RuntimeError(message), lambda batch: num_joint_tokens(batch) > 12)
    outputs = run(model, neighbours())
    assert {output.status for output in outputs.values()} <= {"ok", "failed"}
    assert {output.error_type for output in outputs.values()} <= {None, "out_of_memory"}
    assert any(output.error_type == "out_of_memory" for output in outputs.values())


def test_two_runs_of_one_engine_do_not_mix() -> None:
    engine = Engine(FakeModel(), EngineConfig(max_num_seqs=1))
    first = engine.generate([make_request(name) for name in "abc"])
    assert next(first).status == "ok"
    with pytest.raises(RuntimeError, match="another generate"):
        next(engine.generate([make_request("x")]))
    assert [output.request_id for output in first] == ["b", "c"]
    assert [output.request_id for output in engine.generate([make_request("x")])] == ["x"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.AcceleratorError])
def test_a_run_broken_off_in_a_decode_leaves_nothing_behind(error: type[BaseException]) -> None:
    model = FakeModel()

    def break_off(*_: int) -> None:
        model.on_decode = lambda *_: None
        raise error("now")

    model.on_decode = break_off
    engine = make_engine(model)
    with pytest.raises(error):
        list(engine.generate([make_request("a"), make_request("b")]))
    assert not engine.has_unfinished
    outputs = list(engine.generate([make_request("a"), make_request("c")]))
    assert {output.request_id: output.status for output in outputs} == {"a": "ok", "c": "ok"}


def test_a_lowered_budget_grows_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "GOOD_STEPS", 3)
    model = FakeModel()
    fails = iter([True, True])

    def on_denoise(_: object) -> None:
        if next(fails, False):
            raise torch.OutOfMemoryError("full")

    engine = make_engine(model, max_num_batched_tokens=100)
    budgets: list[int] = []

    def watch(batch: object) -> None:
        on_denoise(batch)
        budgets.append(engine.scheduler.max_num_batched_tokens)

    model.on_denoise = watch
    outputs = list(engine.generate([make_request(str(n), "ab", num_inference_steps=20) for n in range(8)]))
    assert all(output.status == "ok" for output in outputs)
    assert budgets[0] < 50
    assert budgets[-1] == 100


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("GET was unable to find an engine to execute this computation"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_signs_of_no_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
