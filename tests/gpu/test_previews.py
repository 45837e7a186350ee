"""On a GPU: previews are decoded beside the steps, show their moment, and change no bit of the images."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compositions import prepare, random_job

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.engine.previews import Previews
from offline_diffusion.request import Request, RequestOutput

pytestmark = pytest.mark.gpu

EVERY_STEP: dict[str, Any] = {"diffusion_streaming_output": True, "preview_interval": 1}


def _sha256(outputs: list[RequestOutput]) -> dict[str, str]:
    finished = {output.request_id: output for output in outputs if output.finished}
    assert {output.status for output in finished.values()} == {"ok"}
    return {name: hashlib.sha256(own.pixels.tobytes()).hexdigest() for name, own in finished.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("composition", range(6))
def test_final_pixels_are_those_without_previews(gpu_model: Any, composition: int) -> None:
    """Packs that change, and from 4 on small ones that are recorded and replayed."""
    requests = random_job(3000 + composition)
    if composition >= 4:
        requests = [replace(own, height=256, width=256, num_inference_steps=9) for own in requests[:3]]
    options: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 16_000}
    plain = list(Engine(gpu_model, EngineConfig(**options)).generate(requests))
    shown = list(Engine(gpu_model, EngineConfig(**options, **EVERY_STEP)).generate(requests))
    assert _sha256(shown) == _sha256(plain)
    previews = [output for output in shown if not output.finished]
    assert len(previews) == sum(request.num_inference_steps - 1 for request in requests)
    assert all(output.pixels.std() > 1 for output in previews)  # type: ignore[union-attr]


def _requests() -> list[Request]:
    return [replace(request, num_inference_steps=8) for request in random_job(21)[:3]]


def test_a_preview_is_of_its_moment(gpu_model: Any) -> None:
    """Of the latents around its step, which snapshots copied; later steps change them in place meanwhile."""
    engine = Engine(gpu_model, EngineConfig(diffusion_streaming_output=True, preview_interval=4))
    for request in _requests():
        engine.add_request(request)
    outputs, snapshots = [], {}
    for step in range(1, 9):
        outputs += engine.step()
        if step in (3, 4):
            snapshots[step] = engine.snapshot().states()
    outputs += engine.finish_decoding()
    previews = [output for output in outputs if not output.finished]
    assert len(previews) == 3
    for output in previews:
        request = output.request
        sigmas, _ = gpu_model.prepare_timesteps(request)
        before, after = (snapshots[step][request.request_id].latents for step in (3, 4))
        factor = float(sigmas[4]) / (float(sigmas[3]) - float(sigmas[4]))
        latents = torch.from_numpy(after + (after - before) * np.float32(factor)).cuda()
        with torch.inference_mode():
            expected = gpu_model.post_decode(latents, request.height, request.width)
        difference = (expected * 255).cpu().numpy() - output.pixels
        assert np.abs(difference).mean() < 1  # the products may be fused on the one side


@torch.inference_mode()
def test_starting_a_preview_does_not_wait_for_the_device(gpu_model: Any, no_sync: Any) -> None:
    runner = ModelRunner(gpu_model)
    prepared = [prepare(runner, request) for request in _requests()]
    previews = Previews(runner, interval=1)
    for _ in range(3):  # allocates pinned memory, and a small pack would be recorded now
        previews.before_step(prepared)
        runner.denoise(prepared)
        previews.after_step()
    while runner.num_decoding:
        runner.collect(wait=True)
    previews.before_step(prepared)
    with no_sync():
        runner.denoise(prepared)
        previews.after_step()
    assert runner.num_decoding == 3
