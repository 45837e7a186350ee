"""diffusers' UNet with parts of our own: transformers over flat rows, and norms that bring their SiLU along.

The modules around them, and so the order of everything, stay diffusers'; the weights are shared. What is won:
products that can be quantized, attention by any backend, fused elementwise work, and keys and values of the
text that are made once for a composition instead of in every step.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from offline_diffusion.attention.backends import AttentionFunction
from offline_diffusion.attention.metadata import AttentionMetadata, SequenceBounds
from offline_diffusion.kernels.linear import PackedLinear
from offline_diffusion.kernels.packed_ops import QuantFormat, Quantized, gate_residual_norm, norm_modulate
from offline_diffusion.kernels.stacked_ops import geglu, group_norm

Rows = Tensor | Quantized
"""Rows as the next product takes them."""

PRODUCTS = ("to_qkv", "to_out", "to_q", "to_cross_out", "mlp_in", "mlp_out")
"""Of a block, those that may be quantized: all over the image."""


class FusedGroupNorm(nn.Module):
    """A group norm in one pass with the SiLU behind it.

    Args:
        norm: A loaded ``nn.GroupNorm``; its weights are shared.
        silu: Whether SiLU follows.
    """

    def __init__(self, norm: nn.GroupNorm, *, silu: bool) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self._num_groups, self._eps, self._silu = norm.num_groups, norm.eps, silu

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, rows, columns]``, both ways."""
        return group_norm(x, self._num_groups, self.weight, self.bias, self._eps, silu=self._silu)


