"""Elementwise work of a packed forward: on a GPU the Triton kernels of ``fused``, elsewhere, and as
their reference, plain torch.

``index`` maps a token to its row in a small table, so nothing depends on how tokens are packed. Where a
product takes its input quantized, the kernel that makes the input quantizes it on the way: ``quantize``
names the format. Shapes: T tokens, R table rows, H channels, A heads of D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """An 8-bit format for rows with a scale each.

    Args:
        dtype: Of the values.
        largest: Magnitude that a row's largest value is scaled to.
    """

    dtype: torch.dtype
    largest: float

    def round(self, x: Tensor) -> Tensor:
        """To the nearest value, ties to even."""
        x = x.clamp(-self.largest, self.largest)
        return (x if self.dtype.is_floating_point else x.round()).to(self.dtype)


FP8 = QuantFormat(torch.float8_e4m3fn, 448.0)
INT8 = QuantFormat(torch.int8, 127.0)

SMALLEST_MAX = 1e-12
"""A row whose largest magnitude is below this is quantized as if it were this: rows of zeros stay zeros."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows in eight bits: ``values · scale`` is what they stand for.

    Args:
        values: ``[T, N]``, of the format's dtype.
        scale: ``[T, 1]`` float32.
    """

    values: Tensor
    scale: Tensor


def norm_modulate(
    x: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    eps: float,
    quantize: QuantFormat | None = None,
) -> Tensor | Quantized:
    """``layer_norm(x) · (1 + scale[index]) + shift[index]``.

    Args:
        x: ``[T, H]``.
        shift, scale: ``[R, H]``, rows may be strided.
        index: ``[T]`` int64.
        eps: Of the norm.
        quantize: Format of the result, None for that of ``x``.
    """
    if x.is_cuda:
        from offline_diffusion.kernels import fused

        return fused.norm_modulate(x, shift, scale, index, eps, quantize)
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    out = torch.addcmul(shift.index_select(0, index), normed, (1 + scale).index_select(0, index))
    return out if quantize is None else quantize_rows(out, quantize)


def gate_residual_norm(
    x: Tensor,
    update: Tensor,
    gate: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    eps: float,
    quantize: QuantFormat | None = None,
) -> tuple[Tensor, Tensor | Quantized]:
    """``x + gate[index] · update``, and the `norm_modulate` of it: what one branch adds and the next reads.

    Args:
        x, update: ``[T, H]``.
        gate, shift, scale: ``[R, H]``, rows may be strided, all alike.
        index: ``[T]`` int64.
        eps: Of the norm.
        quantize: Format of the second result, None for that of ``x``.
    """
    if x.is_cuda:
        from offline_diffusion.kernels import fused

        return fused.gate_residual_norm(x, update, gate, shift, scale, index, eps, quantize)
    summed = torch.addcmul(x, update, gate.index_select(0, index))
    return summed, norm_modulate(summed, shift, scale, index, eps, quantize)


def quantize_rows(x: Tensor, quantize: QuantFormat, *, gelu: bool = False) -> Quantized:
    """Every row scaled so that its largest magnitude is the format's.

    Args:
        x: ``[T, N]``.
        quantize: The format.
        gelu: Apply tanh-approximated GELU first.
    """
    if x.is_cuda:
        from offline_diffusion.kernels import fused

        return fused.quantize_rows(x, quantize, gelu=gelu)
    wide = F.gelu(x.float(), approximate="tanh") if gelu else x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_MAX) / quantize.largest
    return Quantized(quantize.round(wide / scale), scale)


def scatter_qkv(
    qkv: Tensor,
    weight_q: Tensor | None,
    weight_k: Tensor | None,
    eps: float,
    to_joint: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """RMS norm of q and k per head, their rotation, and the move of k and v to joint order.

    Args:
        qkv: ``[T, 3, A, D]`` of one stream.
        weight_q, weight_k: ``[D]``, of the norms; both None: q and k are not normed.
        eps: Of the norms.
        to_joint: ``[T]`` int64, row of k, v and the angles for each token.
        cos, sin: ``[T_joint, D/2]`` float32, the angle of neighbouring channel pairs, in joint order; both
            None: q and k are not rotated.
        out: q ``[T, A, D]`` in the stream's order; k, v ``[T_joint, A, D]``, of which only the rows of
            ``to_joint`` are written.
    """
    if qkv.is_cuda:
        from offline_diffusion.kernels import fused

        fused.scatter_qkv(qkv, weight_q, weight_k, eps, to_joint, cos, sin, out)
        return
    q, k, v = qkv.unbind(1)
    if weight_q is not None:
        q, k = (F.rms_norm(x, x.shape[-1:], own, eps) for x, own in ((q, weight_q), (k, weight_k)))
    if cos is not None and sin is not None:
        cos, sin = cos.index_select(0, to_joint), sin.index_select(0, to_joint)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    out[0].copy_(q)
    out[1].index_copy_(0, to_joint, k)
    out[2].index_copy_(0, to_joint, v)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbouring channel pairs of every head by the token's angle, in float32.

    Args:
        x: ``[T, A, D]``.
        cos, sin: ``[T, D/2]`` float32.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # [T, A, D/2] each
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return out.flatten(-2).to(x.dtype)


def guided_step_(
    latents: Tensor,
    noise_pred: Tensor,
    owner: Tensor,
    negative_row: Tensor,
    guidance: Tensor,
    sigmas: Tensor,
    step_index: Tensor,
    *,
    rescale: bool,
) -> None:
    """Guidance and the Euler step for every token, in float32; changes ``latents``.

    ``latents += (next sigma - sigma) · prediction``, where the prediction of a token with a negative
    branch is `combine_guidance` of both.

    Args:
        latents: ``[T, C]`` float32.
        noise_pred: ``[T + negative tokens, C]``, the first T rows for the tokens of ``latents``.
        owner: ``[T]`` int64, request of each token.
        negative_row: ``[T]`` int64, row of a token's negative branch in ``noise_pred``, -1 without one.
        guidance: ``[R]`` float32, the scales.
        sigmas: ``[R, steps + 1]`` float32.
        step_index: ``[R]`` int64, the step each request is at.
        rescale: See `combine_guidance`.
    """
    if latents.is_cuda:
        from offline_diffusion.kernels import fused

        fused.guided_step_(
            latents, noise_pred, owner, negative_row, guidance, sigmas, step_index, rescale=rescale
        )
        return
    num_tokens = latents.shape[0]
    combined = noise_pred[:num_tokens].float()
    guided = (negative_row >= 0).nonzero().squeeze(1)
    if guided.numel():
        positive = combined.index_select(0, guided)
        negative = noise_pred.index_select(0, negative_row.index_select(0, guided)).float()
        scale = guidance.index_select(0, owner.index_select(0, guided)).unsqueeze(1)
        combined = combined.index_copy(0, guided, combine_guidance(positive, negative, scale, rescale))
    here = torch.stack((step_index, step_index + 1), dim=1)
    delta = sigmas.gather(1, here).diff(dim=1).index_select(0, owner)  # [T, 1]
    latents.addcmul_(delta, combined)


def combine_guidance(positive: Tensor, negative: Tensor, scale: Tensor, rescale: bool) -> Tensor:
    """Classifier-free guidance per token: ``negative + scale · (positive - negative)``.

    With ``rescale`` each token is then given the norm of its positive prediction, as diffusers'
    Qwen-Image pipeline does.

    Args:
        positive, negative: ``[T, C]``.
        scale: ``[T, 1]``.
        rescale: Whether to.
    """
    combined = negative + scale * (positive - negative)
    if not rescale:
        return combined
    return combined * (_token_norm(positive) / _token_norm(combined))


def _token_norm(x: Tensor) -> Tensor:
    """``[T, C]`` → ``[T, 1]``."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm
