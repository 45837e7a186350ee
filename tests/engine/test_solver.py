"""Guidance and the Euler step against diffusers' noise scheduler and numpy."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.engine.solver import SigmaTable, combine_guidance, euler_step

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_tables_hand_out_each_requests_own_place(steps: list[int], data: st.DataObject) -> None:
    sigmas = [torch.linspace(1, 0, n + 1) + index for index, n in enumerate(steps)]
    timesteps = [1000 * own[:-1] for own in sigmas]
    places = [data.draw(st.integers(0, n - 1)) for n in steps]
    table = SigmaTable(sigmas, timesteps, places, CPU)
    for _ in range(min(n - place for n, place in zip(steps, places, strict=True))):
        assert table.current_timesteps().tolist() == [
            float(own[place]) for own, place in zip(timesteps, places, strict=True)
        ]
        assert table.sigma_deltas().tolist() == [
            float(own[place + 1] - own[place]) for own, place in zip(sigmas, places, strict=True)
        ]
        table.advance()
        places = [place + 1 for place in places]


def test_the_euler_step_is_diffusers() -> None:
    torch.manual_seed(0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(5)
    table = SigmaTable([scheduler.sigmas], [scheduler.timesteps], [0], CPU)
    latents = expected = torch.randn(7, 4)
    for timestep in scheduler.timesteps:
        noise_pred = torch.randn(7, 4)
        expected = scheduler.step(noise_pred, timestep, expected, return_dict=False)[0]
        delta = table.sigma_deltas().expand(7).unsqueeze(1)
        latents = euler_step(latents, noise_pred, delta)
        table.advance()
        assert torch.allclose(latents, expected, atol=1e-6)


@given(st.floats(0, 20), st.integers(0, 99))
def test_guidance_is_a_line_through_both_predictions(scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    positive, negative = rng.normal(size=(2, 5, 8))
    expected = negative + scale * (positive - negative)
    tensors = torch.tensor(positive), torch.tensor(negative), torch.full((5, 1), scale, dtype=torch.float64)
    assert np.allclose(combine_guidance(*tensors, "plain").numpy(), expected)
    rescaled = combine_guidance(*tensors, "norm_rescale").numpy()
    norms = np.linalg.norm(positive, axis=1, keepdims=True)
    assert np.allclose(rescaled, expected * norms / np.linalg.norm(expected, axis=1, keepdims=True))
    assert np.allclose(np.linalg.norm(rescaled, axis=1, keepdims=True), norms)


def test_every_token_has_its_own_scale() -> None:
    positive, negative = torch.ones(3, 2), torch.zeros(3, 2)
    scale = torch.tensor([[1.0], [2.0], [7.5]])
    assert combine_guidance(positive, negative, scale, "plain")[:, 0].tolist() == [1.0, 2.0, 7.5]


def test_a_prediction_of_nothing_is_not_silently_zero() -> None:
    """0/0 becomes NaN, which the engine reports; diffusers has the same."""
    zeros = torch.zeros(1, 4)
    assert combine_guidance(zeros, zeros, torch.ones(1, 1), "norm_rescale").isnan().all()


def test_latents_stay_in_float32() -> None:
    out = euler_step(torch.zeros(2, 2), torch.ones(2, 2), torch.ones(2, 1))
    assert out.dtype == torch.float32
