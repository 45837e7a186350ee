"""Who runs in the next step. Free of torch; ``schedule()`` is deterministic.

One class serves all execution modes: in step mode requests join and leave between steps; in
request mode a wave of like requests is admitted together and runs to its end. Serial execution is
``max_num_seqs=1`` in either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

LOOK_AHEAD = 256
"""Waiting requests that ``pack`` considers, and that may be prepared ahead."""

MAX_BYPASSED = 16
"""Schedules in which others may pass the head of the queue before it must be the next to run."""


@dataclass(slots=True)
class ScheduledRequest:
    """What the scheduler knows of a request.

    Args:
        request_id: Unique among the requests at hand.
        num_tokens: Image and text tokens of all its sequences: its share of the token budget.
        num_steps: Denoise steps still to run.
        batch_key: Only equal keys share a step.
        wave_key: Only equal keys share a wave in request mode.
        arrival: Seconds on the engine's clock; the admission window counts from here.
    """

    request_id: str
    num_tokens: int
    num_steps: int
    batch_key: Hashable = None
    wave_key: Hashable = None
    arrival: float = 0.0

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
class Scheduler:
    """Admits waiting requests into the running set within a token budget.

    Args:
        max_num_seqs: Most requests in a step, as vLLM-Omni counts them (a guided one counts once).
        max_num_batched_tokens: Most tokens in a step; a single larger request runs alone.
        policy: ``fifo`` admits strictly in order; ``pack`` looks ahead and takes, of what fits,
            the most work first, so that steps are full and the tail is short. The head of the
            queue is passed at most `MAX_BYPASSED` times.
        step_execution: False admits waves that run to their end. A wave is the head of the queue
            and those like it within `LOOK_AHEAD`, under either policy.
        max_wait_s: How long a wave that has room for another waits for it (request mode).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: Literal["fifo", "pack"] = "fifo"
    step_execution: bool = True
    max_wait_s: float = 0.0
    waiting: deque[ScheduledRequest] = field(default_factory=deque)
    running: list[ScheduledRequest] = field(default_factory=list)
    no_more_requests: bool = False
    """Set by the engine when the source is dry: a wave then waits for nobody."""
    _num_bypassed: int = 0

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
        """The ``count`` waiting requests that are likely next, to be prepared ahead."""
        return self._candidates()[:count]

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Decides the next step; empty when nothing can run now."""
        admitted = self._admit_to_step() if self.step_execution else self._admit_wave(now)
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
        while len(self.running) > 1 and self._num_running_tokens() > self.max_num_batched_tokens:
            evicted.append(self.running.pop())
        self.waiting.extendleft(evicted)
        return evicted

    # --- admission ---------------------------------------------------------------------------

    def _num_running_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.running)

    def _admit_to_step(self) -> list[ScheduledRequest]:
        admitted: list[ScheduledRequest] = []
        room = self.max_num_batched_tokens - self._num_running_tokens()
        key = self.running[0].batch_key if self.running else None
        for entry in self._candidates():
            if len(self.running) + len(admitted) >= self.max_num_seqs:
                break
            alone = not self.running and not admitted
            if alone:
                key = entry.batch_key
            if entry.batch_key == key and (alone or entry.num_tokens <= room):
                admitted.append(entry)
                room -= entry.num_tokens
            elif self._must_not_be_passed(entry):
                break
        self._take(admitted)
        return admitted

    def _candidates(self) -> list[ScheduledRequest]:
        """In the order of preference; sorting is stable, so ties keep the queue's order."""
        if self.policy == "fifo" or not self.step_execution:
            return list(islice(self.waiting, self.max_num_seqs))
        window = list(islice(self.waiting, LOOK_AHEAD))
        if self._num_bypassed >= MAX_BYPASSED:
            return window[:1] + sorted(window[1:], key=lambda entry: -entry.work)
        return sorted(window, key=lambda entry: -entry.work)

    def _must_not_be_passed(self, entry: ScheduledRequest) -> bool:
        is_head = entry is self.waiting[0]
        return self.policy == "fifo" or (is_head and self._num_bypassed >= MAX_BYPASSED)

    def _take(self, admitted: list[ScheduledRequest]) -> None:
        if not admitted:
            return
        head_waits = all(entry is not self.waiting[0] for entry in admitted)
        self._num_bypassed = self._num_bypassed + 1 if head_waits else 0
        taken = {id(entry) for entry in admitted}
        self.waiting = deque(entry for entry in self.waiting if id(entry) not in taken)

    def _admit_wave(self, now: float) -> list[ScheduledRequest]:
        if self.running or not self.waiting:
            return []
        head, room = self.waiting[0], self.max_num_batched_tokens
        wave: list[ScheduledRequest] = []
        for entry in islice(self.waiting, LOOK_AHEAD):
            fits = entry.num_tokens <= room or not wave
            if (entry.batch_key, entry.wave_key) == (head.batch_key, head.wave_key) and fits:
                wave.append(entry)
                room -= entry.num_tokens
            if len(wave) == self.max_num_seqs:
                break
        has_room = len(wave) < self.max_num_seqs and room >= min(entry.num_tokens for entry in wave)
        if has_room and not self.no_more_requests and now - head.arrival < self.max_wait_s:
            return []
        self._take(wave)
        return wave
