"""The UNet with our parts against diffusers' own, module by module."""

from __future__ import annotations

import weakref
from typing import Any

import diffusers
import pytest
import torch
from families import build_sdxl

from offline_diffusion.attention.backends import load_backend
from offline_diffusion.kernels.linear import PackedLinear
from offline_diffusion.models.unet import (
    FusedGroupNorm,
    RowsTransformer,
    own_unet,
    own_vae,
    quantizable_blocks,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = build_sdxl(tmp_path_factory.mktemp("sdxl"))
    return diffusers.StableDiffusionXLPipeline.from_pretrained(folder, add_watermarker=False)


@pytest.fixture(scope="module")
def own(pipeline: Any) -> Any:
    return own_unet(pipeline.unet, load_backend("sdpa", CPU, torch.float32)[1])


def inputs(size: tuple[int, int], seed: int, num_rows: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "sample": randn(num_rows, 4, *size),
        "timestep": torch.tensor([7.0, 999.0, 250.5])[:num_rows],
        "encoder_hidden_states": randn(num_rows, 77, 80),
        "added_cond_kwargs": {
            "text_embeds": randn(num_rows, 48),
            "time_ids": randn(num_rows, 6).abs() * 1000,
        },
        "return_dict": False,
    }


@torch.inference_mode()
@pytest.mark.parametrize("size", [(8, 12), (9, 7), (2, 5)])
def test_it_computes_what_diffusers_computes(pipeline: Any, own: Any, size: tuple[int, int]) -> None:
    given = inputs(size, seed=size[0])
    expected = pipeline.unet(**given)[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(own(**given)[0], expected, rtol=1e-4, atol=1e-4)


def test_every_transformer_and_norm_is_ours_and_diffusers_is_left_alone(pipeline: Any, own: Any) -> None:
    ours, theirs = ([type(part).__name__ for part in unet.modules()] for unet in (own, pipeline.unet))
    assert "Transformer2DModel" not in ours
    assert ours.count("RowsTransformer") == theirs.count("Transformer2DModel") > 0
    assert "GroupNorm" not in ours
    assert "RowsTransformer" not in theirs
    assert "FusedGroupNorm" not in theirs
    assert own.conv_in.weight is pipeline.unet.conv_in.weight  # memory holds weights once


@torch.inference_mode()
def test_the_texts_keys_are_made_once_for_a_composition(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    product = PackedLinear.__call__

    def counted(self: PackedLinear, x: Any) -> torch.Tensor:
        if x.shape[-1] == 80:  # the width of the text
            made.append(x.shape[0])
        return product(self, x)

    monkeypatch.setattr(PackedLinear, "__call__", counted)
    num_blocks = sum(len(part.blocks) for part in own.modules() if isinstance(part, RowsTransformer))
    given = inputs((8, 8), seed=1)
    first = own(**given)[0]
    assert made == [3 * 77] * num_blocks
    again = own(**given | {"timestep": torch.zeros(3)})[0]
    assert len(made) == num_blocks
    assert not torch.equal(first, again)
    other = given["encoder_hidden_states"] * 0.5
    changed = own(**given | {"encoder_hidden_states": other})[0]
    assert len(made) == 2 * num_blocks
    assert not torch.equal(first, changed)


@torch.inference_mode()
def test_the_texts_keys_go_with_the_text(own: Any) -> None:
    """Whoever drops a batch after an out-of-memory failure wants all of its memory back."""
    blocks = [block for part in own.modules() if isinstance(part, RowsTransformer) for block in part.blocks]
    given = inputs((8, 8), seed=1)
    own(**given)
    kept = [weakref.ref(tensor) for block in blocks for tensor in block._keys_values]
    assert len(kept) == 2 * len(blocks)
    assert all(tensor() is not None for tensor in kept)
    first = given.pop("encoder_hidden_states")
    other = first * 0.5
    own(**given, encoder_hidden_states=other)
    del first
    assert all(tensor() is None for tensor in kept)
    assert all(len(block._keys_values) == 2 for block in blocks)  # the other text's stay
    del other
    assert not any(block._keys_values for block in blocks)


def test_the_large_products_are_lent_for_quantization(own: Any) -> None:
    lent = [getattr(owner, name) for owner, name in quantizable_blocks(own)]
    num_blocks = sum(len(part.blocks) for part in own.modules() if isinstance(part, RowsTransformer))
    assert len(lent) == 6 * num_blocks
    assert all(isinstance(product, PackedLinear) for product in lent)


@torch.inference_mode()
def test_the_vae_decodes_as_before(pipeline: Any) -> None:
    vae = own_vae(pipeline.vae)
    latents = torch.randn(1, 4, 6, 9, generator=torch.Generator().manual_seed(0))
    expected = pipeline.vae.decode(latents, return_dict=False)[0]
    torch.testing.assert_close(vae.decode(latents, return_dict=False)[0], expected, rtol=1e-4, atol=1e-4)
    assert any(isinstance(part, FusedGroupNorm) for part in vae.decoder.modules())
