"""The shards of a job as one worker draws them: its own share, then what is free, then what the dead left.

All workers of an output folder draw from what is the same queue: claims (`claims`) keep them apart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from offline_diffusion.data.claims import Claims, Newest, OwnerWatch, Verdict
from offline_diffusion.data.deaths import record_death
from offline_diffusion.data.layout import Shard
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.partial import partial_paths

LOOK_INTERVAL_S = 1.0
"""Between two looks at the shards of other workers."""


class ClaimedShard(NamedTuple):
    """A shard that is ours, and the generation of its owner that we are."""

    shard: Shard
    generation: int


class ShardQueue:
    """Claims one shard after the other for one worker. Not thread-safe.

    Args:
        ledger: The open output folder.
        claims: Of this worker.
        todo: The shards to make, by index, each with the marker of the publication that is to be made
            again; None for what was never published.
        share: Shards of this worker's task, by index; those not in ``todo`` are passed over.
        costs: A cost for each shard of the job.
        ascending: Take other tasks' shards in order, for manifests that cannot be read in jumps;
            otherwise the dearest first.
        watch: Judges other owners.
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        claims: Claims,
        *,
        todo: Mapping[int, Marker | None],
        share: Collection[int],
        costs: Sequence[float],
        ascending: bool = False,
        watch: OwnerWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger, self._claims, self._todo, self._clock = ledger, claims, todo, clock
        self._watch = watch or OwnerWatch(ledger.out, claims.job_id)
        self._share = list(share)
        own = todo.keys() & self._share
        others = todo.keys() - own
        self._own = deque(sorted(own))
        self._others = deque(sorted(others) if ascending else _dearest_first(others, costs))
        self._held: dict[int, Verdict] = {}  # shards of other workers, and what is known of these
        self._ours: dict[int, ClaimedShard] = {}
        self._published: set[int] = set()
        self._next_listing = self._next_look = clock()
        self.taken: list[int] = []
        """Shards that were ours at some time, in the order in which they were claimed."""
        self.num_rows_ahead = sum(ledger.shards[index].num_rows for index in own)
        """Rows of this worker's share that were not come to yet."""

    @property
    def is_helping(self) -> bool:
        """Whether the next shard is of another worker's share."""
        return not self._own and bool(self._others)

    @property
    def num_left_to_others(self) -> int:
        """Shards that other workers have and have not published."""
        return sum(not self._is_published(index) for index in self._held)

    @property
    def is_open(self) -> bool:
        """Whether `take` may still come up with a shard: some are left, or an owner may be dead."""
        return bool(self._own or self._others) or any(known != "alive" for known in self._held.values())

    def take(self) -> ClaimedShard | None:
        """Claims the next shard.

        Returns:
            None when there is none just now; ask again while ``is_open``.

        Raises:
            DiskFullError: There is no space for a claim; it may be tried again.
            JobError: The output folder cannot be written.
        """
        while self._own or self._others:
            claimed = self._claim((self._own or self._others)[0])
            self._pass_on()
            if claimed is not None:
                return claimed
        return self._look_at_others()

    def clear_leftovers(self, published: Collection[int]) -> None:
        """Deletes what crashes left: claims of what is published, and files of this worker's share.

        Only where nobody is at work.

        Args:
            published: Shards that were published before this worker began, by index.
        """
        newest = self._claims.newest()
        for index in newest.keys() & set(published) - self._todo.keys():
            if self._next_generation(index, newest) is not None:
                self._claims.remove(self._ledger.shards[index], newest.pop(index).generation)
            self._held.pop(index, None)
        # What an earlier retry has made of a published shard is not for throwing away.
        mine = [index for index in self._share if self._todo.get(index) is None]
        idle = [n for n in mine if n not in newest or self._next_generation(n, newest) is not None]
        for index in mine:
            if index not in self._todo:
                self._held.pop(index, None)
        self._ledger.clear_leftovers(self._ledger.shards[index] for index in idle)

    def has_work(self) -> bool | None:
        """Whether a shard could be claimed now; claims nothing. None while an owner may be dead."""
        newest = self._claims.newest()
        found: bool | None = False
        for index in (*self._own, *self._others):
            if self._seems_published(index):
                continue
            if self._next_generation(index, newest) is not None:
                return True
            if self._held[index] != "alive":
                found = None
        return found

    def close(self) -> None:
        """Lets go of every shard that is ours and not published; others may take it at once."""
        self._let_go_of_published()
        for claimed in self._ours.values():
            self._claims.release(*claimed)
        self._ours.clear()

    def _pass_on(self) -> None:
        if self._own:
            self.num_rows_ahead -= self._ledger.shards[self._own.popleft()].num_rows
        else:
            self._others.popleft()

    def _claim(self, index: int) -> ClaimedShard | None:
        """Claims a shard unless it is published or somebody's; that is noted."""
        if self._seems_published(index):
            self._held.pop(index, None)
            return None
        newest = self._claims.newest()
        generation = self._next_generation(index, newest)
        shard = self._ledger.shards[index]
        if generation is None or not self._claims.create(shard, generation):
            self._held.setdefault(index, "unsure")
            return None
        if (owner := newest.get(index)) is not None and not owner.released:
            record_death(self._ledger.out, self._claims.read(shard, owner.generation).worker)
        self._held.pop(index, None)
        if self._is_published(index):  # since the last look
            self._claims.remove(shard, generation)
            return None
        self._let_go_of_published()
        self._ours[index] = ClaimedShard(shard, generation)
        self.taken.append(index)
        return self._ours[index]

    def _next_generation(self, index: int, newest: Mapping[int, Newest]) -> int | None:
        """The generation that may claim a shard now; None while its owner may be at work."""
        owner, shard = newest.get(index), self._ledger.shards[index]
        if owner is not None and not owner.released:
            verdict = self._watch.judge(self._claims.read(shard, owner.generation))
            if verdict != "dead":
                self._held[index] = verdict
                return None
        # Above those too whose claims are gone, but not what they have made.
        partials = partial_paths(self._ledger.partials, shard.stem)
        made = (int(path.name.split(".")[1].split("-")[0]) for path in partials)
        return max([-1 if owner is None else owner.generation, *made]) + 1

    def _is_published(self, index: int) -> bool:
        """Whether a shard was published since this worker began."""
        return self._ledger.marker(self._ledger.shards[index]) != self._todo[index]

    def _seems_published(self, index: int) -> bool:
        """As ``_is_published``, cheaper by a listing that may be a second old."""
        if self._todo[index] is not None:
            return self._is_published(index)
        if self._clock() >= self._next_listing:
            self._published = self._ledger.published()
            self._next_listing = self._clock() + LOOK_INTERVAL_S
        return index in self._published

    def _let_go_of_published(self) -> None:
        for index in [index for index in self._ours if self._is_published(index)]:
            self._claims.remove(*self._ours.pop(index))

    def _look_at_others(self) -> ClaimedShard | None:
        if not self._held or self._clock() < self._next_look:
            return None
        found = next(filter(None, map(self._claim, sorted(self._held))), None)
        self._next_look = self._clock() + LOOK_INTERVAL_S  # not where there was no space for a claim
        return found


def _dearest_first(shards: Iterable[int], costs: Sequence[float]) -> list[int]:
    return sorted(shards, key=lambda index: (-costs[index], index))
