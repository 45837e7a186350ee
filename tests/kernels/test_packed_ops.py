"""The elementwise work of a packed forward, row by row against diffusers' own functions."""

from __future__ import annotations

import torch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offline_diffusion.kernels.packed_ops import gate_residual_norm, norm_modulate, rotate, scatter_qkv

indices = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(indices, st.integers(0, 99))
def test_norm_modulate_uses_each_tokens_own_request(index: list[int], seed: int) -> None:
    x = randn(len(index), 16, seed=seed) * 3 + 1
    shift, scale = randn(4, 16, seed=seed + 1), randn(4, 16, seed=seed + 2)
    out = norm_modulate(x, shift, scale, torch.tensor(index), 1e-6)
    norm = nn.LayerNorm(16, elementwise_affine=False, eps=1e-6)
    for row, request in enumerate(index):
        expected = norm(x[row]) * (1 + scale[request]) + shift[request]
        assert torch.allclose(out[row], expected, atol=1e-5)


@given(indices, st.integers(0, 99))
def test_gate_residual_norm_uses_each_tokens_own_request(index: list[int], seed: int) -> None:
    x, update = randn(len(index), 8, seed=seed), randn(len(index), 8, seed=seed + 1)
    gate, shift, scale = (randn(4, 8, seed=seed + 2 + n) for n in range(3))
    summed, normed = gate_residual_norm(x, update, gate, shift, scale, torch.tensor(index), 1e-6)
    norm = nn.LayerNorm(8, elementwise_affine=False, eps=1e-6)
    for row, request in enumerate(index):
        expected = x[row] + gate[request] * update[row]
        assert torch.allclose(summed[row], expected, atol=1e-6)
        assert torch.allclose(normed[row], norm(expected) * (1 + scale[request]) + shift[request], atol=1e-4)


def test_rotate_is_diffusers_rotation() -> None:
    x, angles = randn(5, 3, 8), randn(5, 4, seed=1)
    expected = apply_rotary_emb_qwen(
        x.unsqueeze(0), torch.polar(torch.ones_like(angles), angles), use_real=False
    )
    assert torch.allclose(rotate(x, angles.cos(), angles.sin()), expected[0], atol=1e-6)


def test_rotate_by_a_quarter_turn() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    quarter, none = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    # the first pair turns by 90 degrees, the second stays
    assert rotate(x, quarter, none).tolist() == [[[-2.0, 1.0, 3.0, 4.0]]]


def test_rotate_keeps_the_dtype_and_computes_in_float32() -> None:
    x, angles = randn(5, 3, 8).bfloat16(), randn(5, 4, seed=1)
    exact = rotate(x.float(), angles.cos(), angles.sin())
    assert torch.equal(rotate(x, angles.cos(), angles.sin()), exact.bfloat16())


def test_scatter_qkv_norms_rotates_and_places_each_token() -> None:
    num_tokens, num_heads, width = 4, 3, 8
    qkv = randn(num_tokens, 3, num_heads, width)
    weight_q, weight_k = randn(width, seed=1), randn(width, seed=2)
    place = torch.tensor([6, 0, 3, 5])
    angles = randn(7, width // 2, seed=3)
    out = tuple(torch.full((rows, num_heads, width), 9.0) for rows in (num_tokens, 7, 7))
    scatter_qkv(qkv, weight_q, weight_k, 1e-6, place, angles.cos(), angles.sin(), out)
    for target, part, weight in zip(out, qkv.unbind(1), (weight_q, weight_k, None), strict=True):
        expected = torch.full_like(target, 9.0)
        for token, row in enumerate(place.tolist()):
            value = part[token]
            target_row = token if target is out[0] else row  # q stays in the stream's order
            if weight is not None:
                norm = RMSNorm(width, eps=1e-6)
                norm.weight.data = weight
                turn = torch.polar(torch.ones(1, width // 2), angles[row : row + 1])
                value = apply_rotary_emb_qwen(norm(value)[None, None], turn, use_real=False)[0, 0]
            expected[target_row] = value
        assert torch.allclose(target, expected, atol=1e-5)
