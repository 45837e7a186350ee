"""Encodes prompts in batches of fixed shapes, so that an embedding depends on its own prompt alone.

The text encoder is causal: what stands to the right of a token, or in another row, changes no term of
any sum. What could change its bits is the kernel that a library picks, which it does by shape. Hence a
prompt's own length decides on the shape it is encoded in, and the shape is always run whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offline_diffusion.upload import upload

LENGTHS = (64, 128, 192, 256, 384, 576)
"""Tokens of a row. Longer than the longest prompt with its template, which has 34 + 512 tokens."""

BATCH_TOKENS = 576
"""Most tokens of a batch of several rows: as much work as a GPU does while its kernels are launched."""

PAD_ID = 0
"""Fills rows up. Any id does: no token looks to its right."""


class PromptEncoder:
    """Token ids to hidden states.

    Args:
        language_model: A loaded ``Qwen2_5_VLTextModel`` on ``device``.
        device: Where it is.
        batch_tokens: Most tokens of a batch of several rows; 1 encodes every prompt alone.
    """

    def __init__(self, language_model: Any, device: torch.device, batch_tokens: int) -> None:
        self._language_model, self._device, self._batch_tokens = language_model, device, batch_tokens

    def shape(self, num_ids: int) -> tuple[int, int]:
        """Rows and tokens a row of the batch in which a prompt of ``num_ids`` tokens is encoded."""
        length = next((length for length in LENGTHS if num_ids <= length), None)
        if length is None:
            length = -(num_ids // -LENGTHS[0]) * LENGTHS[0]
        return max(1, self._batch_tokens // length), length

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Hidden states of each prompt's ids, ``[len(ids), H]``; those of one shape share batches."""
        hidden: dict[int, Tensor] = {}
        for shape in dict.fromkeys(self.shape(len(ids)) for ids in prompts):
            indices = [index for index, ids in enumerate(prompts) if self.shape(len(ids)) == shape]
            for start in range(0, len(indices), shape[0]):
                batch = indices[start : start + shape[0]]
                states = self._encode([prompts[index] for index in batch], shape)
                hidden.update(zip(batch, states, strict=True))
        return [hidden[index] for index in range(len(prompts))]

    def _encode(self, prompts: Sequence[Sequence[int]], shape: tuple[int, int]) -> list[Tensor]:
        """One batch of ``shape``; rows that no prompt takes are padding."""
        input_ids = torch.full(shape, PAD_ID)
        for row, ids in zip(input_ids, prompts, strict=False):
            row[: len(ids)] = torch.tensor(ids)
        # Without a mask attention runs in its causal form, and positions count from 0 in every row.
        output = self._language_model(upload(input_ids, self._device), use_cache=False)
        return [states[: len(ids)] for states, ids in zip(output.last_hidden_state, prompts, strict=False)]
