"""The engine over a model with a closed form: right pictures in any company."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_fakes import (
    MODES,
    FakeModel,
    expected_pixels,
    make_engine,
    make_request,
    num_joint_tokens,
    random_requests,
    same_picture,
)

from offline_diffusion.attention.metadata import SequenceBounds
from offline_diffusion.engine.scheduler import LOOK_AHEAD
from offline_diffusion.models.base import PackedInput
from offline_diffusion.request import Request, RequestOutput


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
    seen: list[PackedInput] = []
    model.on_denoise = seen.append
    requests = [make_request(str(n), num_inference_steps=n) for n in (2, 5, 9)]
    list(make_engine(model).generate(requests))
    packs = [len(list(same)) for _, same in itertools.groupby(seen, key=id)]
    assert packs == [2, 3, 4]  # of three requests, then two, then one
    assert model.num_sequences == 3  # prepared once each


def test_a_constant_composition_is_built_once() -> None:
    model = FakeModel()
    seen: list[PackedInput] = []
    model.on_denoise = seen.append
    list(make_engine(model).generate([make_request(str(n), num_inference_steps=20) for n in range(4)]))
    assert len(seen) == 20
    assert len(set(map(id, seen))) == 1


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
    monkeypatch.setattr("offline_diffusion.engine.prompt_cache.PROMPT_CACHE_TOKENS", 3)
    model = FakeModel()
    model.encode_rows = 1  # nothing is taken along, so the order of use is that of the requests
    engine = make_engine(model, max_num_seqs=1)
    prompts = ["a", "b", "a", "c", "a", "d", "b"]  # a is used again and again, b is the oldest at d
    list(engine.generate([make_request(str(n), prompt) for n, prompt in enumerate(prompts)]))
    assert len(engine.runner.prompts._encoded) == 3
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
        packs.append((num_joint_tokens(batch), engine.num_running))

    model.on_denoise = look
    engine = make_engine(model, max_num_batched_tokens=60)
    list(engine.generate(random_requests(5)))
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
    assert first.seqlens == (3 + 3, 2 + 4, 4 + 3)
    for attention in (first.img_attention, first.txt_attention):
        assert attention.keys.cu_seqlens.tolist() == [0, 6, 12, 19]
        assert attention.keys.max_seqlen == 7
    assert first.img_attention.queries.cu_seqlens.tolist() == [0, 3, 7, 10]
    assert first.txt_attention.queries.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert (first.img_attention.queries.max_seqlen, first.txt_attention.queries.max_seqlen) == (4, 4)
    assert first.conditioning.tolist() == [
        750.0,
        500.0,
        750.0,
    ]  # refreshed since: those of the last common step
    assert first.txt_sequence.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert first.img_sequence.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert first.txt_to_joint.tolist() == [0, 1, 2, 6, 7, 12, 13, 14, 15]
    assert first.img_to_joint.tolist() == [3, 4, 5, 8, 9, 10, 11, 16, 17, 18]


def test_an_empty_sequence_is_an_invariant_broken() -> None:
    with pytest.raises(AssertionError, match="empty sequence"):
        SequenceBounds.from_seqlens([3, 0], torch.device("cpu"))


def test_the_pictures_are_not_all_alike() -> None:
    """Guards the tests above: the closed form tells requests apart."""
    a, b = expected_pixels(make_request("a")), expected_pixels(make_request("b", "another"))
    assert (a != b).mean() > 0.5
