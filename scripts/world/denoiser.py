"""The small transformer's training step: flow matching over a pack, through text encoder and transformer.

The arithmetic is that of ``models.qwen_image`` and so of diffusers' ``QwenImageTransformer2DModel``, written
for gradients: rows of unlike examples lie in two flat streams and meet in attention over ragged sequences.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offline_diffusion.attention.backends import AttentionFunction, load_backend
from offline_diffusion.attention.metadata import AttentionMetadata
from world.hints import WEIGHT, Hints, Readers
from world.layout import Layout
from world.recipe import SHIFT

NUM_HEAD_TOKENS = 34
"""Of the template before the prompt; the pipeline drops what they become."""

NUM_READ_BLOCKS = 4
"""Of the transformer's; what they make of the image tokens is what a reader sees."""


class TrainingStep(nn.Module):
    """One forward to the loss.

    Args:
        text_encoder: ``Qwen2_5_VLForConditionalGeneration``.
        transformer: ``QwenImageTransformer2DModel``.
        device: Where both are.
    """

    def __init__(self, text_encoder: Any, transformer: Any, device: torch.device) -> None:
        super().__init__()
        self.language_model = text_encoder.model.language_model
        self.transformer = transformer
        self.readers = Readers(self.language_model.config.hidden_size, transformer.inner_dim).to(device)
        name = "torch_varlen" if device.type == "cuda" else "sdpa"  # the two with gradients
        _, self._attend = load_backend(name, device, torch.bfloat16)

    def forward(
        self,
        input_ids: Tensor,
        clean: Tensor,
        noise: Tensor,
        sigma: Tensor,
        hints: Hints,
        hint_weight: Tensor,
        layout: Layout,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What to lower; flow matching's and both readers' errors in it, ``[3]``; and flow matching's squared
        error of each image token, the filling's too.

        Args:
            input_ids: ``[N, L]`` with the template's head.
            clean, noise: ``[T_img, C]``.
            sigma: ``[N]``, the share of noise.
            hint_weight: ``[]``, times `world.hints.WEIGHT` that of the readers' errors.
        """
        own = sigma.index_select(0, layout.img_request).unsqueeze(1)
        text = self.text(input_ids, layout)
        predicted, read = packed_velocity(
            self.transformer, text, clean + own * (noise - clean), sigma, layout, self._attend
        )
        squared = (predicted.float() - (noise - clean)).square().mean(dim=1)
        error = layout.mean_over_tokens(squared)
        read_errors = self.readers(text.index_select(0, layout.txt_last), read, hints, layout)
        lowered = error + WEIGHT * hint_weight * read_errors.sum()
        return lowered, torch.cat((error.unsqueeze(0), read_errors)).detach(), squared.detach()

    def text(self, input_ids: Tensor, layout: Layout) -> Tensor:
        """The text stream, ``[T_txt, E]``."""
        hidden: Tensor = self.language_model(input_ids, use_cache=False).last_hidden_state
        places = layout.txt_request * input_ids.shape[1] + NUM_HEAD_TOKENS + layout.txt_offset
        return hidden.flatten(0, 1).index_select(0, places)


def packed_velocity(
    model: Any, text: Tensor, noisy: Tensor, sigma: Tensor, layout: Layout, attend: AttentionFunction
) -> tuple[Tensor, Tensor]:
    """Noise less picture, ``[T_img, C]``, by the transformer; and what a reader reads, ``[T_img, H]``.

    Args:
        text: ``[T_txt, E]``.
        noisy: ``[T_img, C]``.
    """
    img, txt = model.img_in(noisy).float(), model.txt_in(model.txt_norm(text)).float()
    temb = model.time_text_embed(sigma, img)
    read = img
    for index, block in enumerate(model.transformer_blocks):
        img_mod = _of_rows(block.img_mod(temb), layout.img_request)
        txt_mod = _of_rows(block.txt_mod(temb), layout.txt_request)
        img_h = _norm(img) * (1 + img_mod[1]) + img_mod[0]
        txt_h = _norm(txt) * (1 + txt_mod[1]) + txt_mod[0]
        img_attn, txt_attn = _attention(block.attn, img_h, txt_h, layout, attend)
        img = img + img_mod[2] * img_attn
        img = img + img_mod[5] * block.img_mlp(_norm(img) * (1 + img_mod[4]) + img_mod[3])
        if index + 1 < len(model.transformer_blocks):  # nobody reads the last block's text
            txt = txt + txt_mod[2] * txt_attn
            txt = txt + txt_mod[5] * block.txt_mlp(_norm(txt) * (1 + txt_mod[4]) + txt_mod[3])
        if index + 1 == NUM_READ_BLOCKS:
            read = img
    scale, shift = model.norm_out.linear(F.silu(temb)).index_select(0, layout.img_request).chunk(2, dim=1)
    predicted: Tensor = model.proj_out(_norm(img) * (1 + scale) + shift)
    return predicted, read


def _of_rows(modulation: Tensor, request: Tensor) -> tuple[Tensor, ...]:
    """Shift, scale and gate of attention, then of the feed-forward, ``[T, H]`` each."""
    return modulation.index_select(0, request).chunk(6, dim=1)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def _attention(
    attn: Any, img: Tensor, txt: Tensor, layout: Layout, attend: AttentionFunction
) -> tuple[Tensor, Tensor]:
    """Joint attention, ``[T_img, H]`` and ``[T_txt, H]``."""
    img_qkv = [attn.to_q(img), attn.to_k(img), attn.to_v(img)]
    txt_qkv = [attn.add_q_proj(txt), attn.add_k_proj(txt), attn.add_v_proj(txt)]
    img_q, img_k, img_v = (x.unflatten(1, (attn.heads, -1)) for x in img_qkv)
    txt_q, txt_k, txt_v = (x.unflatten(1, (attn.heads, -1)) for x in txt_qkv)
    pairs = (
        (attn.norm_added_q(txt_q), attn.norm_q(img_q)),
        (attn.norm_added_k(txt_k), attn.norm_k(img_k)),
        (txt_v, img_v),
    )
    q, k, v = (torch.cat(pair).index_select(0, layout.from_streams) for pair in pairs)
    out = _attend(_rotated(q, layout), _rotated(k, layout), v, layout.attention, attend).flatten(1)
    txt_out, img_out = (out.index_select(0, places) for places in (layout.txt_to_joint, layout.img_to_joint))
    return attn.to_out[0](img_out), attn.to_add_out(txt_out)


def _attend(q: Tensor, k: Tensor, v: Tensor, bounds: AttentionMetadata, attend: AttentionFunction) -> Tensor:
    half = v.dtype if v.dtype != torch.float32 or v.device.type == "cpu" else torch.bfloat16
    return attend(q.to(half), k.to(half), v.to(half), bounds)


def _rotated(x: Tensor, layout: Layout) -> Tensor:
    """Pairs of neighbouring channels turned by the row's angles, ``[T, A, D]``."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = layout.cos.unsqueeze(1), layout.sin.unsqueeze(1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def draw_sigmas(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """``[count]`` shares of noise, spread evenly over the schedule that sampling runs through."""
    places = torch.rand(count, generator=generator, device=device).argsort()
    even = (places + torch.rand(count, generator=generator, device=device)) / count
    return math.exp(SHIFT) * even / (1 + (math.exp(SHIFT) - 1) * even)
