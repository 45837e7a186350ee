"""Random weights of the tiny model: every layer does something visible, and nothing saturates.

No weight is zero or one by default: a forward pass that skips a bias, a norm's weight, a gate or a
shift gives another picture. Values are uniform draws, scaled: integers from the generator, exact
arithmetic, hence the same bits on every machine.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Standard deviations, as multiples of 1/sqrt(fan in); the first name that a parameter contains wins.
TRANSFORMER_GAINS = (
    ("_mod.1.", 0.5),
    ("norm_out.linear.", 0.5),
    ("", 1.0),
)


def fill_transformer(model: Any, seed: int) -> None:
    """Fills a ``QwenImageTransformer2DModel`` in place."""
    import torch

    for name, parameter in model.named_parameters():
        gain = next(gain for part, gain in TRANSFORMER_GAINS if part in name)
        _fill(parameter, name, seed, gain=gain)
    with torch.no_grad():
        eye = torch.eye(model.img_in.out_features, model.img_in.in_features)
        model.img_in.weight.mul_(0.3).add_(eye)
        model.proj_out.weight.mul_(0.3).add_(eye.T)


def fill_vae(model: Any, seed: int) -> None:
    """Fills an ``AutoencoderKLQwenImage`` in place."""
    for name, parameter in model.named_parameters():
        _fill(parameter, name, seed, gain=0.5 if "decoder.conv_out" in name else 1.0)


def fill_text_encoder(model: Any, seed: int) -> None:
    """Fills a ``Qwen2_5_VLForConditionalGeneration`` in place."""
    for name, parameter in model.named_parameters():
        _fill(parameter, name, seed, gain=1.0)


def _fill(parameter: torch.nn.Parameter, name: str, seed: int, *, gain: float) -> None:
    """Weights of norms lie around 1, biases around 0, the rest is scaled by fan-in."""
    import torch

    if "embed_tokens" in name:
        mean, std = 0.0, 1.0
    elif name.endswith("bias"):
        mean, std = 0.0, 0.2
    elif parameter.squeeze().ndim == 1:
        mean, std = 1.0, 0.25
    else:
        mean, std = 0.0, gain / math.sqrt(parameter[0].numel())
    with torch.no_grad():
        parameter.copy_(mean + std * _unit_noise(parameter.shape, name, seed))


def _unit_noise(shape: torch.Size, name: str, seed: int) -> torch.Tensor:
    """Uniform noise of mean 0 and deviation 1, from the parameter's own generator."""
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return (torch.rand(shape, generator=generator) - 0.5) * math.sqrt(12)
