"""One step of stacked rows against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offline_diffusion.kernels.stacked_ops import linear_step_


@pytest.mark.parametrize("num_slots", [1, 2, 4])
@pytest.mark.parametrize("is_noisy", [False, True])
def test_every_row_has_a_matrix_of_its_own(num_slots: int, is_noisy: bool) -> None:
    rng = np.random.default_rng(num_slots)
    state = rng.normal(size=(3, 5, num_slots, 4))
    output, noise = rng.normal(size=(2, 3, 5, 4))
    matrices = rng.normal(size=(3, num_slots, num_slots + 2))
    inputs = np.concatenate((state, output[:, :, None], noise[:, :, None]), axis=2)  # [R, S, K + 2, C]
    used = matrices if is_noisy else matrices[:, :, :-1]
    expected = np.einsum("rij,rsjc->rsic", used, inputs[:, :, : used.shape[2]])
    ours = torch.tensor(state.reshape(3, 5, -1))
    linear_step_(
        ours, torch.tensor(output), torch.tensor(noise) if is_noisy else None, torch.tensor(matrices)
    )
    assert np.allclose(ours.numpy(), expected.reshape(3, 5, -1))
