"""Where each sequence of a pack begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Bounds of the sequences of a ragged batch, set once per composition.

    Args:
        cu_seqlens: ``[N + 1]`` int32 on the device, starts of the sequences and the total.
        seqlens: The N lengths, on the host.
        max_seqlen: The longest.
    """

    cu_seqlens: Tensor
    seqlens: tuple[int, ...]
    max_seqlen: int

    @classmethod
    def from_seqlens(cls, seqlens: Sequence[int], device: torch.device) -> AttentionMetadata:
        """Args: ``seqlens``: tokens of each sequence, all at least 1."""
        assert min(seqlens, default=0) > 0, f"empty sequence in {seqlens}"
        bounds = [0, *accumulate(seqlens)]
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)
        return cls(cu_seqlens, tuple(seqlens), max(seqlens))
