"""Guidance and the Euler step against diffusers' noise scheduler and numpy."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.kernels.packed_ops import combine_guidance, guided_step_


def test_the_euler_step_is_diffusers() -> None:
    torch.manual_seed(0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(5)
    latents = torch.randn(7, 4)
    expected = latents.clone()
    nobody, owner = torch.full((7,), -1), torch.zeros(7, dtype=torch.int64)
    for step, timestep in enumerate(scheduler.timesteps):
        noise_pred = torch.randn(7, 4)
        expected = scheduler.step(noise_pred, timestep, expected, return_dict=False)[0]
        place = torch.tensor([step])
        guided_step_(
            latents, noise_pred, owner, nobody, torch.ones(1), scheduler.sigmas[None], place, rescale=True
        )
        assert torch.allclose(latents, expected, atol=1e-6)


@given(st.floats(0, 20), st.integers(0, 99))
def test_guidance_is_a_line_through_both_predictions(scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    positive, negative = rng.normal(size=(2, 5, 8))
    expected = negative + scale * (positive - negative)
    tensors = torch.tensor(positive), torch.tensor(negative), torch.full((5, 1), scale, dtype=torch.float64)
    assert np.allclose(combine_guidance(*tensors, rescale=False).numpy(), expected)
    rescaled = combine_guidance(*tensors, rescale=True).numpy()
    norms = np.linalg.norm(positive, axis=1, keepdims=True)
    assert np.allclose(rescaled, expected * norms / np.linalg.norm(expected, axis=1, keepdims=True))
    assert np.allclose(np.linalg.norm(rescaled, axis=1, keepdims=True), norms)


def guided_step_by_hand(
    latents: np.ndarray,
    pred: np.ndarray,
    rows: list[tuple[int, int]],
    guidance: list[float],
    delta: list[float],
) -> np.ndarray:
    """``rows``: owner and negative row of each token; norms are restored."""
    out = latents.astype(np.float64).copy()
    for token, (owner, negative_row) in enumerate(rows):
        positive = pred[token].astype(np.float64)
        if negative_row >= 0:
            negative = pred[negative_row].astype(np.float64)
            combined = negative + guidance[owner] * (positive - negative)
            combined *= np.linalg.norm(positive) / np.linalg.norm(combined)
            positive = combined
        out[token] += delta[owner] * positive
    return out


def test_every_token_has_its_own_scale_branch_and_step_length() -> None:
    torch.manual_seed(1)
    rows = [(0, -1), (0, -1), (1, 6), (1, 5), (2, 7)]
    sigmas = torch.tensor([[1.0, 0.7, 0.2, 0.0], [1.0, 0.5, 0.0, 0.0], [1.0, 0.9, 0.8, 0.0]])
    step_index = torch.tensor([1, 0, 2])
    guidance = [1.0, 4.0, 7.5]
    latents, noise_pred = torch.randn(5, 3), torch.randn(8, 3)
    delta = [0.2 - 0.7, 0.5 - 1.0, 0.0 - 0.8]
    expected = guided_step_by_hand(latents.numpy(), noise_pred.numpy(), rows, guidance, delta)
    owner, negative_row = torch.tensor(rows).unbind(1)
    guided_step_(
        latents, noise_pred, owner, negative_row, torch.tensor(guidance), sigmas, step_index, rescale=True
    )
    assert latents.dtype == torch.float32
    assert np.allclose(latents.numpy(), expected, atol=1e-6)


def test_a_prediction_of_nothing_is_not_silently_zero() -> None:
    """0/0 becomes NaN, which the engine reports; diffusers has the same."""
    zeros = torch.zeros(1, 4)
    assert combine_guidance(zeros, zeros, torch.ones(1, 1), rescale=True).isnan().all()
