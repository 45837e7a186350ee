"""On a GPU a request's bits do not depend on its company."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from offline_diffusion.attention.backends import available_backends, load_backend
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.engine.packed_batch import PackedBatch, PreparedRequest
from offline_diffusion.request import Request

pytestmark = pytest.mark.gpu

NUM_COMPOSITIONS = 20
SIZES = [(256, 256), (512, 512), (256, 768), (384, 640), (64, 64), (1024, 1024), (80, 176), (768, 512)]


def _random_request(rng: random.Random, name: str) -> Request:
    height, width = rng.choice(SIZES)
    words = ["storm", "lamp", "violet", "river", "seven", "quiet", "engines", "☂", "雨", "under", "glass"]
    return Request(
        request_id=name,
        prompt=" ".join(rng.choices(words, k=rng.choice([1, 5, 30, 120]))),
        negative_prompt=rng.choice([None, "", "blurry, low quality"]),
        height=height,
        width=width,
        num_inference_steps=rng.choice([2, 3, 5, 8]),
        true_cfg_scale=rng.choice([1.0, 2.0, 7.5]),
        seed=rng.getrandbits(64),
    )


def _prepare(runner: ModelRunner, request: Request, step_index: int) -> PreparedRequest:
    model = runner.model
    negative = model.tokenize(request.negative_prompt or "") if request.cfg_active else None
    prepared = runner.prepare(request, model.tokenize(request.prompt), negative)
    prepared.step_index = step_index
    return prepared


def _forward(model: Any, requests: list[PreparedRequest]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Per request: its branches' noise predictions, and its latents after one step."""
    batch = PackedBatch.build(requests, model)
    noise_pred = batch.forward(model)
    batch.step_scheduler(noise_pred, model)
    batch.release()
    lengths = [request.num_image_tokens for request in requests]
    guided = [request for request in requests if request.negative_embeds is not None]
    parts = noise_pred.split(lengths + [request.num_image_tokens for request in guided])
    negatives = dict(zip([id(request) for request in guided], parts[len(requests) :], strict=True))
    preds = []
    for request, positive in zip(requests, parts, strict=False):
        own = [positive] + ([negatives[id(request)]] if id(request) in negatives else [])
        preds.append(torch.cat(own))
    return preds, [request.latents for request in requests]


@pytest.mark.parametrize("composition", range(NUM_COMPOSITIONS))
@torch.inference_mode()
def test_noise_prediction_and_latents_do_not_depend_on_company(gpu_model: Any, composition: int) -> None:
    rng = random.Random(composition)
    runner = ModelRunner(gpu_model)
    requests = [_random_request(rng, str(index)) for index in range(rng.choice([2, 3, 5, 9]))]
    steps = [rng.randrange(request.num_inference_steps) for request in requests]
    packed = [_prepare(runner, request, step) for request, step in zip(requests, steps, strict=True)]
    preds, latents = _forward(gpu_model, packed)
    for index, (request, step) in enumerate(zip(requests, steps, strict=True)):
        alone_pred, alone_latents = _forward(gpu_model, [_prepare(ModelRunner(gpu_model), request, step)])
        assert preds[index].isfinite().all()
        assert torch.equal(preds[index], alone_pred[0]), (composition, index, request)
        assert torch.equal(latents[index], alone_latents[0]), (composition, index, request)


@pytest.mark.parametrize("composition", range(NUM_COMPOSITIONS))
def test_pixels_do_not_depend_on_company(gpu_model: Any, composition: int) -> None:
    """Whole runs: requests join and leave, decode and copy go on beside the steps."""
    rng = random.Random(1000 + composition)
    requests = [_random_request(rng, str(index)) for index in range(rng.choice([3, 4, 6]))]
    many = Engine(gpu_model, EngineConfig(max_num_seqs=5, max_num_batched_tokens=rng.choice([9_000, 16_000])))
    one = Engine(gpu_model, EngineConfig(max_num_seqs=1))
    packed = {output.request_id: output for output in many.generate(requests)}
    alone = {output.request_id: output for output in one.generate(requests)}
    for request in requests:
        a, b = packed[request.request_id].pixels, alone[request.request_id].pixels
        assert a is not None
        assert b is not None
        assert np.array_equal(a, b), request
        assert a.std() > 1


@torch.inference_mode()
def test_no_host_sync_between_compositions(gpu_model: Any) -> None:
    rng = random.Random(3)
    runner = ModelRunner(gpu_model)
    packed = [_prepare(runner, _random_request(rng, str(index)), 0) for index in range(3)]
    runner.denoise(packed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.denoise(packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["fa3", "torch_varlen", "flash_attn"])
def test_attention_backends_agree_with_the_reference(name: str) -> None:
    from offline_diffusion.attention.metadata import AttentionMetadata

    device = torch.device("cuda")
    status = {status.name: status for status in available_backends(device, torch.bfloat16)}[name]
    if not status.works:
        pytest.skip(status.why_not or "")
    _, attend = load_backend(name, device, torch.bfloat16)
    meta = AttentionMetadata.from_seqlens([17, 320, 1088, 1], device)
    q, k, v = (
        torch.randn(meta.cu_seqlens[-1], 24, 128, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    out = attend(q, k, v, meta).double()
    start = 0
    for length in meta.seqlens:
        part = [x[start : start + length].double().transpose(0, 1) for x in (q, k, v)]
        weights = (part[0] @ part[1].transpose(1, 2) / 128**0.5).softmax(-1)
        expected = (weights @ part[2]).transpose(0, 1)
        error = (out[start : start + length] - expected).norm() / expected.norm()
        assert error < 6e-3
        start += length


def test_fused_gelu_is_the_tanh_approximation(gpu_model: Any) -> None:
    layer = gpu_model._blocks[0].img.mlp_in
    x = torch.randn(300, layer.weight.shape[1], device="cuda", dtype=torch.bfloat16)
    wide = x.double() @ layer.weight.double().t() + layer.bias.double()
    expected = torch.nn.functional.gelu(wide, approximate="tanh")
    error = (layer.gelu(x).double() - expected).norm() / expected.norm()
    assert error < 4e-3
    assert torch.equal(layer.gelu(x)[100:117], layer.gelu(x[100:117]))