class _LayerNorm:
    """Weights of a layer norm as tables of one row, in which the packed kernels want them."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        weight, bias = norm.weight.detach(), norm.bias.detach()
        dtype = torch.float32 if weight.is_cuda else weight.dtype  # the kernels add 1 to the scale in float32
        self.shift = bias.to(dtype).unsqueeze(0)
        self.scale = (weight.float() - 1).to(dtype).unsqueeze(0)
        self.gate, self.eps = torch.ones_like(self.scale), norm.eps

    def first(self, x: Tensor, takes: QuantFormat | None) -> Rows:
        """``norm(x)``, ``[T, C]``."""
        return norm_modulate(x, self.shift, self.scale, _zeros(x.shape[0], x.device), self.eps, takes)

    def added(self, x: Tensor, update: Tensor, takes: QuantFormat | None) -> tuple[Tensor, Rows]:
        """``x + update`` and its norm."""
        index = _zeros(x.shape[0], x.device)
        return gate_residual_norm(x, update, self.gate, self.shift, self.scale, index, self.eps, takes)


class RowsBlock:
    """Self-attention, attention to the text and a gated feed-forward over flat rows.

    Args:
        block: A loaded ``BasicTransformerBlock``.
    """

    def __init__(self, block: Any) -> None:
        own, cross, mlp = block.attn1, block.attn2, block.ff.net
        self.norms = [_LayerNorm(norm) for norm in (block.norm1, block.norm2, block.norm3)]
        self.to_qkv, self.to_out = PackedLinear(own.to_q, own.to_k, own.to_v), PackedLinear(own.to_out[0])
        self.to_q, self.to_cross_out = PackedLinear(cross.to_q), PackedLinear(cross.to_out[0])
        self.to_kv = PackedLinear(cross.to_k, cross.to_v)
        self.mlp_in, self.mlp_out = PackedLinear(mlp[0].proj), PackedLinear(mlp[2])
        self._num_heads: int = own.heads
        self._text: weakref.ref[Tensor] | None = None
        self._keys_values: list[Tensor] = []  # of that text, and gone with it

    def __call__(
        self, x: Tensor, h: Rows, text: Tensor, num_rows: int, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        """The stream before the feed-forward's residual, and that residual.

        Args:
            x: ``[T, C]``.
            h: Its first norm.
            text: ``[N, L, H]``.
            num_rows: N.
            attend: The attention backend.
        """
        length, device = x.shape[0] // num_rows, x.device
        q, k, v = self.to_qkv(h).unflatten(1, (3, self._num_heads, -1)).unbind(1)
        bounds = _even_bounds(num_rows, length, device)
        attn = attend(q, k, v, AttentionMetadata(bounds, bounds)).flatten(1)
        x, h = self.norms[1].added(x, self.to_out(attn), self.to_q.takes)
        k, v = self._text_keys_values(text)
        q = self.to_q(h).unflatten(1, (self._num_heads, -1))
        attn = attend(q, k, v, AttentionMetadata(bounds, _even_bounds(num_rows, text.shape[1], device)))
        x, h = self.norms[2].added(x, self.to_cross_out(attn.flatten(1)), self.mlp_in.takes)
        return x, self.mlp_out(geglu(self.mlp_in(h), self.mlp_out.takes))

    def _text_keys_values(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """``[N·L, A, D]`` each: the same for all steps of a composition, whose text is one tensor."""
        if self._text is None or self._text() is not text:
            rows = self.to_kv(text.flatten(0, 1)).unflatten(1, (2, self._num_heads, -1))
            made = [own.contiguous() for own in rows.unbind(1)]
            self._text, self._keys_values = weakref.ref(text, lambda _: made.clear()), made
        k, v = self._keys_values
        return k, v


class RowsTransformer(nn.Module):
    """Stands in for a ``Transformer2DModel``: called as it is, all blocks over ``[N · S, C]``.

    Args:
        module: The loaded module.
        attend: The attention backend.
    """

    def __init__(self, module: Any, attend: AttentionFunction) -> None:
        super().__init__()
        self.norm = FusedGroupNorm(module.norm, silu=False)
        self.blocks = [RowsBlock(block) for block in module.transformer_blocks]
        self._proj_in, self._proj_out = PackedLinear(module.proj_in), PackedLinear(module.proj_out)
        self._attend = attend

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, **_: object) -> tuple[Tensor]:
        """``[N, C, rows, columns]`` and ``[N, L, H]`` → ``[N, C, rows, columns]``, alone in a tuple."""
        num_rows, channels, height, width = hidden_states.shape
        rows = self.norm(hidden_states).permute(0, 2, 3, 1).reshape(-1, channels)
        x = self._proj_in(rows)
        h = self.blocks[0].norms[0].first(x, self.blocks[0].to_qkv.takes)
        for block, following in zip(self.blocks, [*self.blocks[1:], None], strict=True):
            x, update = block(x, h, encoder_hidden_states, num_rows, self._attend)
            if following is None:
                x = x + update
            else:
                x, h = following.norms[0].added(x, update, following.to_qkv.takes)
        out = self._proj_out(x).view(num_rows, height, width, channels).permute(0, 3, 1, 2)
        return (out + hidden_states,)


def own_unet(unet: Any, attend: AttentionFunction) -> Any:
    """A copy of a loaded ``UNet2DConditionModel`` with our parts in it; weights are shared."""
    own = share_weights(unet)
    for parent, name in _places(own, "Transformer2DModel"):
        parent[name] = RowsTransformer(parent[name], attend)
    fuse_norms(own)
    return own


def own_vae(vae: Any) -> Any:
    """A copy of a loaded ``AutoencoderKL`` with our norms in it; weights are shared."""
    own = share_weights(vae)
    fuse_norms(own)
    return own


def share_weights(module: Any) -> Any:
    """A copy whose parameters and buffers are those of ``module``.

    What moves or converts the copy's parameters (``to``, another memory format) does so to ``module``'s, for
    they are the same tensors. Build ``module`` again where it is to stay as it was.
    """
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def fuse_norms(module: nn.Module) -> None:
    """Every ``GroupNorm`` of a UNet or VAE that SiLU follows takes it along; changes ``module``."""
    for resnet in _modules(module, "ResnetBlock2D"):
        if not isinstance(resnet.nonlinearity, nn.SiLU):
            continue
        resnet.norm1, resnet.norm2 = (FusedGroupNorm(own, silu=True) for own in (resnet.norm1, resnet.norm2))
        resnet.nonlinearity = nn.Identity()
        if resnet.time_emb_proj is not None:
            resnet.time_emb_proj = nn.Sequential(nn.SiLU(), resnet.time_emb_proj)
    for part in module.modules():
        act = getattr(part, "conv_act", None)
        if isinstance(act, nn.SiLU) and isinstance(
            norm := getattr(part, "conv_norm_out", None), nn.GroupNorm
        ):
            part.conv_norm_out, part.conv_act = FusedGroupNorm(norm, silu=True), nn.Identity()


def quantizable_blocks(unet: nn.Module) -> Iterator[tuple[object, str]]:
    """Owner and name of each large product of the transformers."""
    for transformer in _modules(unet, "RowsTransformer"):
        for block in transformer.blocks:
            yield from ((block, name) for name in PRODUCTS)


def _modules(module: nn.Module, class_name: str) -> list[Any]:
    return [part for part in module.modules() if type(part).__name__ == class_name]


def _places(module: nn.Module, class_name: str) -> list[tuple[Any, str]]:
    """Where modules of a class are held: a dict of its parent's parts, and its name there."""
    return [
        (parent._modules, name)
        for parent in module.modules()
        for name, part in parent._modules.items()
        if type(part).__name__ == class_name
    ]


@lru_cache(maxsize=256)
def _even_bounds(num_rows: int, length: int, device: torch.device) -> SequenceBounds:
    """Of rows of one length; kept, since a recorded step may upload nothing."""
    return SequenceBounds.from_seqlens([length] * num_rows, device)


@lru_cache(maxsize=64)
def _zeros(num_tokens: int, device: torch.device) -> Tensor:
    return torch.zeros(num_tokens, dtype=torch.int64, device=device)
