"""Previews of unfinished images: when they come, what they show, and that nothing else changes."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_fakes import (
    CAPABILITIES,
    MODES,
    Clock,
    FakeModel,
    FakeRecorder,
    make_engine,
    make_request,
    random_requests,
    same_picture,
    to_pixels,
)

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import MAX_DECODING, Engine
from offline_diffusion.engine.offline import OfflineDiffusion
from offline_diffusion.engine.previews import MAX_DECODING_BESIDE, preview_interval
from offline_diffusion.models.base import PackedInput
from offline_diffusion.models.capabilities import BatchKind
from offline_diffusion.request import Request, RequestOutput, SamplingParams

ON: dict[str, Any] = {"diffusion_streaming_output": True, "preview_interval": 3}


def draw(requests: Sequence[Request], model: FakeModel | None = None, **options: Any) -> list[RequestOutput]:
    return list(make_engine(model, **options).generate(requests))


def sha256(output: RequestOutput) -> str:
    assert output.pixels is not None
    return hashlib.sha256(output.pixels.tobytes()).hexdigest()


@pytest.mark.parametrize("mode", sorted(set(MODES) - {"waves", "serial requests"}))
def test_final_pixels_are_those_without_previews(mode: str) -> None:
    requests = random_requests(4)
    plain = {output.request_id: sha256(output) for output in draw(requests, **MODES[mode])}
    outputs = draw(requests, **MODES[mode], **ON | {"preview_interval": 1})
    assert {o.request_id: sha256(o) for o in outputs if o.finished} == plain
    assert sum(not output.finished for output in outputs) == sum(r.num_inference_steps - 1 for r in requests)


def test_a_recorded_step_is_previewed_as_well() -> None:
    """Whose latents a graph changes in place."""
    engines = [make_engine(**options) for options in ({}, ON)]
    requests = [make_request(name, num_inference_steps=12) for name in "ab"]
    pictures = []
    for engine in engines:
        recorder = engine.runner._recorder = FakeRecorder()  # type: ignore[assignment]
        outputs = list(engine.generate(requests))
        assert recorder.num_replayed
        pictures.append({o.request_id: sha256(o) for o in outputs if o.finished})
    assert pictures[0] == pictures[1]
    assert [o.step_index for o in outputs if o.request_id == "a"] == [3, 6, 9, 12]


def test_they_come_every_k_steps_but_the_last_and_before_the_final_image() -> None:
    requests = [make_request(f"{n}", num_inference_steps=n) for n in (2, 3, 4, 7, 9)]
    outputs = draw(requests, **ON)
    shown: dict[str, list[tuple[str, int]]] = {}
    for output in outputs:
        shown.setdefault(output.request_id, []).append((output.status, output.step_index))
    assert shown == {
        "2": [("ok", 2)],
        "3": [("ok", 3)],
        "4": [("running", 3), ("ok", 4)],
        "7": [("running", 3), ("running", 6), ("ok", 7)],
        "9": [("running", 3), ("running", 6), ("ok", 9)],
    }
    preview = outputs[[o.finished for o in outputs].index(False)]
    assert preview.metrics.steps_run == preview.step_index
    assert preview.image.size == (32, 32)


def test_a_preview_is_the_models_estimate_of_the_clean_image() -> None:
    """By hand, of the fake: at noise σ = (n - i) / n it predicts x / 2 + shift + σ, and x₀ = x - σ·v."""
    request = make_request("a", "cup", num_inference_steps=5, seed=3)
    shift = sum(map(ord, "cup")) / 3 / 100
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)).double()
    expected = []
    for step in range(4):
        sigma = (5 - step) / 5
        velocity = x / 2 + shift + sigma
        expected.append(to_pixels(x - sigma * velocity, 32, 32).int())
        x = x - velocity / 5
    previews = [o for o in draw([request], **ON | {"preview_interval": 1}) if not o.finished]
    assert len(previews) == 4
    for output, picture in zip(previews, expected, strict=True):
        assert (torch.from_numpy(output.pixels).int() - picture).abs().max() <= 1


def test_a_model_that_goes_straight_is_seen_through_from_the_first_step() -> None:
    """A constant velocity leads where every estimate already is."""
    model = FakeModel()
    model.denoise_step = lambda batch: torch.full_like(batch.latents, 0.75)  # type: ignore[method-assign]
    request = make_request("a", num_inference_steps=6)
    *previews, final = draw([request], model, **ON | {"preview_interval": 1})
    assert len(previews) == 5
    for preview in previews:
        difference = preview.pixels.astype(int) - final.pixels.astype(int)  # type: ignore[union-attr]
        assert abs(difference).max() <= 1


def test_without_the_option_there_are_none() -> None:
    assert all(output.finished for output in draw(random_requests(4), preview_interval=1))


def test_a_family_whose_steps_are_not_straight_has_none_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config, unet = EngineConfig(**ON), replace(CAPABILITIES, batch_kind=BatchKind.STACKED)
    caplog.set_level(logging.WARNING)
    assert preview_interval(EngineConfig(), unet) is None
    assert preview_interval(config, CAPABILITIES) == 3
    assert not caplog.messages
    assert preview_interval(config, unet) is None
    assert "model family 'fake' has no previews: its noise schedulers do not walk straight" in caplog.text


def test_where_the_decoder_is_slow_no_step_waits_and_all_are_shown_in_turn() -> None:
    """128 equal requests are due at once; five images are decoded in the time of a step."""
    engine, waits = make_engine(max_num_batched_tokens=10_000, **ON), list[bool]()

    def slow(*, wait: bool) -> list[Any]:
        waits.append(wait)
        decoding = engine.runner._decoding
        return [decoding.popleft() for _ in range(min(5, len(decoding)))]

    engine.runner.collect = slow  # type: ignore[method-assign]
    for index in range(128):
        engine.add_request(make_request(f"{index}", num_inference_steps=60))
    outputs = []
    for _ in range(59):
        outputs += engine.step()
    assert engine.stats.num_step_seqs == 59 * 128
    assert not any(waits)
    shown = Counter(output.request_id for output in outputs)
    assert sum(shown.values()) == 5 * (59 - 2)  # the first are due after three steps
    assert {shown[f"{index}"] for index in range(128)} == {2, 3}
    assert MAX_DECODING_BESIDE <= MAX_DECODING // 2


def test_a_preview_that_comes_after_the_last_step_has_the_time_of_the_steps_alone() -> None:
    clock, model = Clock(), FakeModel()

    def take_ten_seconds(_: PackedInput) -> None:
        clock.now += 10

    model.on_denoise = take_ten_seconds
    engine = Engine(model, EngineConfig(**ON | {"preview_interval": 1}), clock)
    plain, engine.runner.collect = engine.runner.collect, lambda *, wait: []  # type: ignore[method-assign]
    engine.add_request(make_request("a", num_inference_steps=2))
    assert [*engine.step(), *engine.step()] == []
    engine.runner.collect = plain  # type: ignore[method-assign]
    clock.now += 500  # in decode
    preview, final = engine.finish_decoding()
    assert (preview.step_index, final.step_index) == (1, 2)
    assert (preview.metrics.denoise_s, preview.metrics.total_s) == (20, 520)
    assert (final.metrics.denoise_s, final.metrics.total_s) == (20, 520)


# --- nothing of it hurts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("decoder"), "model_error: RuntimeError: decoder"),
        (torch.OutOfMemoryError("full"), "out_of_memory: full"),
    ],
)
def test_a_preview_that_fails_is_left_out(
    error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, failures = FakeModel(), iter([True, True])

    def on_decode(*_: int) -> None:
        if next(failures, False):
            raise error

    model.on_decode = on_decode
    caplog.set_level(logging.WARNING)
    request = make_request("a", num_inference_steps=10)
    outputs = draw([request], model, **ON)
    assert [(o.status, o.step_index) for o in outputs] == [("running", 9), ("ok", 10)]
    assert same_picture(outputs[-1].pixels, request)
    assert caplog.messages == [f"a preview is left out: {reason}"]  # once


def test_a_lost_device_is_no_matter_of_previews() -> None:
    model = FakeModel()

    def on_decode(*_: int) -> None:
        raise torch.AcceleratorError("illegal memory access")

    model.on_decode = on_decode
    with pytest.raises(torch.AcceleratorError):
        draw([make_request("a", num_inference_steps=10)], model, **ON)


def test_a_picture_that_is_none_is_not_shown() -> None:
    model = FakeModel()
    plain = model.prepare_latents
    model.prepare_latents = lambda request: plain(request) * float("nan")  # type: ignore[method-assign]
    outputs = draw([make_request("a", num_inference_steps=10)], model, **ON)
    assert [output.status for output in outputs] == ["failed"]


def test_after_an_abort_nothing_more_of_a_request_is_shown() -> None:
    """Not even under its name when another one has it: decodes end later on a GPU."""
    engine = make_engine(**ON | {"preview_interval": 1})
    arrived: list[Any] = []
    plain = engine.runner.collect
    engine.runner.collect = lambda *, wait: arrived.clear() or [] if arrived else plain(wait=wait)  # type: ignore[method-assign,func-returns-value]
    old = make_request("a", "old", num_inference_steps=9, width=48)
    engine.add_request(old)
    arrived.append("not yet")
    assert engine.step() == []  # its preview is in the decode
    assert engine.runner.num_decoding == 1
    assert engine.abort("a")
    engine.add_request(make_request("a", "new", num_inference_steps=2))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [(o.status, o.request.prompt) for o in outputs] == [
        ("aborted", "old"),
        ("running", "new"),
        ("ok", "new"),
    ]


def test_the_steps_of_earlier_runs_count() -> None:
    first = make_engine()
    request = make_request("a", num_inference_steps=10)
    first.add_request(request)
    for _ in range(5):
        first.step()
    state = first.snapshot().states()["a"]
    engine = make_engine(**ON)
    engine.add_request(request, state)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [(o.status, o.step_index) for o in outputs] == [("running", 6), ("running", 9), ("ok", 10)]


# --- the Python API -------------------------------------------------------------------------------


def test_the_python_api_yields_them_between_the_images(tiny_model: Any) -> None:
    engine = OfflineDiffusion(str(tiny_model), device="cpu", **ON)
    params = SamplingParams(height=64, width=64, num_inference_steps=7, seed=1)
    outputs = list(engine.generate(["a cup", "a lamp"], params, ordered=True))
    assert sorted((o.request_id, o.status, o.step_index) for o in outputs) == [
        (name, status, step) for name in "01" for status, step in (("ok", 7), ("running", 3), ("running", 6))
    ]
    plain = OfflineDiffusion(str(tiny_model), device="cpu")
    expected = [sha256(output) for output in plain.generate(["a cup", "a lamp"], params, ordered=True)]
    assert [sha256(output) for output in outputs if output.finished] == expected
