"""Prompts of families whose encoders take padded ids: CLIP and T5, as diffusers' pipelines call them.

Every prompt is padded to its encoder's full length, without a mask: padding is part of what the model was
trained on. Batches have one fixed shape and are always run whole, so an embedding depends on its own prompt
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offline_diffusion.errors import ModelError, UnsupportedModelError
from offline_diffusion.models.base import TokenizedPrompt
from offline_diffusion.upload import upload

BATCH_TOKENS = 1024
"""Tokens of a batch on a GPU: about as much work of the largest encoder as covers its launches."""


@dataclass(frozen=True, slots=True)
class PaddedEncoder:
    """A tokenizer and its text encoder.

    Args:
        tokenizer, encoder: Loaded, of transformers.
        num_tokens: L; ids are padded and cut to it, special tokens included.
        encode: Ids ``[rows, L]`` on the device → what the family takes of the encoder's output, each with a
            row for each prompt.

    Raises:
        UnsupportedModelError: The pipeline was loaded without one of them.
        ModelError: The tokenizer is not the encoder's: without its files transformers makes an empty one that
            draws wrong pictures.
    """

    tokenizer: Any
    encoder: Any
    num_tokens: int
    encode: Callable[[Tensor], tuple[Tensor, ...]]

    def __post_init__(self) -> None:
        if self.tokenizer is None or self.encoder is None:
            raise UnsupportedModelError("the pipeline has no tokenizer or text encoder where one is needed")
        found, wanted = len(self.tokenizer), self.encoder.config.vocab_size
        if not wanted / 2 < found <= wanted:
            raise ModelError(
                f"{type(self.tokenizer).__name__} has {found} tokens, its text encoder {wanted}",
                hint="the checkpoint's tokenizer folder is damaged or belongs to another model",
            )

    def ids(self, text: str) -> tuple[list[int], int]:
        """L token ids, and how many of the text were cut."""
        ids: list[int] = self.tokenizer(
            text, padding="max_length", max_length=self.num_tokens, truncation=True
        )["input_ids"]
        return ids, max(0, len(self.tokenizer(text, verbose=False)["input_ids"]) - self.num_tokens)


class PaddedPrompts:
    """All text encoders of a family.

    Args:
        encoders: In order.
        num_text_tokens: Of the text stream.
        device: Where the encoders are. A CPU gains nothing from company: there every prompt is alone.
    """

    def __init__(self, encoders: Sequence[PaddedEncoder], num_text_tokens: int, device: torch.device) -> None:
        self._encoders, self._num_text_tokens, self._device = encoders, num_text_tokens, device
        longest = max(encoder.num_tokens for encoder in encoders)
        num_rows = max(1, BATCH_TOKENS // longest) if device.type == "cuda" else 1
        self.shape = num_rows, longest
        """Prompts and tokens of every batch."""

    def tokenize(self, text: str) -> TokenizedPrompt:
        """The ids of all encoders one after the other; what any of them cuts is counted."""
        parts = [encoder.ids(text) for encoder in self._encoders]
        ids = tuple(token for own, _ in parts for token in own)
        return TokenizedPrompt(ids, self._num_text_tokens, sum(cut for _, cut in parts))

    def encode(self, prompts: Sequence[TokenizedPrompt]) -> list[list[Tensor]]:
        """Of each prompt what its encoders gave, in their order, without the axis of rows."""
        num_rows = self.shape[0]
        encoded: list[list[Tensor]] = []
        for start in range(0, len(prompts), num_rows):
            encoded += self._encode_batch(prompts[start : start + num_rows])
        return encoded

    def _encode_batch(self, prompts: Sequence[TokenizedPrompt]) -> list[list[Tensor]]:
        """One batch; rows that no prompt takes repeat the first."""
        rows = [list(prompt.input_ids) for prompt in prompts]
        rows += [rows[0]] * (self.shape[0] - len(rows))
        outputs: list[Tensor] = []
        ids = upload(torch.tensor(rows), self._device).split(
            [own.num_tokens for own in self._encoders], dim=1
        )
        for encoder, own_ids in zip(self._encoders, ids, strict=True):
            outputs += encoder.encode(own_ids.contiguous())
        return [[output[row] for output in outputs] for row in range(len(prompts))]
