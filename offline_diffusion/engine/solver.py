"""Where every request of a pack stands on its schedule, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from offline_diffusion.upload import upload


class SigmaTable:
    """Every request's sigmas on the device, and the step each is at.

    Args:
        sigmas: Per request ``[steps + 1]`` float32 on the CPU.
        step_indices: The step each request is at.
        device: Of the tables.
    """

    def __init__(self, sigmas: list[Tensor], step_indices: list[int], device: torch.device) -> None:
        padded = torch.nn.utils.rnn.pad_sequence(sigmas, batch_first=True)
        self.sigmas = upload(padded, device)  # [R, steps + 1]
        self.step_index = upload(torch.tensor(step_indices, dtype=torch.int64), device)  # [R]

    def advance(self) -> None:
        """Every request is one step further."""
        self.step_index += 1
