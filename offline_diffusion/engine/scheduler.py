"""Who runs in the next step. Free of torch; ``schedule()`` is deterministic.

One class serves all execution modes: in step mode requests join and leave between steps; in
request mode a wave of like requests is admitted together and runs to its end. Serial execution is
``max_num_seqs=1`` in either.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

LOOK_AHEAD = 256
"""Waiting requests that ``pack`` considers, and that may be prepared ahead."""

MAX_OVERTAKEN = 192
"""Later requests that ``pack`` may admit before a waiting one; under half a shard of the default size.

Then it is overdue: nothing behind it is admitted until it is. One admission may bring several
requests, so the count stays below this plus ``max_num_seqs``.
"""

NUM_SIZES = 8
"""``pack`` tells sizes apart by eighths of the token budget."""

MAX_GAP = 0.02
"""Share of the budget that ``pack`` would rather leave empty than prefer a smaller or later request."""

GAP_UNITS = 2048
"""Parts of the budget in which a gap is counted: exact enough, and fast for any budget."""


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
    num_overtaken: int = 0

    @property
    def work(self) -> int:
        """Token-steps still to run."""
        return self.num_tokens * self.num_steps


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's decision: ``running`` is the pack in a fixed order, ``admitted`` its newcomers."""

    running: tuple[ScheduledRequest, ...]
    admitted: tuple[ScheduledRequest, ...]


@dataclass
class _Step:
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


