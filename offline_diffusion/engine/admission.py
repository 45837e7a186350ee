"""What the scheduler knows of a request, and a step in the making. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class ScheduledRequest:
    """What the scheduler knows of a request.

    Args:
        request_id: Unique among the requests at hand.
        num_tokens: Image and text tokens of all its sequences: its share of the token budget.
        num_steps: Denoise steps still to run.
        num_text_tokens: The part of ``num_tokens`` that is text.
        decode_tokens: Tokens of a step that take as much memory as its decode will.
        batch_key: Only equal keys share a step.
        wave_key: Only equal keys share a wave in request mode.
        arrival: Seconds on the engine's clock; the admission window counts from here.
        deadline: Seconds on the engine's clock by which it should be done; infinite without one.
        num_overtaken: Later requests that were admitted before it; the scheduler counts.
    """

    request_id: str
    num_tokens: int
    num_steps: int
    num_text_tokens: int = 0
    decode_tokens: int = 0
    batch_key: Hashable = None
    wave_key: Hashable = None
    arrival: float = 0.0
    deadline: float = math.inf
    num_overtaken: int = 0

    @property
    def work(self) -> int:
        """Token-steps still to run."""
        return self.num_tokens * self.num_steps


@dataclass
class Step:
    """A step in the making: who is in it, and how much of the budgets they take."""

    max_num_seqs: int
    max_num_tokens: int
    max_num_text_tokens: float
    memory_tokens: float
    decode_tokens: int
    entries: list[ScheduledRequest] = field(default_factory=list)
    num_tokens: int = 0
    num_text_tokens: int = 0

    @property
    def room(self) -> int:
        """Tokens left; below zero where one request is above the budget."""
        return self.max_num_tokens - self.num_tokens

    def add(self, entry: ScheduledRequest) -> None:
        self.entries.append(entry)
        self.num_tokens += entry.num_tokens
        self.num_text_tokens += entry.num_text_tokens
        self.decode_tokens = max(self.decode_tokens, entry.decode_tokens)

    def fits(self, entry: ScheduledRequest) -> bool:
        """Whether ``entry`` may join; the first always may, so that one above the budget runs alone."""
        if not self.entries:
            return True
        return (
            entry.batch_key == self.entries[0].batch_key
            and len(self.entries) < self.max_num_seqs
            and entry.num_tokens <= self.room
            and self.num_text_tokens + entry.num_text_tokens <= self.max_num_text_tokens
            and self._memory_with(entry) <= self.memory_tokens
        )

    def _memory_with(self, entry: ScheduledRequest) -> int:
        """A step with ``entry``, and beside it the largest decode that may come of it."""
        return self.num_tokens + entry.num_tokens + max(self.decode_tokens, entry.decode_tokens)

    def add_in_order(self, entries: Iterable[ScheduledRequest]) -> bool:
        """Adds ``entries`` until one does not fit; whether all did."""
        for entry in entries:
            if not self.fits(entry):
                return False
            self.add(entry)
        return True

    def add_fitting(self, entries: Iterable[ScheduledRequest], *, enough: float = math.inf) -> None:
        """Adds, in order, all that fit, until the step has ``enough`` tokens."""
        for entry in entries:
            if self.num_tokens >= enough or len(self.entries) >= self.max_num_seqs:
                return
            if self.fits(entry):
                self.add(entry)


def sum_tokens(entries: Iterable[ScheduledRequest]) -> int:
    """Tokens of all ``entries`` in a step."""
    return sum(entry.num_tokens for entry in entries)


def without(
    entries: Iterable[ScheduledRequest], others: Iterable[ScheduledRequest]
) -> list[ScheduledRequest]:
    """By identity: equal numbers do not make two requests one."""
    left_out = {id(entry) for entry in others}
    return [entry for entry in entries if id(entry) not in left_out]
