"""A pack taken apart again: every request's tokens come back to it, one step further."""

from __future__ import annotations

import torch
from engine_fakes import FakeModel, expected_latents, make_request
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.engine.packed_batch import PackedBatch, PreparedRequest
from offline_diffusion.request import Request

requests_strategy = st.lists(
    st.builds(
        lambda index, h, w, steps, scale, negative, seed: make_request(
            str(index),
            "abcdefgh"[: 1 + index % 8],
            height=16 * h,
            width=16 * w,
            num_inference_steps=steps,
            true_cfg_scale=scale,
            negative_prompt=negative,
            seed=seed,
        ),
        st.integers(0, 99),
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(1, 5),
        st.sampled_from([1.0, 3.0]),
        st.sampled_from([None, "xyz"]),
        st.integers(0, 2**64 - 1),
    ),
    min_size=1,
    max_size=6,
)


def prepare(model: FakeModel, request: Request) -> PreparedRequest:
    negative = request.negative_prompt if request.cfg_active else None
    return ModelRunner(model).prepare(
        request, model.tokenize(request.prompt), None if negative is None else model.tokenize(negative)
    )


@given(requests_strategy)
def test_stepping_packs_of_those_left_gives_every_row_its_own_answer(requests: list[Request]) -> None:
    model = FakeModel()
    prepared = [prepare(model, request) for request in requests]
    left = list(prepared)
    while left:
        batch = PackedBatch.build(left, model)
        assert batch.num_seqs == sum(1 + own.request.cfg_active for own in left)
        batch.refresh(model)
        batch.step_scheduler(batch.forward(model), model)
        batch.advance()
        batch.release()
        left = [own for own in left if own.step_index < own.request.num_inference_steps]
    for own in prepared:
        assert own.step_index == own.request.num_inference_steps
        assert torch.allclose(own.latents.double(), expected_latents(own.request), atol=1e-4)


@given(requests_strategy)
def test_index_maps_cover_every_token_once(requests: list[Request]) -> None:
    model = FakeModel()
    batch = PackedBatch.build([prepare(model, request) for request in requests], model)
    batch.refresh(model)
    batch.forward(model)
    packed = batch.model_input
    joint = torch.cat((packed.img_to_joint, packed.txt_to_joint)).sort().values
    assert torch.equal(joint, torch.arange(len(joint)))
    assert len(joint) == sum(packed.seqlens) == len(packed.rotary.cos)
    assert packed.img_positions is packed.vectors is None
    assert torch.equal(packed.latents, batch.latents[batch.img_source])
    request_of = torch.tensor(batch.seq_request)
    assert torch.equal(batch.owner[batch.img_source], request_of[packed.img_sequence])
    assert len(packed.conditioning) == batch.num_seqs


def test_building_and_stepping_leave_the_requests_latents_alone() -> None:
    model = FakeModel()
    prepared = prepare(model, make_request("a"))
    before = prepared.latents.clone()
    batch = PackedBatch.build([prepared], model)
    batch.step_scheduler(batch.forward(model), model)
    assert torch.equal(prepared.latents, before)
    batch.release()
    assert not torch.equal(prepared.latents, before)