@dataclass
class Scheduler:
    """Admits waiting requests into the running set within a budget of tokens.

    ``pack`` sees `LOOK_AHEAD` waiting requests. It admits the largest that fits, then the next: large
    ones find room while there is some, and small ones are left for the gaps. Of about equal size, the
    earlier one goes first, and nobody is overtaken by many more than `MAX_OVERTAKEN` others. In the
    tail, when no more than what it sees is left, long chains of steps go first instead.

    Args:
        max_num_seqs: Most requests in a step, as vLLM-Omni counts them (a guided one counts once).
        max_num_batched_tokens: Most tokens in a step; a single larger request runs alone.
        policy: ``fifo`` admits strictly in order; ``pack`` looks ahead to keep steps full.
        step_execution: False admits waves that run to their end. A wave is the head of the queue
            and those like it within `LOOK_AHEAD`, under either policy.
        max_wait_s: How long a wave that has room for another waits for it (request mode).
        max_num_text_tokens: Most text tokens in a step, likewise; None is no limit of their own.
        memory_tokens: Tokens that the device has memory for; None is no limit. A step and the largest
            decode beside it share them, that of the running requests or of ``decoding_tokens``.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: Literal["fifo", "pack"] = "fifo"
    step_execution: bool = True
    max_wait_s: float = 0.0
    max_num_text_tokens: int | None = None
    memory_tokens: int | None = None
    waiting: deque[ScheduledRequest] = field(default_factory=deque)
    running: list[ScheduledRequest] = field(default_factory=list)
    no_more_requests: bool = False
    """Set by the engine when the source is dry: a wave then waits for nobody, and the tail begins."""
    decoding_tokens: int = 0
    """Set by the engine: ``decode_tokens`` of the largest image that is being decoded."""

    def add(self, entry: ScheduledRequest) -> None:
        """Appends to the queue."""
        self.waiting.append(entry)

    def remove(self, request_id: str) -> bool:
        """Takes a request out, waiting or running; False when it is neither."""
        for queue in (self.waiting, self.running):
            for entry in queue:
                if entry.request_id == request_id:
                    queue.remove(entry)
                    return True
        return False

    def upcoming(self, count: int) -> list[ScheduledRequest]:
        """The ``count`` waiting requests that are likely next, to be prepared ahead.

        Those that would join if the next to finish had left, then the others by preference.
        """
        soonest = min((entry.num_steps for entry in self.running), default=0)
        staying = [entry for entry in self.running if entry.num_steps > soonest]
        chosen = self._choose(staying) if self.step_execution else []
        return [*chosen, *_without(self._by_preference(), chosen)][:count]

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Decides the next step; empty when nothing can run now."""
        admitted = self._choose(self.running) if self.step_execution else self._choose_wave(now)
        self._take(admitted)
        self.running.extend(admitted)
        return SchedulerOutput(tuple(self.running), tuple(admitted))

    def advance(self) -> list[ScheduledRequest]:
        """Counts one step for all running requests; those that are finished leave and are returned."""
        for entry in self.running:
            entry.num_steps -= 1
        finished = [entry for entry in self.running if entry.num_steps == 0]
        self.running = [entry for entry in self.running if entry.num_steps > 0]
        return finished

    def shrink(self, max_num_batched_tokens: int) -> list[ScheduledRequest]:
        """Lowers the budget; those running beyond it go back to the head of the queue, returned."""
        self.max_num_batched_tokens = max(1, max_num_batched_tokens)
        evicted: list[ScheduledRequest] = []
        while len(self.running) > 1 and _num_tokens(self.running) > self.max_num_batched_tokens:
            evicted.append(self.running.pop())
        self.waiting.extendleft(evicted)
        return evicted

    def grow(self, most: int) -> None:
        """Doubles a lowered budget, to ``most`` at most."""
        self.max_num_batched_tokens = min(most, 2 * self.max_num_batched_tokens)

    # --- step mode ---------------------------------------------------------------------------

    def _step(self, entries: Iterable[ScheduledRequest]) -> _Step:
        text = math.inf if self.max_num_text_tokens is None else self.max_num_text_tokens
        memory = math.inf if self.memory_tokens is None else self.memory_tokens
        step = _Step(self.max_num_seqs, self.max_num_batched_tokens, text, memory, self.decoding_tokens)
        for entry in entries:
            step.add(entry)
        return step

    def _choose(self, running: list[ScheduledRequest]) -> list[ScheduledRequest]:
        """Those that may join ``running`` now."""
        step = self._step(running)
        if self.policy == "fifo":
            step.add_in_order(self.waiting)
        elif self._in_tail:
            step.add_fitting(self._half_of_rest(running, self._longest_first()))
        else:
            self._add_to_fill(step)
        return step.entries[len(running) :]

    def _by_preference(self) -> list[ScheduledRequest]:
        """The waiting requests in sight; sorting is stable, so ties keep the queue's order."""
        window = list(islice(self.waiting, LOOK_AHEAD))
        if self.policy == "fifo" or not self.step_execution:
            return window
        if self._in_tail:
            return self._longest_first()
        overdue = [entry for entry in window if _is_overdue(entry)]
        return [*overdue, *sorted(_without(window, overdue), key=self._size, reverse=True)]

    def _size(self, entry: ScheduledRequest) -> int:
        """Coarse, or else a few text tokens more would outweigh an earlier place in the queue."""
        return entry.num_tokens * NUM_SIZES // self.max_num_batched_tokens

    def _add_to_fill(self, step: _Step) -> None:
        """The overdue, then largest first; a step half empty or more looks for a better end of that."""
        is_half_empty = 2 * step.room >= step.max_num_tokens
        preferred = self._by_preference()
        num_overdue = sum(map(_is_overdue, preferred))
        if not step.add_in_order(preferred[:num_overdue]):
            return
        others = [entry for entry in preferred[num_overdue:] if step.fits(entry)]
        if is_half_empty and others:
            step.add(others.pop(0))
            others = [entry for entry in others if step.fits(entry)]
            step.add_fitting(_gapless(others, step.room, step.max_num_tokens))
        step.add_fitting(_without(others, step.entries))

    def _take(self, admitted: list[ScheduledRequest]) -> None:
        """Takes them out of the queue, whose others remember how many of them came later."""
        if not admitted:
            return
        taken = {id(entry) for entry in admitted}
        num_later, left = 0, deque[ScheduledRequest]()
        for entry in reversed(self.waiting):
            if id(entry) in taken:
                num_later += 1
            else:
                entry.num_overtaken += num_later
                left.appendleft(entry)
        self.waiting = left

    # --- the tail ----------------------------------------------------------------------------

    @property
    def _in_tail(self) -> bool:
        """Whether all that is left is in sight."""
        return self.no_more_requests and len(self.waiting) <= LOOK_AHEAD

    def _longest_first(self) -> list[ScheduledRequest]:
        """Chains that would outlast everything else first, then by size, longest chain first.

        No order among waiting requests is kept any more: they are few, and all of them are in sight.
        """
        work = sum(entry.work for entry in [*self.running, *self.waiting])
        num_steps_left = work / self.max_num_batched_tokens

        def preference(entry: ScheduledRequest) -> tuple[int, int, int]:
            outlasting = entry.num_steps if entry.num_steps >= num_steps_left else 0
            return outlasting, self._size(entry), entry.num_steps

        return sorted(self.waiting, key=preference, reverse=True)

    def _half_of_rest(
        self, running: list[ScheduledRequest], waiting: list[ScheduledRequest]
    ) -> list[ScheduledRequest]:
        """``waiting``, or those of them that make half of what is left with ``running``.

        Where chains are alike and take two steps side by side, two halves need no more steps than a
        full step and a thin rest would, and neither is thin.
        """
        alike = {(entry.batch_key, entry.num_steps) for entry in waiting}
        longest = max((entry.num_steps for entry in running), default=0)
        if len(alike) != 1 or longest > waiting[0].num_steps:
            return waiting
        step = self._step(running)
        if step.add_in_order(waiting):
            return waiting
        step = self._step(running)
        step.add_fitting(waiting, enough=_num_tokens([*running, *waiting]) / 2)
        chosen = step.entries[len(running) :]
        return chosen if self._step(()).add_in_order(_without(waiting, chosen)) else waiting

    # --- request mode ------------------------------------------------------------------------

    def _choose_wave(self, now: float) -> list[ScheduledRequest]:
        if self.running or not self.waiting:
            return []
        head, wave = self.waiting[0], self._step(())
        for entry in islice(self.waiting, LOOK_AHEAD):
            if entry.wave_key == head.wave_key and wave.fits(entry):
                wave.add(entry)
        has_room = any(wave.fits(entry) for entry in wave.entries)
        if has_room and not self.no_more_requests and now - head.arrival < self.max_wait_s:
            return []
        return wave.entries


