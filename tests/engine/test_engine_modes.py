"""Every execution mode on one engine: the same pictures, and one request's end is nobody else's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from engine_fakes import (
    MODES,
    FakeModel,
    ManualClock,
    has_text,
    make_engine,
    make_request,
    random_requests,
    same_picture,
)

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.models.base import PackedInput
from offline_diffusion.request import Request, RequestOutput


def mixed(seed: int) -> list[Request]:
    """Unlike ones, and of each a twin that may share a wave."""
    requests = random_requests(seed, 6)
    twins = [make_request(f"{r.request_id} twin", "a twin", height=r.height, width=r.width) for r in requests]
    return [*requests, *twins]


def finish(engine: Engine, outputs: list[RequestOutput] | None = None) -> dict[str, RequestOutput]:
    outputs = outputs or []
    while engine.has_unfinished:
        outputs += engine.step()
    return {output.request_id: output for output in outputs}


def test_an_engine_says_which_mode_it_is_in() -> None:
    assert {name: make_engine(**options).mode.value for name, options in MODES.items()} == {
        "pack": "packed",
        "fifo": "packed",
        "serial": "single_step",
        "serial requests": "serial",
        "waves": "request_batch",
        "same shape": "same_shape",
        "shortest": "packed",
        "deadline": "packed",
        "everything": "packed",
    }


def test_no_mode_changes_a_byte() -> None:
    pictures: dict[str, list[bytes]] = {}
    for mode, options in MODES.items():
        outputs = {output.request_id: output for output in make_engine(**options).generate(mixed(3))}
        pictures[mode] = [outputs[name].pixels.tobytes() for name in sorted(outputs)]  # type: ignore[union-attr]
    assert all(own == pictures["serial"] for own in pictures.values())


@pytest.mark.parametrize("mode", MODES)
def test_an_abort_touches_nobody_else(mode: str) -> None:
    """Whoever it is and wherever it stands: waiting, running, or past its last step."""
    requests = mixed(5)
    for number_of_steps in (0, 1, 3, 6):
        engine = make_engine(**MODES[mode])
        for request in requests:
            engine.add_request(request)
        outputs: list[RequestOutput] = []
        for _ in range(number_of_steps):
            outputs += engine.step()
        gone = {output.request_id for output in outputs}
        victims = [requests[0].request_id, requests[-1].request_id, requests[3].request_id]
        aborted = {name for name in victims if engine.abort(name)}
        assert not aborted & gone
        by_id = finish(engine, outputs)
        assert {name for name, output in by_id.items() if output.status == "aborted"} == aborted
        for request in requests:
            if request.request_id not in aborted:
                assert same_picture(by_id[request.request_id].pixels, request)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", ["encode", "denoise", "decode", "nan", "memory"])
def test_a_fault_touches_nobody_else(mode: str, stage: str) -> None:
    model = FakeModel()
    error = torch.OutOfMemoryError("full") if stage == "memory" else RuntimeError("broken")

    def on_encode(text: str) -> None:
        if stage == "encode" and "!" in text:
            raise error

    def on_denoise(batch: PackedInput) -> None:
        if stage in ("denoise", "memory") and has_text(batch, "!"):
            raise error

    def on_decode(height: int, width: int) -> None:
        if stage == "decode" and (height, width) == (16, 160):
            raise error

    model.on_encode, model.on_denoise, model.on_decode = on_encode, on_denoise, on_decode
    bad = make_request("bad", "boo!", height=16, width=160, num_inference_steps=3)
    if stage == "nan":
        plain = model.prepare_latents
        model.prepare_latents = lambda r: plain(r) * (np.nan if r is bad else 1)  # type: ignore[method-assign]
    like_bad = [make_request(f"like {n}", height=16, width=160, num_inference_steps=3) for n in range(2)]
    if stage == "decode":
        like_bad = []  # it is told by its size here
    requests = [*mixed(7)[:4], bad, *like_bad, *mixed(7)[4:]]
    outputs = {o.request_id: o for o in make_engine(model, **MODES[mode]).generate(requests)}
    assert outputs["bad"].status == "failed"
    for request in requests:
        if request is not bad:
            assert (outputs[request.request_id].status, outputs[request.request_id].error) == ("ok", None)
            assert same_picture(outputs[request.request_id].pixels, request)


def shapes_of_steps(**options: Any) -> list[set[tuple[int, ...]]]:
    """For every step of a mix the image tokens of its sequences."""
    model = FakeModel()
    seen: list[set[tuple[int, ...]]] = []
    model.on_denoise = lambda batch: seen.append({s[1:] for s in sequences(batch)})
    list(make_engine(model, **options).generate(mixed(11)))
    return seen


def sequences(batch: PackedInput) -> list[tuple[int, int]]:
    """Text and image tokens of each."""
    bounds = batch.img_attention.queries.cu_seqlens.tolist()
    img = [stop - start for start, stop in itertools.pairwise(bounds)]
    return [(total - own, own) for total, own in zip(batch.seqlens, img, strict=True)]


def test_only_the_packed_mode_mixes_shapes() -> None:
    options: dict[str, Any] = {"max_num_seqs": 4, "scheduling_policy": "fifo"}
    assert all(len(shapes) == 1 for shapes in shapes_of_steps(batching="same_shape", **options))
    assert all(len(shapes) == 1 for shapes in shapes_of_steps(step_execution=False, **options))
    assert any(len(shapes) > 1 for shapes in shapes_of_steps(**options))


def test_like_requests_join_between_steps_whatever_their_progress_and_step_counts() -> None:
    """What continuous batching by shape has over waves."""
    model = FakeModel()
    sizes: list[int] = []
    model.on_denoise = lambda batch: sizes.append(len(batch.seqlens))
    engine = make_engine(model, batching="same_shape", max_num_seqs=8)
    for number, steps in enumerate((6, 3, 5)):
        engine.add_request(make_request(str(number), num_inference_steps=steps))
        engine.step()
    finish(engine)
    assert sizes == [1, 2, 3, 3, 2, 2, 1]  # by hand: they begin at steps 0, 1 and 2 and have 6, 3 and 5


def test_an_unlike_head_holds_up_those_behind_it_under_fifo_alone() -> None:
    for policy, expected in [("fifo", ["a"]), ("pack", ["a", "c"])]:
        engine = make_engine(batching="same_shape", scheduling_policy=policy)
        for name, width in [("a", 32), ("b", 48), ("c", 32)]:
            engine.add_request(make_request(name, width=width, num_inference_steps=5))
        if policy == "pack":
            engine.abort("b")  # the largest would go first
            engine.add_request(make_request("b", width=48, num_inference_steps=5))
        engine.step()
        assert [entry.request_id for entry in engine.scheduler.running] == expected


def test_a_deadline_counts_from_arrival() -> None:
    clock = ManualClock()
    engine = Engine(FakeModel(), EngineConfig(scheduling_policy="deadline", max_num_seqs=1), clock)
    engine.add_request(make_request("batch", num_inference_steps=2))
    clock.now = 50.0
    engine.add_request(make_request("late", slo_ms=9_000.0))
    clock.now = 51.0
    engine.add_request(make_request("urgent", slo_ms=1_000.0))
    order = [output.request_id for output in finish(engine).values()]
    assert order == ["urgent", "late", "batch"]
