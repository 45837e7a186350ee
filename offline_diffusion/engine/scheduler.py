"""Who runs in the next step. Free of torch; ``schedule()`` is deterministic.

One class serves all execution modes: in step mode requests join and leave between steps; in
request mode a wave of like requests is admitted together and runs to its end. Serial execution is
``max_num_seqs=1`` in either.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from offline_diffusion.config import EngineConfig, SchedulingPolicy
from offline_diffusion.engine.admission import ScheduledRequest, Step, sum_tokens, without
from offline_diffusion.engine.policies import LOOK_AHEAD, POLICIES, Queues

__all__ = ["LOOK_AHEAD", "ScheduledRequest", "Scheduler", "SchedulerOutput"]


TEXT_SHARE, MIN_TEXT_TOKENS = 0.25, 4_096
"""Of the token budget, and at least: what text may take. Text has weights of its own, whose products are at
their full rate with so many rows; the rest of a step is the images'."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's decision: ``running`` is the pack in a fixed order, ``admitted`` its newcomers."""

    running: tuple[ScheduledRequest, ...]
    admitted: tuple[ScheduledRequest, ...]


@dataclass
class Scheduler:
    """Admits waiting requests into the running set within a budget of tokens.

    Args:
        max_num_seqs: Most requests in a step, as vLLM-Omni counts them (a guided one counts once).
        max_num_batched_tokens: Most tokens in a step; a single larger request runs alone.
        policy: Who goes first; see `engine.policies`.
        step_execution: False admits waves that run to their end. A wave is whoever the policy wants most
            and those like it, under ``fifo`` up to the first that is not.
        max_wait_s: How long a wave that has room for another waits for it (request mode): until the oldest
            request of the queue, in the wave or not, has waited so long.
        max_num_text_tokens: Most text tokens in a step, likewise; None is no limit of their own.
        memory_tokens: Tokens that the device has memory for; None is no limit. A step and the largest
            decode beside it share them, that of the running requests or of ``decoding_tokens``.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: SchedulingPolicy = "fifo"
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

    @classmethod
    def of(
        cls, config: EngineConfig, max_num_batched_tokens: int, memory_tokens: int | None = None
    ) -> Scheduler:
        """That of an engine with these options, whose budget and memory were measured."""
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=config.scheduling_policy,
            step_execution=config.step_execution,
            max_wait_s=config.request_batch_max_wait_ms / 1000,
            max_num_text_tokens=max(MIN_TEXT_TOKENS, int(max_num_batched_tokens * TEXT_SHARE)),
            memory_tokens=memory_tokens,
        )

    def __post_init__(self) -> None:
        self._policy = POLICIES[self.policy]()
        self._now = 0.0

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
        queues = self._queues(self.running)
        if not self.step_execution:
            return self._policy.wave_order(queues)[:count]
        soonest = min((entry.num_steps for entry in self.running), default=0)
        chosen = self._choose([entry for entry in self.running if entry.num_steps > soonest])
        return [*chosen, *without(self._policy.order(queues), chosen)][:count]

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Decides the next step; empty when nothing can run now. ``now``: seconds on the engine's clock."""
        self._now = now
        admitted = self._choose(self.running) if self.step_execution else self._choose_wave()
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
        while len(self.running) > 1 and sum_tokens(self.running) > self.max_num_batched_tokens:
            evicted.append(self.running.pop())
        self.waiting.extendleft(evicted)
        return evicted

    def grow(self, most: int) -> None:
        """Doubles a lowered budget, to ``most`` at most."""
        self.max_num_batched_tokens = min(most, 2 * self.max_num_batched_tokens)

    # --- who joins ---------------------------------------------------------------------------

    def _queues(self, running: list[ScheduledRequest]) -> Queues:
        return Queues(
            self.waiting,
            running,
            now=self._now,
            is_open=not self.no_more_requests,
            max_num_batched_tokens=self.max_num_batched_tokens,
            new_step=self._step,
        )

    def _step(self, entries: Iterable[ScheduledRequest]) -> Step:
        text = math.inf if self.max_num_text_tokens is None else self.max_num_text_tokens
        memory = math.inf if self.memory_tokens is None else self.memory_tokens
        step = Step(self.max_num_seqs, self.max_num_batched_tokens, text, memory, self.decoding_tokens)
        for entry in entries:
            step.add(entry)
        return step

    def _choose(self, running: list[ScheduledRequest]) -> list[ScheduledRequest]:
        """Those that may join ``running`` now."""
        step = self._step(running)
        self._policy.fill(step, self._queues(running))
        return step.entries[len(running) :]

    def _choose_wave(self) -> list[ScheduledRequest]:
        """The next wave, when none runs and it has waited for company as long as it may."""
        if self.running or not self.waiting:
            return []
        wave, is_closed = self._step(()), self.no_more_requests
        for entry in self._policy.wave_order(self._queues([])):
            if (not wave.entries or entry.wave_key == wave.entries[0].wave_key) and wave.fits(entry):
                wave.add(entry)
            elif self._policy.is_strict:
                is_closed = True
                break
        has_room = any(map(wave.fits, wave.entries))
        waited = self._now - min(entry.arrival for entry in self.waiting)  # of all: preferences change
        return [] if has_room and not is_closed and waited < self.max_wait_s else wave.entries

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
