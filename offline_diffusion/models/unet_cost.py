"""What a forward of diffusers' ``UNet2DConditionModel`` costs, from its config. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXT_TOKENS = 77
"""Of CLIP's padded prompts, which cross-attention reads at every position."""


@dataclass(slots=True)
class UNetCost:
    """FLOPs of one row: ``per_position · S + per_square · S²`` for S latent positions.

    What does not grow with the image is left out: the text's keys and values and the timestep's embedding,
    for SDXL one percent at 1024 × 1024 pixels.

    Args:
        time_width, text_width: Of what every resnet and every transformer is conditioned on.
    """

    time_width: int
    text_width: int
    per_position: float = 0.0
    per_square: float = 0.0
    num_parameters: int = 0
    """Of convolutions and projections, biases and norms aside."""

    def conv(self, channels_in: int, channels_out: int, share: float, *, kernel: int = 3) -> None:
        """A convolution with ``share`` · S outputs."""
        weights = kernel**2 * channels_in * channels_out
        self.num_parameters += weights
        self.per_position += 2 * weights * share

    def resnet(self, channels_in: int, channels_out: int, share: float) -> None:
        """Two convolutions, and one on the way past where the width changes."""
        self.num_parameters += self.time_width * channels_out
        self.conv(channels_in, channels_out, share)
        self.conv(channels_out, channels_out, share)
        if channels_in != channels_out:
            self.conv(channels_in, channels_out, share, kernel=1)

    def transformer(self, width: int, num_layers: int, share: float) -> None:
        """Projections in and out; in each layer self- and cross-attention and a gated feed-forward.

        Per position and layer: 4 products of self-attention, 2 of cross-attention, 8 and 4 times the width in
        the feed-forward, each 2·width² FLOPs.
        """
        squares = 2 + num_layers * (4 + 2 + 8 + 4)
        self.num_parameters += width**2 * squares + 2 * width * self.text_width * num_layers
        self.per_position += 2 * width**2 * squares * share
        self.per_position += 4 * TEXT_TOKENS * width * num_layers * share
        self.per_square += 4 * width * num_layers * share**2


def unet_cost(config: Mapping[str, Any]) -> UNetCost:
    """The cost of a UNet by its ``config.json``."""
    widths: Sequence[int] = config["block_out_channels"]
    down, up = config["down_block_types"], config["up_block_types"]
    layers = _each(config.get("layers_per_block", 2), len(widths))
    depths = _each(config.get("transformer_layers_per_block", 1), len(widths))
    up_depths = config.get("reverse_transformer_layers_per_block") or depths[::-1]
    shares = [0.25**level for level in range(len(widths))]  # of S, the positions of a level
    cost = UNetCost(4 * widths[0], config.get("cross_attention_dim", 1280))
    before = widths[0]
    cost.conv(config.get("in_channels", 4), widths[0], 1.0)
    for level, width in enumerate(widths):
        for index in range(layers[level]):
            cost.resnet(before if index == 0 else width, width, shares[level])
            if "CrossAttn" in down[level]:
                cost.transformer(width, _of_layer(depths[level], index), shares[level])
        if level < len(widths) - 1:
            cost.conv(width, width, shares[level + 1])
        before = width
    _add_middle(cost, config, widths[-1], depths[-1], shares[-1])
    for level in reversed(range(len(widths))):
        place = len(widths) - 1 - level
        depth = up_depths[place] if "CrossAttn" in up[place] else 0
        _add_up_block(cost, widths, level, layers[level] + 1, depth, shares)
    cost.conv(widths[0], config.get("out_channels", 4), 1.0)
    return cost


Depth = int | Sequence[int]
"""Transformer layers of a level: of each transformer alike, or of one after the other."""


def _add_middle(cost: UNetCost, config: Mapping[str, Any], width: int, depth: Depth, share: float) -> None:
    if config.get("mid_block_type", "UNetMidBlock2DCrossAttn") is None:
        return
    cost.resnet(width, width, share)
    cost.transformer(width, _of_layer(depth, 0), share)
    cost.resnet(width, width, share)


def _add_up_block(
    cost: UNetCost, widths: Sequence[int], level: int, num_resnets: int, depth: Depth, shares: Sequence[float]
) -> None:
    """Every resnet also reads what the way down left; the last one what the level above left."""
    width, below = widths[level], widths[min(level + 1, len(widths) - 1)]
    above = widths[max(level - 1, 0)]
    for index in range(num_resnets):
        skip = above if index == num_resnets - 1 else width
        cost.resnet((below if index == 0 else width) + skip, width, shares[level])
        if depth:
            cost.transformer(width, _of_layer(depth, index), shares[level])
    if level > 0:
        cost.conv(width, width, shares[level - 1])


def _of_layer(depth: Depth, index: int) -> int:
    return depth if isinstance(depth, int) else depth[index]


def _each(value: Any, count: int) -> Sequence[Any]:
    return [value] * count if isinstance(value, int) else value
