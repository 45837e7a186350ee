"""On a GPU a request's bits do not depend on its company."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compositions import forward, pixels, prepare, prepared_composition, random_job, random_request

from offline_diffusion.accel.graphs import StepRecorder
from offline_diffusion.attention.backends import available_backends, load_backend
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.model_runner import ModelRunner

pytestmark = pytest.mark.gpu

NUM_COMPOSITIONS = 50
NUM_JOBS = 20


@pytest.mark.parametrize("composition", range(NUM_COMPOSITIONS))
@torch.inference_mode()
def test_noise_prediction_and_latents_do_not_depend_on_company(gpu_model: Any, composition: int) -> None:
    prepared = prepared_composition(gpu_model, composition)
    for index, (request, packed) in enumerate(zip(prepared, forward(gpu_model, prepared), strict=True)):
        (alone,) = forward(gpu_model, [prepare(ModelRunner(gpu_model), request.request, request.step_index)])
        assert packed.noise_pred.isfinite().all()
        assert torch.equal(packed.noise_pred, alone.noise_pred), (composition, index, request.request)
        assert torch.equal(packed.latents, alone.latents), (composition, index, request.request)


@pytest.mark.parametrize("composition", range(NUM_JOBS))
def test_pixels_do_not_depend_on_company(gpu_model: Any, composition: int) -> None:
    """Whole runs: requests join and leave, decode and copy go on beside the steps."""
    requests = random_job(1000 + composition)
    budget = [9_000, 16_000][composition % 2]
    many = Engine(gpu_model, EngineConfig(max_num_seqs=5, max_num_batched_tokens=budget))
    one = Engine(gpu_model, EngineConfig(max_num_seqs=1))
    for request, a, b in zip(requests, pixels(many, requests), pixels(one, requests), strict=True):
        assert np.array_equal(a, b), request
        assert a.std() > 1


@torch.inference_mode()
def test_no_host_sync_between_compositions(gpu_model: Any, no_sync: Any) -> None:
    rng = random.Random(3)
    runner = ModelRunner(gpu_model)
    packed = [prepare(runner, random_request(rng, str(index))) for index in range(3)]
    for _ in range(2):  # a small pack would be recorded now
        runner.denoise(packed)
    with no_sync():
        runner.denoise(packed)


@torch.inference_mode()
def test_a_recorded_step_is_the_step(gpu_model: Any) -> None:
    request = replace(random_request(random.Random(5), "0", [(256, 256)]), num_inference_steps=8)
    latents = []
    for records in (True, False):
        runner = ModelRunner(gpu_model)
        if not records:
            runner._recorder = StepRecorder(torch.device("cpu"))
        prepared = prepare(runner, request)
        for _ in range(8):
            runner.denoise([prepared])
        assert (runner._batch.replay is not None) == records
        runner.drop_batch()
        latents.append(prepared.latents.clone())
    assert latents[0].isfinite().all()
    assert torch.equal(*latents)


@pytest.mark.parametrize("name", ["fa3", "torch_varlen", "flash_attn"])
def test_attention_backends_agree_with_the_reference(name: str) -> None:
    from offline_diffusion.attention.metadata import AttentionMetadata, SequenceBounds

    device = torch.device("cuda")
    status = {status.name: status for status in available_backends(device, torch.bfloat16)}[name]
    if not status.works:
        pytest.skip(status.why_not or "")
    _, attend = load_backend(name, device, torch.bfloat16)
    num_queries, num_keys = [12, 320, 1024, 1], [17, 320, 1088, 1]
    meta = AttentionMetadata(
        SequenceBounds.from_seqlens(num_queries, device), SequenceBounds.from_seqlens(num_keys, device)
    )
    q = torch.randn(sum(num_queries), 24, 128, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(sum(num_keys), 24, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    outs = attend(q, k, v, meta).double().split(num_queries)
    parts = zip(q.split(num_queries), k.split(num_keys), v.split(num_keys), strict=True)
    for out, part in zip(outs, parts, strict=True):
        query, key, value = (x.double().transpose(0, 1) for x in part)
        weights = (query @ key.transpose(1, 2) / 128**0.5).softmax(-1)
        expected = (weights @ value).transpose(0, 1)
        assert (out - expected).norm() / expected.norm() < 6e-3


def test_fused_gelu_is_the_tanh_approximation(gpu_model: Any) -> None:
    layer = gpu_model._blocks[0].img.mlp_in
    x = torch.randn(300, layer.weight.shape[1], device="cuda", dtype=torch.bfloat16)
    wide = x.double() @ layer.weight.double().t() + layer.bias.double()
    expected = torch.nn.functional.gelu(wide, approximate="tanh")
    error = (layer.gelu(x).double() - expected).norm() / expected.norm()
    assert error < 4e-3
    assert torch.equal(layer.gelu(x)[100:117], layer.gelu(x[100:117]))
