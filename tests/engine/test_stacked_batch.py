"""Stacked rows against diffusers' noise schedulers, run for each request alone."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from engine_fakes import CAPABILITIES, CHANNELS, FakeModel, FakeRecorder, make_request

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.batch import build_batch
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.engine.packed_batch import PreparedRequest
from offline_diffusion.engine.stacked_batch import StackedBatch
from offline_diffusion.models.base import PromptEmbeds, SequenceInputs
from offline_diffusion.models.capabilities import BatchKind
from offline_diffusion.models.linear_steps import StepTables
from offline_diffusion.models.stacked import StackedInput
from offline_diffusion.request import Request

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
KINDS: dict[str, dict[str, Any]] = {
    "EulerDiscreteScheduler": {},
    "EulerAncestralDiscreteScheduler": {},
    "DPMSolverMultistepScheduler": {"solver_order": 3},
}
GUIDANCE = ((1.0, None), (0.0, "ugly"), (3.0, "ugly"), (7.5, " "))


def noise_scheduler_of(kind: str) -> Any:
    return getattr(diffusers, kind)(**BETAS, **KINDS[kind])


def predicted(sample: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, vector: torch.Tensor) -> Any:
    """Not linear in the sample, and different for every input; one row."""
    return torch.tanh(sample + text.mean()) + torch.sin(timestep / 100) * 0.3 + vector.sum() / 50


class FakeStackedModel(FakeModel):
    """Rows of one shape, under a real noise scheduler."""

    capabilities = replace(CAPABILITIES, batch_kind=BatchKind.STACKED)
    num_sample_channels = CHANNELS

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.steps = StepTables(noise_scheduler_of(kind))
        self.num_latent_channels = CHANNELS * (1 + self.steps.num_remembered)
        self.shapes: list[tuple[int, ...]] = []

    def batch_key(self, request: Request) -> Any:
        return request.height, request.width

    def prepare_encode(self, prompts: Any) -> list[PromptEmbeds]:
        """Padded to one length, so that rows can be stacked."""
        ids = [(list(own.input_ids) + [32] * 40)[:40] for own in prompts]
        return [PromptEmbeds(torch.tensor(own, dtype=torch.float32).unsqueeze(1) / 100) for own in ids]

    def _draws(self, request: Request) -> Any:
        generator = torch.Generator().manual_seed(request.seed)
        size = self.capabilities.num_image_tokens(request.height, request.width)
        while True:
            yield torch.randn(size, CHANNELS, generator=generator)

    def prepare_latents(self, request: Request) -> torch.Tensor:
        sample = next(self._draws(request)) * self.steps.table(request.num_inference_steps).init_noise_sigma
        return torch.cat([sample] + [torch.zeros_like(sample)] * self.steps.num_remembered, dim=1)

    def prepare_noise(self, request: Request) -> torch.Tensor | None:
        num_draws = self.steps.table(request.num_inference_steps).num_draws
        _, *draws = (own for own, _ in zip(self._draws(request), range(1 + num_draws), strict=False))
        return torch.stack(draws) if draws else None

    def prepare_timesteps(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        steps = self.steps.table(request.num_inference_steps)
        return steps.columns, steps.timesteps

    def prepare_sequence(self, request: Request, prompt: PromptEmbeds) -> SequenceInputs:
        return SequenceInputs(vector=torch.tensor([request.height, request.width]) / 16)

    def denoise_step(self, batch: StackedInput) -> torch.Tensor:  # type: ignore[override]
        assert batch.vectors is not None
        self.shapes.append(tuple(batch.latents.shape))
        rows = zip(batch.latents, batch.timesteps, batch.prompt_embeds, batch.vectors, strict=True)
        return torch.stack([predicted(*row) for row in rows])


def expected_sample(kind: str, request: Request) -> torch.Tensor:
    """As a diffusers pipeline would draw it."""
    model, noise_scheduler = FakeStackedModel(kind), noise_scheduler_of(kind)
    noise_scheduler.set_timesteps(request.num_inference_steps)
    generator = torch.Generator().manual_seed(request.seed)
    size = model.capabilities.num_image_tokens(request.height, request.width)
    sample = torch.randn(size, CHANNELS, generator=generator) * noise_scheduler.init_noise_sigma
    texts = [request.prompt] + ([request.negative_prompt or ""] if request.cfg_active else [])
    embeds = [own.stream for own in model.prepare_encode([model.tokenize(text) for text in texts])]
    vector = torch.tensor([request.height, request.width]) / 16
    for timestep in noise_scheduler.timesteps:
        scaled = noise_scheduler.scale_model_input(sample, timestep)
        output, *negative = [predicted(scaled, timestep.float(), text, vector) for text in embeds]
        for own in negative:
            output = own + request.true_cfg_scale * (output - own)
        sample = noise_scheduler.step(output, timestep, sample, generator=generator, return_dict=False)[0]
    return sample


def random_requests(seed: int, count: int = 7, *, side: int | None = None) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        scale, negative = rng.choice(GUIDANCE)
        request = make_request(
            f"{seed}-{index}",
            "".join(rng.choices("abcdefgh ", k=rng.randint(1, 30))),
            height=side or 16 * rng.randint(1, 2),
            width=side or 16 * rng.randint(1, 3),
            num_inference_steps=rng.randint(1, 7),
            true_cfg_scale=scale,
            negative_prompt=negative,
            seed=rng.getrandbits(64),
        )
        requests.append(request)
    return requests


def prepare(model: FakeStackedModel, request: Request) -> PreparedRequest:
    negative = request.negative_prompt if request.cfg_active else None
    return ModelRunner(model).prepare(
        request, model.tokenize(request.prompt), None if negative is None else model.tokenize(negative)
    )


def assert_expected(kind: str, prepared: PreparedRequest) -> None:
    ours, expected = prepared.latents[:, :CHANNELS], expected_sample(kind, prepared.request)
    assert expected.std() > 0.005
    assert torch.allclose(ours, expected, rtol=1e-3, atol=2e-4), prepared.request


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_each_row_gets_its_own_answer_whoever_joins_and_leaves(kind: str, seed: int) -> None:
    model, rng = FakeStackedModel(kind), random.Random(seed)
    prepared = [prepare(model, request) for request in random_requests(seed, side=32)]
    left = list(prepared)
    while left:
        running = rng.sample(left, rng.randint(1, len(left)))
        batch = build_batch(running, model)
        assert isinstance(batch, StackedBatch)
        assert batch.num_seqs == sum(1 + own.request.cfg_active for own in running)
        assert batch.num_tokens == 4 * batch.num_seqs
        for _ in range(min(batch.num_steps_left, rng.randint(1, 2))):
            batch.refresh(model)
            batch.step_scheduler(batch.forward(model), model)
            batch.advance()
        batch.release()
        left = [own for own in left if own.step_index < own.request.num_inference_steps]
    for own in prepared:
        assert_expected(kind, own)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_stacks_one_shape_at_a_time_and_both_branches_in_one_forward(kind: str) -> None:
    model = FakeStackedModel(kind)
    requests = random_requests(11, 12)
    finals: dict[str, torch.Tensor] = {}
    engine = Engine(model, EngineConfig(max_num_seqs=5))
    decode = engine.runner.decode

    def watched(prepared: PreparedRequest) -> None:
        finals[prepared.request.request_id] = prepared.latents
        decode(prepared)

    engine.runner.decode = watched  # type: ignore[method-assign]
    model.post_decode = (
        lambda latents, height, width: FakeModel.post_decode(  # type: ignore[method-assign]
            model, latents[:, :CHANNELS].contiguous(), height, width
        )
    )
    outputs = list(engine.generate(requests))
    assert [output.error for output in outputs] == [None] * 12
    assert max(shape[0] for shape in model.shapes) > 2
    for request in requests:
        ours = finals[request.request_id][:, :CHANNELS]
        assert torch.allclose(ours, expected_sample(kind, request), rtol=1e-3, atol=1e-3), request
    rows = sum((1 + own.cfg_active) * own.num_inference_steps for own in requests)
    assert sum(shape[0] for shape in model.shapes) == rows == engine.stats.num_step_seqs


def test_a_replayed_step_is_a_step() -> None:
    """All that a recording holds must read the tensors, not numbers of the step it was made at."""
    model, recorder = FakeStackedModel("DPMSolverMultistepScheduler"), FakeRecorder()
    runner = ModelRunner(model)
    runner._recorder = recorder  # type: ignore[assignment]
    requests = [own for own in random_requests(3, 12, side=16) if own.num_inference_steps >= 5][:3]
    prepared = [prepare(model, replace(own, num_inference_steps=7)) for own in requests]
    assert len(prepared) > 1
    for _ in range(7):
        runner.denoise(prepared)
    runner.drop_batch()
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 6)
    for own in prepared:
        assert_expected("DPMSolverMultistepScheduler", own)


def test_building_and_stepping_leave_the_requests_state_alone() -> None:
    model = FakeStackedModel("EulerDiscreteScheduler")
    prepared = prepare(model, make_request("a"))
    before = prepared.latents.clone()
    batch = build_batch([prepared], model)
    batch.refresh(model)
    batch.step_scheduler(batch.forward(model), model)
    assert torch.equal(prepared.latents, before)
    batch.release()
    assert not torch.equal(prepared.latents, before)


def test_company_changes_no_bit_of_the_solver() -> None:
    """The UNet may round differently in company; combining branches and stepping must not."""
    model = FakeStackedModel("DPMSolverMultistepScheduler")
    requests = random_requests(5, 5, side=32)
    together = [prepare(model, request) for request in requests]
    batch = build_batch(together, model)
    batch.refresh(model)
    batch.step_scheduler(batch.forward(model), model)
    batch.release()
    for own, request in zip(together, requests, strict=True):
        alone = prepare(model, request)
        single = build_batch([alone], model)
        single.refresh(model)
        single.step_scheduler(single.forward(model), model)
        single.release()
        assert torch.equal(own.latents, alone.latents)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_resumed_request_ends_where_it_would_have(kind: str, num_steps: int) -> None:
    """Its state has what a multistep noise scheduler remembers, and its draws go on where they were."""
    requests = [replace(own, num_inference_steps=6) for own in random_requests(17, 3, side=32)]
    first = Engine(FakeStackedModel(kind), EngineConfig())
    for request in requests:
        first.add_request(request)
    for _ in range(num_steps):
        assert first.step() == []
    states = first.snapshot().states()
    engine = Engine(FakeStackedModel(kind), EngineConfig())
    finals: list[PreparedRequest] = []
    engine.runner.decode = finals.append  # type: ignore[method-assign]
    for request in requests:
        assert states[request.request_id].step_index == num_steps
        engine.add_request(request, states[request.request_id])
    for _ in range(6 - num_steps):
        engine.step()
    assert len(finals) == 3
    for prepared in finals:
        assert_expected(kind, prepared)


def test_the_state_of_a_resume_must_have_the_memory_in_it() -> None:
    model = FakeStackedModel("DPMSolverMultistepScheduler")
    engine = Engine(model, EngineConfig())
    request = make_request("a", num_inference_steps=6)
    engine.add_request(request)
    engine.step()
    engine.step()
    state = engine.snapshot().states()["a"]
    num_tokens = math.prod((request.height // 16, request.width // 16))
    assert state.latents.shape == (num_tokens, 3 * CHANNELS)
    cut = replace(state, latents=state.latents[:, :CHANNELS])
    with pytest.raises(ValueError, match="latents"):
        Engine(model, EngineConfig()).add_request(request, cut)
