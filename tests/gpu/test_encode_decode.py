"""On a GPU: what happens before the first step and after the last one, alone and in company."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from offline_diffusion.models import qwen_image_vae

pytestmark = pytest.mark.gpu

WORDS = ["storm", "lamp", "violet", "river", "seven", "quiet", "engines", "☂", "雨", "under", "glass"]


@pytest.mark.parametrize("seed", range(10))
@torch.inference_mode()
def test_a_prompts_bits_do_not_depend_on_company(gpu_model: Any, seed: int) -> None:
    """Nor on the row of the batch that it gets."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.choice([1, 4, 20, 60, 130, 400]))) for _ in range(12)]
    prompts = [gpu_model.tokenize(text) for text in texts]
    alone = [gpu_model.prepare_encode([prompt])[0] for prompt in prompts]
    for order in (range(12), rng.sample(range(12), 12)):
        together = gpu_model.prepare_encode([prompts[index] for index in order])
        for index, encoded in zip(order, together, strict=True):
            assert encoded.stream.isfinite().all()
            assert torch.equal(encoded.stream, alone[index].stream), texts[index]


@torch.inference_mode()
def test_encoding_never_waits_for_the_device(gpu_model: Any, no_sync: Any) -> None:
    prompts = [gpu_model.tokenize(text) for text in ("a red cup", "a lamp " * 50)]
    gpu_model.prepare_encode(prompts)
    with no_sync():
        gpu_model.prepare_encode(prompts)


@torch.inference_mode()
def test_a_decoded_image_is_diffusers_and_the_same_every_time(gpu_model: Any) -> None:
    vae = gpu_model._pipeline.vae
    latents = torch.randn(1, 16, 48, 80, device="cuda", dtype=vae.dtype)
    image = gpu_model._image_decoder(latents)
    theirs = (
        vae.decode(latents.unsqueeze(2), return_dict=False)[0][0, :, 0].float().permute(1, 2, 0) / 2 + 0.5
    )
    assert (image - theirs).abs().mean() < 4 / 255
    assert torch.equal(gpu_model._image_decoder(latents), image)


@torch.inference_mode()
def test_tiles_differ_from_the_whole_by_rounding(gpu_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = torch.randn(1, 16, 100, 130, device="cuda", dtype=gpu_model._pipeline.vae.dtype)
    whole = gpu_model._image_decoder(latents)
    monkeypatch.setattr(qwen_image_vae, "TILED_ABOVE_PIXELS", 0)
    monkeypatch.setattr(qwen_image_vae, "MAX_TILE_PIXELS", 320)
    assert (gpu_model._image_decoder(latents) - whole).abs().mean() < 1 / 255


@pytest.mark.parametrize(("side", "most"), [(1024, 1500), (2048, 1500), (4096, 200)])
@torch.inference_mode()
def test_memory_of_a_decode_grows_with_its_pixels(gpu_model: Any, side: int, most: int) -> None:
    """Bytes a pixel; attention that held all its scores would take 2048 at 2048 pixels a side."""
    tokens = gpu_model.capabilities.num_image_tokens(side, side)
    latents = torch.randn(tokens, gpu_model.num_latent_channels, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gpu_model.post_decode(latents, side, side)
    assert (torch.cuda.max_memory_allocated() - before) / side**2 <= most
