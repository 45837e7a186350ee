"""Where each sequence's queries and keys begin and end in a pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from offline_diffusion.upload import upload


@dataclass(frozen=True, slots=True)
class SequenceBounds:
    """Where N sequences lie one behind the other, set once per composition.

    Args:
        cu_seqlens: ``[N + 1]`` int32 on the device, starts of the sequences and the total.
        seqlens: The N lengths, on the host.
        max_seqlen: The longest.
    """

    cu_seqlens: Tensor
    seqlens: tuple[int, ...]
    max_seqlen: int

    @classmethod
    def from_seqlens(cls, seqlens: Sequence[int], device: torch.device) -> SequenceBounds:
        """Args: ``seqlens``: tokens of each sequence, all at least 1."""
        assert min(seqlens, default=0) > 0, f"empty sequence in {seqlens}"
        bounds = [0, *accumulate(seqlens)]
        cu_seqlens = upload(torch.tensor(bounds, dtype=torch.int32), device)
        return cls(cu_seqlens, tuple(seqlens), max(seqlens))


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Bounds of the queries and of the keys they attend to: as many sequences of each, in one order."""

    queries: SequenceBounds
    keys: SequenceBounds
