"""Encoded prompts: each distinct one once, in full batches where others are waiting."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from offline_diffusion.models.base import DiffusionModel, PromptEmbeds, TokenizedPrompt

logger = logging.getLogger(__name__)

PROMPT_CACHE_TOKENS = 65_536
"""Text tokens of encoded prompts kept for reuse; at full size 400 MB."""


@dataclass(slots=True)
class _Encoded:
    """An encoded prompt and the seconds it took, until a request has booked them."""

    embeds: PromptEmbeds
    seconds: float


class PromptCache:
    """Encoded prompts by token ids.

    A batch costs the same whether it is full or not. So what is wanted now takes along what is expected to
    be wanted later and is encoded in the same shape, the oldest first; nothing is encoded for that alone.

    Args:
        model: A loaded family.
        clock: Seconds.
    """

    def __init__(self, model: DiffusionModel, clock: Callable[[], float]) -> None:
        self._model, self._clock = model, clock
        self._encoded: OrderedDict[tuple[int, ...], _Encoded] = OrderedDict()  # the last used at the end
        self._num_tokens = 0
        self.num_encoded = 0
        """Prompts, since the start."""
        self._expected: dict[tuple[int, ...], TokenizedPrompt] = {}
        self._alone: set[tuple[int, ...]] = set()  # of batches that failed

    def expect(self, prompts: Iterable[TokenizedPrompt]) -> None:
        """Announces prompts that will be asked for."""
        for prompt in prompts:
            if prompt.input_ids not in self._encoded and prompt.input_ids not in self._alone:
                self._expected[prompt.input_ids] = prompt

    def get(self, prompts: Sequence[TokenizedPrompt]) -> tuple[list[PromptEmbeds], float]:
        """Each prompt encoded, and the seconds that encoding them took and nobody has booked.

        When a batch fails, its prompts are encoded one by one from then on: this raises what the model
        raises for one of ``prompts`` itself.
        """
        for prompt in prompts:
            self._expected.pop(prompt.input_ids, None)
        try:
            self._encode([prompt for prompt in prompts if prompt.input_ids not in self._encoded])
        finally:
            self._alone.difference_update(prompt.input_ids for prompt in prompts)
        found, seconds = [], 0.0
        for prompt in prompts:
            encoded = self._encoded[prompt.input_ids]
            self._encoded.move_to_end(prompt.input_ids)
            found.append(encoded.embeds)
            seconds += encoded.seconds
            encoded.seconds = 0.0
        self._evict()
        return found, seconds

    def clear(self) -> None:
        """Forgets what is encoded, and which batches failed: memory may have been at fault."""
        self._encoded.clear()
        self._alone.clear()
        self._num_tokens = 0

    def forget_expected(self, prompts: Iterable[TokenizedPrompt] | None = None) -> None:
        """``prompts`` will not be asked for, or without them nothing that was announced."""
        if prompts is None:
            self._expected.clear()
            return
        for prompt in prompts:
            self._expected.pop(prompt.input_ids, None)

    def _encode(self, unknown: list[TokenizedPrompt]) -> None:
        unknown = list(dict.fromkeys(unknown))
        batch = self._fill_up([prompt for prompt in unknown if prompt.input_ids not in self._alone])
        try:
            self._encode_together(batch)
        except Exception as error:
            if len(batch) == 1:
                raise
            logger.warning("%d prompts failed together, each is now encoded alone: %s", len(batch), error)
            self._alone.update(prompt.input_ids for prompt in batch)
        for prompt in unknown:
            if prompt.input_ids in self._alone:
                self._encode_together([prompt])

    def _fill_up(self, batch: list[TokenizedPrompt]) -> list[TokenizedPrompt]:
        """``batch`` and what of the expected prompts finds room in its shapes."""
        num_prompts = Counter(self._model.encode_shape(prompt) for prompt in batch)
        room = {shape: -count % shape[0] for shape, count in num_prompts.items()}
        company = []
        for prompt in self._expected.values():
            if not any(room.values()):
                break
            shape = self._model.encode_shape(prompt)
            if room.get(shape):
                room[shape] -= 1
                company.append(prompt)
        for prompt in company:
            del self._expected[prompt.input_ids]
        return batch + company

    def _encode_together(self, prompts: list[TokenizedPrompt]) -> None:
        if not prompts:
            return
        start = self._clock()
        encoded = self._model.prepare_encode(prompts)
        share = (self._clock() - start) / len(prompts)
        for prompt, embeds in zip(prompts, encoded, strict=True):
            self._encoded[prompt.input_ids] = _Encoded(embeds, share)
            self._num_tokens += embeds.num_tokens
        self.num_encoded += len(prompts)

    def _evict(self) -> None:
        """The least recently used, down to the limit; the last one stays in any case."""
        while self._num_tokens > PROMPT_CACHE_TOKENS and len(self._encoded) > 1:
            _, oldest = self._encoded.popitem(last=False)
            self._num_tokens -= oldest.embeds.num_tokens