def _num_tokens(entries: Iterable[ScheduledRequest]) -> int:
    return sum(entry.num_tokens for entry in entries)


def _without(
    entries: Iterable[ScheduledRequest], others: Iterable[ScheduledRequest]
) -> list[ScheduledRequest]:
    """By identity: equal numbers do not make two requests one."""
    left_out = {id(entry) for entry in others}
    return [entry for entry in entries if id(entry) not in left_out]


def _is_overdue(entry: ScheduledRequest) -> bool:
    return entry.num_overtaken >= MAX_OVERTAKEN


def _gapless(entries: Sequence[ScheduledRequest], room: int, max_num_tokens: int) -> list[ScheduledRequest]:
    """Of ``entries``, in order, each that leaves others behind it which can fill ``room``.

    As full as any choice could make it, but for `MAX_GAP` of ``max_num_tokens``. Where taking all that
    fits, in order, comes as close, that is the result.
    """
    unit = math.ceil(max_num_tokens / GAP_UNITS)
    units = [math.ceil(entry.num_tokens / unit) for entry in entries]
    left = max(0, room // unit)
    # Bit n of sums[i]: some of the entries from i on have n units together.
    sums = [1]
    for size in reversed(units):
        sums.append((sums[-1] | sums[-1] << size) & _lowest_bits(left))
    sums.reverse()
    wanted = _highest_bit(sums[0]) - MAX_GAP * max_num_tokens / unit
    chosen = []
    for entry, size, rest in zip(entries, units, sums[1:], strict=True):
        if size <= left and size + _highest_bit(rest & _lowest_bits(left - size)) >= wanted:
            chosen.append(entry)
            left -= size
            wanted -= size
    return chosen


def _lowest_bits(last: int) -> int:
    """Bits 0 to ``last``."""
    return (2 << last) - 1


def _highest_bit(number: int) -> int:
    return number.bit_length() - 1
