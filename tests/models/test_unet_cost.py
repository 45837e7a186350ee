"""The cost formula against torch's own count of a forward, on tensors without memory."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from offline_diffusion.models.unet_cost import unet_cost

SDXL: dict[str, Any] = {
    "block_out_channels": [32, 64, 96],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 2,
    "transformer_layers_per_block": [1, 2, 3],
    "attention_head_dim": [2, 2, 3],
    "cross_attention_dim": 64,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 40 + 6 * 8,
}
"""The published structure, narrower and less deep."""

UNEVEN = SDXL | {
    "transformer_layers_per_block": [1, [1, 2], [2, 1]],
    "reverse_transformer_layers_per_block": [[1, 1, 2], [2, 1, 1], 1],
    "mid_block_type": None,
}
"""As distilled ones have it, without a middle."""

SD15: dict[str, Any] = {
    "block_out_channels": [32, 64, 96, 96],
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    "layers_per_block": 2,
    "attention_head_dim": 2,
    "cross_attention_dim": 64,
}


@pytest.mark.parametrize("config", [SDXL, SD15, UNEVEN], ids=["SDXL", "SD 1.5", "uneven"])
def test_it_counts_the_parameters_but_for_biases_and_norms(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(**config)
    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    modules = [module for module in unet.modules() if isinstance(module, kinds)]
    embeddings = [part for name, part in unet.named_children() if name in ("time_embedding", "add_embedding")]
    of_time = {own for part in embeddings for own in part.modules()}
    expected = sum(own.weight.numel() for own in modules if own not in of_time)
    assert unet_cost(config).num_parameters == expected


def counted(config: dict[str, Any], side: int) -> float:
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(**config)
        sample = torch.empty(1, 4, side, side)
        text = torch.empty(1, 77, config["cross_attention_dim"])
        added = {"text_embeds": torch.empty(1, 40), "time_ids": torch.empty(1, 6)}
        with FlopCounterMode(display=False) as counter:
            unet(sample, torch.empty(1), text, added_cond_kwargs=added)
    return float(counter.get_total_flops())


@pytest.mark.parametrize("config", [SDXL, SD15, UNEVEN], ids=["SDXL", "SD 1.5", "uneven"])
def test_it_counts_what_torch_counts_but_for_what_does_not_grow(config: dict[str, Any]) -> None:
    cost = unet_cost(config)

    def formula(side: int) -> float:
        return cost.per_position * side**2 + cost.per_square * side**4

    growth = counted(config, 64) - counted(config, 32)
    assert formula(64) - formula(32) == pytest.approx(growth, rel=1e-9)
