"""What a trace does not say, drawn with a seed: prompts of a length, sizes of a mixture. Free of torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offline_diffusion.data.rows import ManifestRow
from offline_diffusion.request import SamplingParams

DEFAULT_PROMPT_LENGTH = 20
"""Words of a prompt whose length is not known."""

WORDS = (
    *("a", "red", "fox", "on", "an", "old", "wall", "in", "the", "rain", "at", "dawn", "with", "soft"),
    *("light", "and", "tall", "pine", "near", "lake", "calm", "city", "by", "night", "wide", "lens"),
    *("oil", "paint", "of", "ship", "gold", "leaf", "under", "blue", "sky", "small", "hut", "snow"),
)
"""Short ones: of most tokenizers each is one token."""

DEFAULT_SIZES = ((512, 20, 0.15), (768, 20, 0.25), (1024, 25, 0.45), (1536, 35, 0.15))
"""Side in pixels, steps and weight: the mixture in vLLM-Omni's documentation of its benchmark."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Kinds of requests, of which one is drawn by weight; a kind's None is left to the model."""

    kinds: Sequence[SamplingParams]
    weights: Sequence[float]

    @classmethod
    def default(cls) -> Mixture:
        """`DEFAULT_SIZES`."""
        kinds = [
            SamplingParams(height=side, width=side, num_inference_steps=steps)
            for side, steps, _ in DEFAULT_SIZES
        ]
        return cls(kinds, [weight for *_, weight in DEFAULT_SIZES])

    def draw(self, count: int, seed: int) -> list[int]:
        """Indices of ``count`` kinds, the same as vLLM-Omni's benchmark draws with this seed."""
        return random.Random(seed).choices(range(len(self.kinds)), weights=self.weights, k=count)


class Draws:
    """Fills in prompts and sizes, the same ones for the same seed.

    Args:
        seed: Of all draws.
        sizes: For requests without a size; None leaves them to the model.
        prompts: For requests without a prompt; none for prompts made of `WORDS`.
    """

    def __init__(self, seed: int = 0, *, sizes: Mixture | None = None, prompts: Sequence[str] = ()) -> None:
        self.sizes = sizes
        self._prompts = prompts
        self._prompt_rng, self._size_rng = (random.Random(f"{what}:{seed}") for what in ("prompts", "sizes"))

    def prompt(self, num_words: int | None = None) -> str:
        """One of the given prompts, or ``num_words`` words."""
        if self._prompts:
            return self._prompt_rng.choice(self._prompts)
        return " ".join(self._prompt_rng.choices(WORDS, k=num_words or DEFAULT_PROMPT_LENGTH))

    def with_size(self, row: ManifestRow) -> ManifestRow:
        """``row``, with a kind of the mixture filled in where it has neither height nor width."""
        if self.sizes is None or row.params.height is not None or row.params.width is not None:
            return row
        [kind] = self._size_rng.choices(self.sizes.kinds, weights=self.sizes.weights)
        return replace(row, params=filled(row.params, kind))


def filled(params: SamplingParams, kind: SamplingParams) -> SamplingParams:
    """``params`` with what they leave open from ``kind``."""
    names = ("height", "width", "num_inference_steps", "true_cfg_scale", "guidance_scale", "negative_prompt")
    return replace(params, **{n: getattr(kind, n) for n in names if getattr(params, n) is None})
