"""Scheduling policies: who of the waiting joins the next step. Free of torch.

A policy is one small class: `Policy.order` says who is wanted most, `Policy.fill` takes of them what fits.
Which requests may share a step at all is not its business: that is their ``batch_key``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from offline_diffusion.config import SchedulingPolicy
from offline_diffusion.engine.admission import ScheduledRequest, Step, sum_tokens, without

LOOK_AHEAD = 256
"""Waiting requests that ``pack`` and waves in order of arrival consider, and that a job keeps waiting."""

MAX_OVERTAKEN = 192
"""Later requests that may be admitted before a waiting one; under half a shard of the default size.

Then it is overdue: nothing behind it is admitted until it is. One admission may bring several
requests, so the count stays below this plus ``max_num_seqs``.
"""

NUM_SIZES = 8
"""``pack`` tells sizes apart by eighths of the token budget."""

MAX_GAP = 0.02
"""Share of the budget that ``pack`` would rather leave empty than prefer a smaller or later request."""

GAP_UNITS = 2048
"""Parts of the budget in which a gap is counted: exact enough, and fast for any budget."""


@dataclass(frozen=True, slots=True)
class Queues:
    """What a policy sees.

    Args:
        waiting: In order of arrival.
        running: Those that stay in the step.
        now: Seconds on the engine's clock.
        is_open: Whether more requests may come.
        max_num_batched_tokens: Token budget of a step.
        new_step: Makes a step that holds these.
    """

    waiting: Sequence[ScheduledRequest]
    running: Sequence[ScheduledRequest]
    now: float
    is_open: bool
    max_num_batched_tokens: int
    new_step: Callable[[Iterable[ScheduledRequest]], Step]

    @property
    def window(self) -> list[ScheduledRequest]:
        """The waiting requests in sight, in order of arrival."""
        return list(islice(self.waiting, LOOK_AHEAD))

    @property
    def in_tail(self) -> bool:
        """Whether all that is left is in sight."""
        return not self.is_open and len(self.waiting) <= LOOK_AHEAD


class Policy:
    """Base of all: the order of arrival."""

    is_strict = False
    """Whether nobody is admitted before an earlier one that cannot be."""

    def order(self, queues: Queues) -> list[ScheduledRequest]:
        """The waiting requests in sight, the most wanted first."""
        return queues.window

    def wave_order(self, queues: Queues) -> list[ScheduledRequest]:
        """Likewise in request mode: the first one begins the next wave, and those like it join in order."""
        return self.order(queues)

    def fill(self, step: Step, queues: Queues) -> None:
        """Adds to ``step`` those that may join now."""
        raise NotImplementedError


class Fifo(Policy):
    """Strictly in order of arrival: whoever does not fit holds up all behind it."""

    is_strict = True

    def fill(self, step: Step, queues: Queues) -> None:
        """All in order, in sight or not, until one does not fit."""
        step.add_in_order(queues.waiting)


class AgingPolicy(Policy):
    """Orders all by `preference`; nobody is overtaken by many more than `MAX_OVERTAKEN` later ones.

    The overdue go first, in order of arrival, and keep what room there is until they fit.
    """

    def in_sight(self, queues: Queues) -> list[ScheduledRequest]:
        """The waiting requests that it orders, in order of arrival."""
        return list(queues.waiting)

    def preference(self, entry: ScheduledRequest, queues: Queues) -> tuple[float, ...]:
        """Smaller is wanted more; equals keep their order of arrival."""
        raise NotImplementedError

    def order(self, queues: Queues) -> list[ScheduledRequest]:
        in_sight = self.in_sight(queues)
        overdue = [entry for entry in in_sight if is_overdue(entry)]
        others = without(in_sight, overdue)
        return [*overdue, *sorted(others, key=lambda entry: self.preference(entry, queues))]

    def fill(self, step: Step, queues: Queues) -> None:
        """The overdue until one does not fit, then whoever does."""
        order = self.order(queues)
        num_overdue = sum(map(is_overdue, order))
        if step.add_in_order(order[:num_overdue]):
            step.add_fitting(order[num_overdue:])


class Shortest(AgingPolicy):
    """Least work first, but the longer one waits the more of it is forgiven: highest response ratio next.

    A request's place is its waiting time over its work (Brinch Hansen, 1971): among those that came together
    the shortest goes first, and the longest comes to its turn in time proportional to its work.
    """

    def preference(self, entry: ScheduledRequest, queues: Queues) -> tuple[float, ...]:
        waited = max(0.0, queues.now - entry.arrival)
        return -waited / entry.work, entry.work


class Deadline(AgingPolicy):
    """Earliest deadline first. One that has passed is lost and counts as none: others can still be kept.

    Requests without a deadline share what room is left, in order of arrival.
    """

    def preference(self, entry: ScheduledRequest, queues: Queues) -> tuple[float, ...]:
        can_be_kept = queues.now <= entry.deadline < math.inf
        return (0, entry.deadline) if can_be_kept else (1, 0)


class Pack(AgingPolicy):
    """Keeps steps full: the largest that fits, then the next; small ones are left for the gaps.

    Of about equal size, the earlier one goes first. In the tail, when no more than what is in sight is left,
    long chains of steps go first instead.
    """

    def in_sight(self, queues: Queues) -> list[ScheduledRequest]:
        return queues.window

    def preference(self, entry: ScheduledRequest, queues: Queues) -> tuple[float, ...]:
        return (-_size(entry, queues),)

    def order(self, queues: Queues) -> list[ScheduledRequest]:
        return _longest_first(queues) if queues.in_tail else super().order(queues)

    def wave_order(self, queues: Queues) -> list[ScheduledRequest]:
        """A wave is of like requests: no order of them fills it better."""
        return queues.window

    def fill(self, step: Step, queues: Queues) -> None:
        if queues.in_tail:
            step.add_fitting(_half_of_rest(queues, _longest_first(queues)))
        else:
            self._add_to_fill(step, queues)

    def _add_to_fill(self, step: Step, queues: Queues) -> None:
        """The overdue, then largest first; a step half empty or more looks for a better end of that."""
        is_half_empty = 2 * step.room >= step.max_num_tokens
        preferred = self.order(queues)
        num_overdue = sum(map(is_overdue, preferred))
        if not step.add_in_order(preferred[:num_overdue]):
            return
        others = [entry for entry in preferred[num_overdue:] if step.fits(entry)]
        if is_half_empty and others:
            step.add(others.pop(0))
            others = [entry for entry in others if step.fits(entry)]
            step.add_fitting(_gapless(others, step.room, step.max_num_tokens))
        step.add_fitting(without(others, step.entries))


POLICIES: Mapping[SchedulingPolicy, type[Policy]] = {
    "fifo": Fifo,
    "pack": Pack,
    "shortest": Shortest,
    "deadline": Deadline,
}


def is_overdue(entry: ScheduledRequest) -> bool:
    """Whether enough later ones have been admitted before it."""
    return entry.num_overtaken >= MAX_OVERTAKEN


# --- pack -----------------------------------------------------------------------------------------


def _size(entry: ScheduledRequest, queues: Queues) -> int:
    """Coarse, or else a few text tokens more would outweigh an earlier place in the queue."""
    return entry.num_tokens * NUM_SIZES // queues.max_num_batched_tokens


def _longest_first(queues: Queues) -> list[ScheduledRequest]:
    """Chains that would outlast everything else first, then by size, longest chain first.

    No order among waiting requests is kept any more: they are few, and all of them are in sight.
    """
    work = sum(entry.work for entry in [*queues.running, *queues.waiting])
    num_steps_left = work / queues.max_num_batched_tokens

    def preference(entry: ScheduledRequest) -> tuple[int, int, int]:
        outlasting = entry.num_steps if entry.num_steps >= num_steps_left else 0
        return outlasting, _size(entry, queues), entry.num_steps

    return sorted(queues.waiting, key=preference, reverse=True)


def _half_of_rest(queues: Queues, waiting: list[ScheduledRequest]) -> list[ScheduledRequest]:
    """``waiting``, or those of them that make half of what is left with the running.

    Where chains are alike and take two steps side by side, two halves need no more steps than a
    full step and a thin rest would, and neither is thin.
    """
    running = queues.running
    alike = {(entry.batch_key, entry.num_steps) for entry in waiting}
    longest = max((entry.num_steps for entry in running), default=0)
    if len(alike) != 1 or longest > waiting[0].num_steps:
        return waiting
    step = queues.new_step(running)
    if step.add_in_order(waiting):
        return waiting
    step = queues.new_step(running)
    step.add_fitting(waiting, enough=sum_tokens([*running, *waiting]) / 2)
    chosen = step.entries[len(running) :]
    return chosen if queues.new_step(()).add_in_order(without(waiting, chosen)) else waiting


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
