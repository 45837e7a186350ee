"""Decodes one image with diffusers' ``AutoencoderKL``, the VAE of FLUX.1 and Stable Diffusion."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class ImageDecoder:
    """Latents of one image to its pixels.

    Args:
        vae: A loaded ``AutoencoderKL``.
    """

    def __init__(self, vae: Any) -> None:
        self._vae = vae
        self._scale: float = vae.config.scaling_factor
        self._shift: float = vae.config.shift_factor or 0.0

    def __call__(self, latents: Tensor) -> Tensor:
        """The image, float32 ``[height, width, 3]``, 0 … 1.

        Args:
            latents: ``[1, C, rows, columns]`` float32, as they come from the last step.
        """
        image: Tensor = self._vae.decode(
            (latents / self._scale + self._shift).to(self._vae.dtype), return_dict=False
        )[0]
        return image[0].permute(1, 2, 0).float().mul(0.5).add(0.5).clamp(0, 1)
