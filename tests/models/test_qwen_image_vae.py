"""The decoder of single images against diffusers' video decoder, and its tiles against the whole."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from offline_diffusion.models import qwen_image_vae
from offline_diffusion.models.qwen_image_vae import ImageDecoder

STRUCTURES: dict[str, dict[str, Any]] = {
    "as Qwen-Image": {},
    "one resnet less": {"num_res_blocks": 1},
    "two halvings": {"dim_mult": [1, 2, 4], "temperal_downsample": [False, True]},
    "one halving": {"dim_mult": [1, 2], "temperal_downsample": [True], "num_res_blocks": 3},
}


def make_vae(seed: int = 0, **config: Any) -> Any:
    """Random weights, in which no norm's weight is one and no bias zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = diffusers.AutoencoderKLQwenImage(**config).eval()
        for name, parameter in vae.named_parameters():
            if name.endswith("gamma"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return vae.requires_grad_(False)


def small_vae(**config: Any) -> Any:
    return make_vae(**{"base_dim": 8, "dim_mult": [1, 2, 4, 4], **config})


def random_latents(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(1, 16, rows, columns, generator=torch.Generator().manual_seed(seed)) * 2


def decode_with_diffusers(vae: Any, latents: Tensor) -> Tensor:
    image = vae.decode(latents.unsqueeze(2), return_dict=False)[0][0, :, 0]
    return image.permute(1, 2, 0) * 0.5 + 0.5


def set_tiles(monkeypatch: pytest.MonkeyPatch, *, above: int, side: int) -> None:
    monkeypatch.setattr(qwen_image_vae, "TILED_ABOVE_PIXELS", above)
    monkeypatch.setattr(qwen_image_vae, "MAX_TILE_PIXELS", side)


# --- against diffusers ------------------------------------------------------------------------------


@torch.inference_mode()
def test_at_full_size_the_image_is_diffusers() -> None:
    """A wrong slice in time, a norm, a shortcut or the attention left out draws another image."""
    vae, latents = make_vae(), random_latents(5, 9)
    expected = decode_with_diffusers(vae, latents)
    image = ImageDecoder(vae)(latents)
    assert (image.dtype, image.shape) == (torch.float32, (40, 72, 3))
    assert (image - expected).abs().max() <= 1e-5
    assert expected.std() > 0.05


@pytest.mark.parametrize("structure", STRUCTURES)
@torch.inference_mode()
def test_every_structure_is_diffusers(structure: str) -> None:
    vae = small_vae(**STRUCTURES[structure])
    latents = random_latents(9, 20)
    expected = decode_with_diffusers(vae, latents)
    assert (ImageDecoder(vae)(latents) - expected).abs().max() <= 1e-5
    assert expected.std() > 0.02


@torch.inference_mode()
def test_the_tiny_models_image_is_diffusers(tiny_pipeline: Any) -> None:
    """With weights that saturate: values beyond -1 and 1 are cut as diffusers cuts them."""
    latents = random_latents(20, 32) * 2
    expected = decode_with_diffusers(tiny_pipeline.vae, latents)
    assert (ImageDecoder(tiny_pipeline.vae)(latents) - expected).abs().max() <= 1e-5
    assert {float(expected.min()), float(expected.max())} == {0.0, 1.0}


@torch.inference_mode()
def test_bfloat16_is_no_further_off_than_diffusers_own() -> None:
    vae, latents = small_vae(), random_latents(12, 12)
    exact = decode_with_diffusers(vae, latents)
    vae.to(torch.bfloat16)
    theirs = (decode_with_diffusers(vae, latents.bfloat16()).float() - exact).abs().mean()
    ours = (ImageDecoder(vae)(latents.bfloat16()) - exact).abs().mean()
    assert 0 < ours <= 1.1 * theirs


@torch.inference_mode()
def test_latents_that_are_no_numbers_are_seen_in_the_image() -> None:
    latents = random_latents(6, 6)
    latents[0, 3, 2, 2] = torch.nan
    assert ImageDecoder(small_vae())(latents).isnan().any()


# --- tiles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "side"),
    [(12, 9, 8), (40, 34, 40), (33, 47, 100), (40, 34, 160), (2, 90, 48), (71, 1, 48), (1, 1, 8)],
)
@torch.inference_mode()
def test_tiles_hold_the_values_of_the_whole_image(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, side: int
) -> None:
    """Tiles down to a single latent, inside and at the edges: what is left is rounding, not a seam."""
    decoder, latents = ImageDecoder(small_vae()), random_latents(rows, columns)
    whole = decoder(latents)
    set_tiles(monkeypatch, above=0, side=side)
    assert (decoder(latents) - whole).abs().max() <= 5e-6


def spoil(decoder: ImageDecoder, column: int) -> None:
    """After the mid block a column is NaN, which goes wherever that column has any influence."""
    decoder._mid = lambda x: x.index_fill(3, torch.tensor([column]), torch.nan)  # type: ignore[assignment]


@pytest.mark.parametrize("structure", STRUCTURES)
@torch.inference_mode()
def test_the_halo_is_as_far_as_a_value_spreads(structure: str) -> None:
    """Measured on whole images, without tiles."""
    decoder = ImageDecoder(small_vae(**STRUCTURES[structure]))
    spoil(decoder, 30)
    spread = decoder(random_latents(2, 64)).isnan().all(dim=0).all(dim=1).nonzero()
    assert int(spread.min()) // decoder.scale == 30 - decoder.halo
    assert int(spread.max()) // decoder.scale == 30 + decoder.halo


@torch.inference_mode()
def test_a_halo_one_smaller_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of one latent every distance to the spoiled column occurs."""
    decoder, latents = ImageDecoder(small_vae()), random_latents(1, 40)
    spoil(decoder, 20)
    whole = decoder(latents).isnan()
    set_tiles(monkeypatch, above=0, side=8)
    assert torch.equal(decoder(latents).isnan(), whole)
    decoder._margins[0] -= 1
    assert not torch.equal(decoder(latents).isnan(), whole)


@pytest.mark.parametrize(
    ("height", "width", "num_tiles"),
    [(2048, 2048, 1), (16, 262_144, 1), (2048, 2064, 6), (1024, 4112, 5), (256, 16_400, 17)],
)
def test_the_size_alone_decides_on_tiles(height: int, width: int, num_tiles: int) -> None:
    """On tensors without memory: only shapes are followed."""
    with torch.device("meta"):
        decoder = ImageDecoder(small_vae())
        latents = torch.empty(1, 16, height // 8, width // 8)
    calls = 0
    *_, head = decoder._layers

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return head(x)

    count.scale = 1  # type: ignore[attr-defined]
    decoder._layers[-1] = count  # type: ignore[call-overload]
    assert decoder(latents).shape == (height, width, 3)
    assert calls == num_tiles
