"""On a GPU, SDXL at full width: near diffusers, finite in any company, nothing waited for."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compositions import pixels, prepare

from offline_diffusion.accel.graphs import StepRecorder
from offline_diffusion.accel.quantize import apply_quantization
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.models.loader import model_from_pipeline
from offline_diffusion.models.unet import own_vae
from offline_diffusion.request import Request, SamplingParams

pytestmark = pytest.mark.gpu

NUM_LAYERS = int(os.environ.get("OFFDIFF_GPU_LAYERS", "2"))
WORDS = ["storm", "lamp", "violet", "river", "seven", "quiet", "☂", "雨", "under", "glass"]
SIZES = [(512, 512), (256, 384), (1024, 1024), (264, 328)]
DEVICE = torch.device("cuda")


def load() -> tuple[Any, Any]:
    from full_size_families import build

    pipeline, checkpoint = build("sdxl", DEVICE, num_layers=NUM_LAYERS, num_text_layers=3)
    return pipeline, model_from_pipeline(pipeline, checkpoint, DEVICE)


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load()


@pytest.fixture(scope="module")
def model(loaded: tuple[Any, Any]) -> Any:
    return loaded[1]


def requests_of(
    model: Any, seed: int, count: int, size: tuple[int, int] | None = None, num_steps: int | None = None
) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        height, width = size or rng.choice(SIZES)
        params = SamplingParams(
            height=height,
            width=width,
            num_inference_steps=num_steps or rng.randint(2, 6),
            guidance_scale=rng.choice([1.0, 3.0, 5.0]),
            negative_prompt=rng.choice([None, "", "blurry"]),
        )
        prompt = " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 30, 120])))
        requests.append(model.capabilities.resolve(str(index), prompt, params, seed=rng.getrandbits(64)))
    return requests


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_a_forward_is_diffusers_to_bfloat16s_rounding(loaded: tuple[Any, Any], size: tuple[int, int]) -> None:
    pipeline, model = loaded
    runner = ModelRunner(model)
    prepared = [prepare(runner, own) for own in requests_of(model, 1, 3, size)]
    runner.denoise(prepared)
    batch = runner._batch
    assert batch is not None
    own = batch.model_input
    sample = own.latents.to(torch.bfloat16).unflatten(1, (size[0] // 8, size[1] // 8)).permute(0, 3, 1, 2)
    pooled, time_ids = own.vectors.split((1280, 6), dim=1)
    theirs = pipeline.unet(
        sample.contiguous(),
        own.timesteps,
        encoder_hidden_states=own.prompt_embeds,
        added_cond_kwargs={"text_embeds": pooled, "time_ids": time_ids},
        return_dict=False,
    )[0]
    ours = model.denoise_step(own)
    assert ours.isfinite().all()
    assert relative(ours, theirs.permute(0, 2, 3, 1).flatten(1, 2)) < 0.02


@torch.inference_mode()
def test_the_vae_decodes_as_before(loaded: tuple[Any, Any]) -> None:
    pipeline, _ = loaded
    vae = own_vae(pipeline.vae)
    vae.to(memory_format=torch.channels_last)
    latents = torch.randn(1, 4, 48, 64, device=DEVICE, dtype=torch.bfloat16)
    ours = vae.decode(latents, return_dict=False)[0]
    theirs = pipeline.vae.decode(latents, return_dict=False)[0]
    exact = copy.deepcopy(pipeline.vae).float().decode(latents.float(), return_dict=False)[0]
    assert relative(ours, exact) < 1.2 * relative(theirs, exact) < 0.06


@torch.inference_mode()
def test_a_step_in_company_is_the_step_alone_but_for_rounding(model: Any) -> None:
    """Convolutions are chosen by the batch's shape, so this is no equality of bits."""
    runner = ModelRunner(model)
    requests = requests_of(model, 3, 6, (512, 512))
    together = [prepare(runner, own) for own in requests]
    runner.denoise(together)
    runner.drop_batch()
    for own, request in zip(together, requests, strict=True):
        alone = prepare(runner, request)
        start = alone.latents.clone()
        runner.denoise([alone])
        runner.drop_batch()
        assert own.latents.isfinite().all()
        rounding = 0.02 * request.guidance_scale  # guidance multiplies that of two forwards
        assert relative(own.latents - start, alone.latents - start) < rounding


def test_whole_runs_in_company_are_near_those_alone(model: Any) -> None:
    requests = requests_of(model, 7, 8)
    many = Engine(model, EngineConfig(max_num_seqs=5))
    one = Engine(model, EngineConfig(max_num_seqs=1))
    for request, a, b in zip(requests, pixels(many, requests), pixels(one, requests), strict=True):
        assert a.std() > 1
        assert np.abs(a.astype(float) - b).mean() < 4, request


@torch.inference_mode()
def test_no_host_sync_between_compositions(model: Any, no_sync: Any) -> None:
    runner = ModelRunner(model)
    stacked = [prepare(runner, own) for own in requests_of(model, 4, 3, (512, 512), num_steps=6)]
    for _ in range(2):  # a small batch would be recorded now
        runner.denoise(stacked)
    with no_sync():
        runner.denoise(stacked)


@torch.inference_mode()
def test_a_recorded_step_is_the_step(model: Any) -> None:
    (request,) = requests_of(model, 5, 1, (256, 256), num_steps=8)
    latents = []
    for records in (True, False):
        runner = ModelRunner(model)
        if not records:
            runner._recorder = StepRecorder(torch.device("cpu"))
        prepared = prepare(runner, request)
        for _ in range(8):
            runner.denoise([prepared])
        assert runner._batch is not None
        assert (runner._batch.replay is not None) == records
        runner.drop_batch()
        latents.append(prepared.latents.clone())
    assert latents[0].isfinite().all()
    assert torch.equal(*latents)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@torch.inference_mode()
def test_a_quantized_step_is_near(model: Any, quantization: str) -> None:
    _, quantized = load()  # the same weights
    apply_quantization(quantized, quantization)
    (request,) = requests_of(model, 6, 1, (512, 512))
    latents = []
    for own in (model, quantized):
        runner = ModelRunner(own)
        prepared = prepare(runner, replace(request, num_inference_steps=4))
        start = prepared.latents.clone()
        runner.denoise([prepared])
        runner.drop_batch()
        latents.append(prepared.latents - start)
    assert 0 < relative(latents[1], latents[0]) < 0.15


def test_the_budget_is_measured_in_latent_positions(model: Any) -> None:
    engine = Engine(model, EngineConfig())
    assert engine.scheduler.max_num_batched_tokens in (4 * 67_584, 4 * 33_792)
