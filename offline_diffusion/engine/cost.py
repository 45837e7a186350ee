"""What a run's time went into: a linear model, fitted to the run's own steps. Free of torch.

Time is counted without a gap, from the end of a step to the end of the next. So whatever happens in
between (prompts encoded, images decoded, packs built, files written) is in it once: on a CPU, where
it comes one after the other, and on a GPU, where a decode runs beside the steps and slows them. A term
is what its unit adds to the time of a run, and all terms together come to that time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from offline_diffusion.engine.engine import Engine

MIN_STEPS = 8
"""Fewer determine nothing."""

PRIOR_S = 0.2
"""Seconds of samples that weigh as much as what is believed beforehand: that a token and a squared length
cost as the FLOP formula says, and that steps, images and prompts cost nothing by their number. It
decides what samples leave open, such as how images of one size split into tokens and squares."""

TINY = 1e-6
"""Keeps a fit solvable where two terms always come together."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """Time that passed, and what was done in it: in one step, or in several that follow each other.

    Args:
        num_tokens: Tokens of all sequences, summed over the steps.
        sum_squares: Squared lengths of all sequences, likewise.
        seconds: From the end of the step before to the end of the last.
        num_steps: How many; 0 for what follows a last step.
        num_images, num_pixels: Whose decode began.
        num_prompts: Prompts that were encoded.
    """

    num_tokens: float
    sum_squares: float
    seconds: float
    num_steps: float = 1
    num_images: float = 0
    num_pixels: float = 0
    num_prompts: float = 0

    def __add__(self, other: StepSample) -> StepSample:
        return StepSample(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


NOTHING = StepSample(0, 0, 0.0, num_steps=0)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds that each adds: a step, a token of a step, a squared sequence length of a step, an image,
    a pixel of it, an encoded prompt."""

    fixed_s: float
    token_s: float
    square_s: float
    image_s: float = 0.0
    pixel_s: float = 0.0
    prompt_s: float = 0.0

    def seconds(
        self,
        *,
        num_steps: float,
        num_tokens: float,
        sum_squares: float,
        num_images: float = 0,
        num_pixels: float = 0,
        num_prompts: float = 0,
    ) -> float:
        """Of all that work, tokens and squares summed over the steps."""
        return (
            self.fixed_s * num_steps
            + self.token_s * num_tokens
            + self.square_s * sum_squares
            + self.image_s * num_images
            + self.pixel_s * num_pixels
            + self.prompt_s * num_prompts
        )


NUM_TERMS = len(fields(CostModel))


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """A cost model with what it rests on.

    Args:
        model: The terms.
        num_steps, seconds: What it was fitted to.
        num_images: Finished in the run.
        max_num_batched_tokens: The token budget of its steps.
        dtype: In which the model computed, such as ``bfloat16``.
    """

    model: CostModel
    num_steps: int
    seconds: float
    num_images: int
    max_num_batched_tokens: int
    dtype: str


class CostMeter:
    """Takes samples one by one and keeps only the sums that a fit needs.

    Args:
        sample_s: Samples are put together to ones of at least so many seconds. What one began and the
            next felt then mostly comes into the same.
    """

    def __init__(self, sample_s: float = 0.0) -> None:
        self._sample_s = sample_s
        self._open = NOTHING
        self._total = NOTHING
        self._gram = np.zeros((NUM_TERMS, NUM_TERMS))
        self._times = np.zeros(NUM_TERMS)  # of the samples in which a term occurs

    def add(self, sample: StepSample) -> None:
        """Counts the time after that of the sample before."""
        self._open += sample
        if self._open.seconds > 0 and self._open.seconds >= self._sample_s:
            self._close()

    def _close(self) -> None:
        if self._open.seconds > 0:
            amounts = _amounts(self._open)
            self._gram += np.outer(amounts, amounts) / self._open.seconds
            self._times += self._open.seconds * (amounts > 0)
            self._total += self._open
        self._open = NOTHING

    @property
    def num_steps(self) -> int:
        """Steps that a fit rests on."""
        return round(self._total.num_steps + self._open.num_steps)

    @property
    def seconds(self) -> float:
        """Seconds that a fit rests on."""
        return self._total.seconds + self._open.seconds

    def fit(self, square_ratio: float = 0.0) -> CostModel | None:
        """The terms, none below 0, with the least squares of the relative errors, each weighted by its
        sample's seconds; scaled so that they come to the time of all samples.

        Args:
            square_ratio: What a squared length costs in tokens by the FLOP formula, see `square_ratio`.

        Returns:
            None below `MIN_STEPS` steps.
        """
        self._close()
        if self._total.num_steps < MIN_STEPS:
            return None
        amounts = _amounts(self._total)
        seen = np.flatnonzero(amounts)
        # A term counts 1 if it alone took the time of all samples in which it occurs: terms are shares.
        times = self._times[seen]
        units = times / amounts[seen]
        gram = self._gram[np.ix_(seen, seen)] * np.outer(units, units)
        gram += self._prior(square_ratio)[np.ix_(seen, seen)] + TINY * np.diag(times)
        terms = np.zeros(NUM_TERMS)
        terms[seen] = _least_squares(gram, times) * units
        terms *= self._total.seconds / (amounts @ terms)
        return CostModel(*(float(term) for term in terms))

    def _prior(self, square_ratio: float) -> np.ndarray:
        """The weight of shares that are not believed, as a quadratic form ``[NUM_TERMS, NUM_TERMS]``."""
        by_flops = np.array((self._total.num_tokens, self._total.sum_squares * square_ratio))
        across = np.array((-by_flops[1], by_flops[0])) / by_flops.sum()
        prior = np.diag((1.0, 0, 0, 1, 0, 1))
        prior[1:3, 1:3] = np.outer(across, across)
        return PRIOR_S * prior


def square_ratio(forward_flops: Callable[[int], float]) -> float:
    """How many tokens a squared length costs as much as, by a formula a·S + b·S² for length S: b/a."""
    one, two = forward_flops(1), forward_flops(2)
    square = two / 2 - one
    return square / (one - square)


def measured_cost(engine: Engine) -> MeasuredCost | None:
    """What an engine's steps cost; None when it ran too few. Waits for the device."""
    costs, model = engine.costs(), engine.model
    fitted = costs.fit(square_ratio(model.capabilities.forward_flops))
    if fitted is None:
        return None
    return MeasuredCost(
        model=fitted,
        num_steps=costs.num_steps,
        seconds=costs.seconds,
        num_images=engine.stats.num_finished,
        max_num_batched_tokens=engine.scheduler.max_num_batched_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _amounts(work: StepSample) -> np.ndarray:
    """In the order of `CostModel`'s terms, float64 ``[NUM_TERMS]``."""
    steps = (work.num_steps, work.num_tokens, work.sum_squares)
    return np.array((*steps, work.num_images, work.num_pixels, work.num_prompts), dtype=np.float64)


def _least_squares(gram: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x ≥ 0 with the least x·Gx - 2t·x, for a positive definite G.

    It is the plain solution over the terms that are above 0, so every set of them is tried: at most 63.
    """
    best, least = np.zeros(len(target)), np.inf
    for count in range(1, len(target) + 1):
        for active in combinations(range(len(target)), count):
            x = np.zeros(len(target))
            x[list(active)] = np.linalg.solve(gram[np.ix_(active, active)], target[list(active)])
            value = x @ gram @ x - 2 * target @ x
            if x.min() >= 0 and value < least:
                best, least = x, value
    return best
