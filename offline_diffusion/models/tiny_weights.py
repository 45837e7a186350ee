"""Random weights of the tiny model: every layer does something visible, and nothing saturates.

No weight is left at zero or one: a forward pass that skips a bias, a gate, a shift or a norm's weight
draws another picture. Values are scaled uniform draws, which are exact arithmetic on the generator's
integers, hence the same bits on every machine.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TRANSFORMER_GAINS = (
    ("_mod.1.", 0.7),
    ("norm_out.linear.", 0.5),
    ("add_v_proj", 3.0),
    ("to_out", 2.0),
    ("", 1.0),
)
"""Deviation of a weight in units of 1/sqrt(fan in); the first name found in the parameter's wins.

The text's values are loud so that a prompt changes the whole picture; found by looking at pictures.
"""

SHARPNESS = 0.25
"""How much of a 3×3 kernel is noise rather than blur."""


def fill_transformer(model: Any, seed: int) -> None:
    """Fills a ``QwenImageTransformer2DModel`` in place.

    The way in and the way out are each other's inverse but for some noise, so that the velocity
    points along the latents: denoising then takes the noise out instead of adding a field to it.
    """
    import torch

    for name, parameter in model.named_parameters():
        _fill(parameter, name, seed, gain=next(gain for part, gain in TRANSFORMER_GAINS if part in name))
    through = torch.eye(model.img_in.out_features, model.img_in.in_features)
    with torch.no_grad():
        model.img_in.weight.mul_(0.3).add_(through)
        model.proj_out.weight.mul_(0.3).add_(through.T)


def fill_vae(model: Any, seed: int) -> None:
    """Fills an ``AutoencoderKLQwenImage`` in place.

    Kernels mix channels at random but mostly blur in space: pictures of soft shapes, not of grain.
    """
    import torch

    blur = torch.outer(*[torch.tensor([0.25, 0.5, 0.25])] * 2)
    for name, parameter in model.named_parameters():
        _fill(parameter, name, seed)
        if parameter.shape[-2:] == blur.shape:
            mix = _unit_noise(parameter[..., :1, :1].shape, f"{name}/blur", seed)
            with torch.no_grad():
                parameter.mul_(SHARPNESS).add_(mix / math.sqrt(parameter.shape[1]) * blur)


def fill_text_encoder(model: Any, seed: int) -> None:
    """Fills a ``Qwen2_5_VLForConditionalGeneration`` in place."""
    for name, parameter in model.named_parameters():
        _fill(parameter, name, seed)


def _fill(parameter: torch.nn.Parameter, name: str, seed: int, *, gain: float = 1.0) -> None:
    """Weights of norms lie around 1 (sharper attention: 1.5), biases around 0, the rest by fan-in."""
    import torch

    if "embed_tokens" in name:
        mean, std = 0.0, 1.0
    elif name.endswith("bias"):
        mean, std = 0.0, 0.2
    elif "norm_q" in name or "norm_k" in name or "norm_added" in name:
        mean, std = 1.5, 0.4
    elif parameter.squeeze().ndim == 1:
        mean, std = 1.0, 0.25
    else:
        mean, std = 0.0, gain / math.sqrt(parameter[0].numel())
    with torch.no_grad():
        parameter.copy_(mean + std * _unit_noise(parameter.shape, name, seed))


def _unit_noise(shape: torch.Size, name: str, seed: int) -> torch.Tensor:
    """Uniform noise of mean 0 and deviation 1, from a generator of this parameter's own."""
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return (torch.rand(shape, generator=generator, dtype=torch.float32) - 0.5) * math.sqrt(12)
