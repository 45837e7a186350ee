"""The token budget when memory runs out, and when it suffices again."""

from __future__ import annotations

import logging

from offline_diffusion.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

GOOD_STEPS = 200
"""Steps after which a budget that was lowered for want of memory is doubled again, up to what it was."""


class TokenBudget:
    """Lowers and raises a scheduler's token budget.

    Args:
        scheduler: Whose; its budget now is the most that it will have.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._most = scheduler, scheduler.max_num_batched_tokens
        self._num_good_steps = 0  # since memory ran out

    def shrink(self, num_tokens: int) -> None:
        """A step of ``num_tokens`` was too much: half of it is the budget, and those beyond it wait again."""
        self._num_good_steps = 0
        evicted = self._scheduler.shrink(num_tokens // 2)
        logger.warning(
            "out of memory at %d tokens a step: the budget is now %d, %d requests wait again",
            num_tokens,
            self._scheduler.max_num_batched_tokens,
            len(evicted),
        )

    def count_good_step(self) -> None:
        """A step was done."""
        self._num_good_steps += 1
        if self._scheduler.max_num_batched_tokens < self._most and self._num_good_steps >= GOOD_STEPS:
            self._num_good_steps = 0
            self._scheduler.grow(self._most)
            budget = self._scheduler.max_num_batched_tokens
            logger.info("memory has sufficed for %d steps: the budget is %d tokens again", GOOD_STEPS, budget)
