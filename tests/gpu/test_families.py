"""On a GPU, of each family at full width and a few layers: a request's bits do not depend on its company."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compositions import forward, pixels, prepare, prepared_composition, random_job, random_request, resolved

from offline_diffusion.accel.graphs import StepRecorder
from offline_diffusion.accel.quantize import apply_quantization
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.models.loader import model_from_pipeline

pytestmark = pytest.mark.gpu

NAMES = ["flux_dev", "flux_schnell", "sd3_medium", "sd35_large", "sd35_medium"]
NUM_LAYERS = int(os.environ.get("OFFDIFF_GPU_LAYERS", "3"))
WORDS = ["storm", "lamp", "violet", "river", "seven", "quiet", "☂", "雨", "under", "glass"]


def load(name: str) -> Any:
    from full_size_families import build

    device = torch.device("cuda")
    pipeline, checkpoint = build(name, device, num_layers=NUM_LAYERS, num_text_layers=3)
    return model_from_pipeline(pipeline, checkpoint, device)


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return load(request.param)


def assert_a_step_does_not_know_its_company(model: Any, composition: int) -> None:
    prepared = prepared_composition(model, composition)
    for request, packed in zip(prepared, forward(model, prepared), strict=True):
        (alone,) = forward(model, [prepare(ModelRunner(model), request.request, request.step_index)])
        assert packed.noise_pred.isfinite().all()
        assert torch.equal(packed.noise_pred, alone.noise_pred), request.request
        assert torch.equal(packed.latents, alone.latents), request.request


@pytest.mark.parametrize("composition", range(20))
@torch.inference_mode()
def test_noise_prediction_and_latents_do_not_depend_on_company(model: Any, composition: int) -> None:
    assert_a_step_does_not_know_its_company(model, 3000 + composition)


@torch.inference_mode()
def test_company_of_more_than_64_sequences(model: Any) -> None:
    """Forty guided pairs and a larger image: products over sequences have more rows than padding gives."""
    rng = random.Random(7)
    requests = [random_request(rng, str(index), [(64, 64)]) for index in range(40)]
    requests.append(random_request(rng, "40", [(384, 640)]))
    guided = [replace(own, true_cfg_scale=3.0, negative_prompt="blurry") for own in requests]
    runner = ModelRunner(model)
    prepared = [prepare(runner, resolved(own, model.capabilities), 1) for own in guided]
    for request, packed in zip(prepared, forward(model, prepared), strict=True):
        (alone,) = forward(model, [request])
        assert packed.noise_pred.isfinite().all()
        assert torch.equal(packed.noise_pred, alone.noise_pred), request.request
        assert torch.equal(packed.latents, alone.latents), request.request


@pytest.mark.parametrize("composition", range(6))
def test_pixels_do_not_depend_on_company(model: Any, composition: int) -> None:
    requests = [resolved(own, model.capabilities) for own in random_job(4000 + composition)]
    many = Engine(model, EngineConfig(max_num_seqs=5, max_num_batched_tokens=16_000))
    one = Engine(model, EngineConfig(max_num_seqs=1))
    for request, a, b in zip(requests, pixels(many, requests), pixels(one, requests), strict=True):
        assert np.array_equal(a, b), request


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_a_prompts_bits_do_not_depend_on_company(model: Any, seed: int) -> None:
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.choice([1, 4, 20, 60, 200]))) for _ in range(9)]
    prompts = [model.tokenize(text) for text in texts]
    alone = [model.prepare_encode([prompt])[0] for prompt in prompts]
    for order in (range(9), rng.sample(range(9), 9)):
        together = model.prepare_encode([prompts[index] for index in order])
        for index, encoded in zip(order, together, strict=True):
            assert encoded.stream.isfinite().all()
            assert torch.equal(encoded.stream, alone[index].stream), texts[index]
            assert torch.equal(encoded.pooled, alone[index].pooled), texts[index]


@torch.inference_mode()
def test_no_host_sync_between_compositions(model: Any, no_sync: Any) -> None:
    rng, runner = random.Random(3), ModelRunner(model)
    requests = [resolved(random_request(rng, str(index)), model.capabilities) for index in range(3)]
    packed = [prepare(runner, replace(own, num_inference_steps=4)) for own in requests]
    for _ in range(2):
        runner.denoise(packed)
    with no_sync():
        runner.denoise(packed)


@torch.inference_mode()
def test_a_recorded_step_is_the_step(model: Any) -> None:
    """The conditioning of every sequence is computed within the recording."""
    request = replace(random_request(random.Random(5), "0", [(256, 256)]), num_inference_steps=8)
    request = resolved(replace(request, true_cfg_scale=3.0, negative_prompt="blurry"), model.capabilities)
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


@torch.inference_mode()
def test_a_noise_prediction_is_diffusers_but_for_bfloat16s_rounding(model: Any) -> None:
    """The first of a run of the pipeline given the row alone, from the same noise and prompt."""
    request = random_request(random.Random(9), "0", [(256, 384)])
    request = replace(request, true_cfg_scale=1.0, guidance_scale=1.0, num_inference_steps=3)
    request = resolved(request, model.capabilities)
    seen: list[torch.Tensor] = []
    hook = model._pipeline.transformer.register_forward_hook(lambda *call: seen.append(call[-1][0]))
    model._pipeline(
        request.prompt,
        height=request.height,
        width=request.width,
        num_inference_steps=3,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        guidance_scale=1.0,
        output_type="latent",
    )
    hook.remove()
    theirs = (seen[0][0] if seen[0].ndim == 3 else patches(seen[0])).float()
    (own,) = forward(model, [prepare(ModelRunner(model), request)])
    assert theirs.std() > 0.01
    assert (own.noise_pred.float() - theirs).norm() / theirs.norm() < 0.02


def patches(latents: torch.Tensor) -> torch.Tensor:
    """``[1, C, 2 · rows, 2 · columns]`` → ``[S, 4 · C]``, channels first within a patch."""
    split = latents[0].unflatten(1, (-1, 2)).unflatten(3, (-1, 2))  # [C, rows, 2, columns, 2]
    return split.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@torch.inference_mode()
def test_quantized_steps_do_not_depend_on_company(name: str, quantization: str) -> None:
    model = load(name)
    apply_quantization(model, quantization)
    for composition in range(6):
        assert_a_step_does_not_know_its_company(model, 5000 + composition)
