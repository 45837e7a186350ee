"""The small VAE: trained on single pictures, where the video convolutions see one frame.

Of a first frame's kernels only the last slice in time meets anything but zeros, so training runs that
slice alone, in two dimensions; the other slices stay zero. The result is an ordinary
``AutoencoderKLQwenImage``.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from world.recipe import VAE_CONFIG


def make_vae(seed: int) -> Any:
    """A fresh float32 ``AutoencoderKLQwenImage`` on the CPU."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = diffusers.AutoencoderKLQwenImage(**VAE_CONFIG)
    with torch.no_grad():
        for conv in _video_convs(vae):
            conv.weight[:, :, :-1] = 0
    return vae


def load_vae(folder: Path) -> Any:
    """The float32 VAE of a folder, on the CPU."""
    import diffusers

    return diffusers.AutoencoderKLQwenImage.from_pretrained(folder, torch_dtype=torch.float32)


def see_one_frame(vae: Any) -> Any:
    """Makes ``vae``'s video convolutions work on single frames in two dimensions: the same values, a third of
    the work. Returns ``vae``; its weights and layout stay as they are."""
    for conv in _video_convs(vae):
        conv.forward = types.MethodType(_one_frame, conv)
    return vae


def encode(vae: Any, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log variance of the latents, ``[B, z, H/8, W/8]``, of pictures ``[B, 3, H, W]``, 0 … 1."""
    moments = vae.quant_conv(vae.encoder((pictures * 2 - 1).unsqueeze(2)))
    mean, log_variance = moments.squeeze(2).float().chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Pictures ``[B, 3, H, W]`` around 0 … 1, not clamped, of ``latents`` ``[B, z, H/8, W/8]``."""
    frames = vae.decoder(vae.post_quant_conv(latents.unsqueeze(2)))
    pictures: Tensor = frames.squeeze(2).float() * 0.5 + 0.5
    return pictures


def to_tokens(latents: Tensor) -> Tensor:
    """``[B, z, 2r, 2c]`` → ``[B, r·c, 4z]``: 2×2 patches as ``QwenImagePipeline`` packs them."""
    batch, channels, rows, columns = latents.shape
    patches = latents.view(batch, channels, rows // 2, 2, columns // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, rows * columns // 4, 4 * channels)


def loss(vae: Any, pictures: Tensor, noise: Tensor, kl_weight: float) -> tuple[Tensor, Tensor]:
    """What training lowers, and the mean squared error in it.

    Args:
        pictures: ``[B, 3, H, W]``, 0 … 1.
        noise: ``[B, z, H/8, W/8]`` from a unit normal.
        kl_weight: Of the KL term, a mean over all latents.
    """
    mean, log_variance = encode(vae, pictures)
    decoded = decode(vae, mean + noise * (0.5 * log_variance).exp())
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    error = decoded - pictures
    squared = error.square().mean()
    edges = sum((_slope(decoded, dim) - _slope(pictures, dim)).abs().mean() for dim in (2, 3))
    return error.abs().mean() + 4 * squared + 0.5 * edges + kl_weight * kl, squared.detach()


def _slope(pictures: Tensor, dim: int) -> Tensor:
    return pictures.diff(dim=dim)


def _video_convs(vae: Any) -> list[Any]:
    """The causal convolutions with a kernel in time, but for those that only a second frame reaches."""
    convs = [module for module in vae.modules() if type(module).__name__ == "QwenImageCausalConv3d"]
    return [conv for conv in convs if conv.kernel_size[1] > 1 or conv.kernel_size[0] == 1]


def _one_frame(conv: Any, x: Tensor) -> Tensor:
    assert x.shape[2] == 1
    weight = conv.weight[:, :, -1].contiguous(memory_format=torch.channels_last)
    flat = x.squeeze(2).contiguous(memory_format=torch.channels_last)
    return F.conv2d(flat, weight, conv.bias, padding=weight.shape[-1] // 2).unsqueeze(2)
