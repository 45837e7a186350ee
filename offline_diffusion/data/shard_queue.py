"""The shards of a job as one worker draws them: its own share, then what is free, then what the dead left.

All workers of an output folder draw from what is the same queue: claims (`claims`) keep them apart.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from offline_diffusion.data.claims import Claims, Newest, OwnerWatch, Verdict
from offline_diffusion.data.deaths import record_death
from offline_diffusion.data.layout import Shard, StagedFolder, generation_of, stem_of
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.partial import newest_generation

LOOK_INTERVAL_S = 1.0
"""Between two looks at the shards of other workers."""

PARK_S = 20.0
"""A job that is asked to stop spends no more on leaving its work for other machines."""

REMOTE_STALE_S = 120.0
"""`heartbeat.STALE_S` where signs go over a network, which may fail for a while."""

REMOTE_FRESH_S = 4.0
"""A worker's sign is not asked for more often: there it is renewed every `storage.LIST_INTERVAL_S`."""


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
        self._watch = watch or owner_watch(ledger, claims.job_id)
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

    def watching(self) -> AbstractContextManager[None]:
        """Inside, owners are watched also while nobody asks for a shard; see `OwnerWatch.watching`."""
        return self._watch.watching()

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

    def clear_leftovers(self, published: Mapping[int, Marker]) -> None:
        """Deletes what crashes left: claims of what is published, files of this worker's share, and what the
        dead have staged.

        Only where nobody is at work.

        Args:
            published: What was published before this worker began, by shard.
        """
        shards = self._ledger.shards
        self._ledger.publications.drop_of_the_dead(self._is_gone)  # while claims tell whose it is
        # Looked at before the claims: whoever made one of these has claimed by then.
        leftovers = self._ledger.leftovers()
        newest = self._claims.newest()
        claimed = newest.keys() & published.keys() - self._todo.keys()
        gone = [index for index in claimed if self._judge(index, newest) == "dead"]
        self._claims.remove([(shards[index], newest.pop(index).generation) for index in gone])
        mine = [index for index in self._share if self._todo.get(index) is None]
        idle = {shards[index].stem: index for index in mine if self._judge(index, newest) == "dead"}
        # A retry goes on from what an earlier one has made, and another worker may begin one at any time: of
        # what can be retried only that goes which was made before its publication.
        published_by = {
            stem: published[index].generation
            for stem, index in idle.items()
            if index in published and published[index].has_failures
        }
        old = [
            path
            for path in leftovers
            if generation_of(path.name) <= published_by.get(stem_of(path.name), sys.maxsize)
        ]
        self._ledger.clear_leftovers([shards[index] for index in idle.values()], old)

    def _is_gone(self, staged: StagedFolder) -> bool:
        shard = self._ledger.shards[staged.shard]
        return self._watch.is_gone(self._claims.read(shard, staged.generation))

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

    def let_go(self, is_open: Callable[[int], bool]) -> None:
        """Drops the claims of shards that are done; one that was lost is another worker's from now on.

        Args:
            is_open: Whether a shard, by index, is still made or published here. Its marker does not tell:
                its files are moved after that.
        """
        done = [self._ours.pop(index) for index in list(self._ours) if not is_open(index)]
        published = [each for each in done if self._is_published(each.shard.index)]
        self._claims.remove(published)
        self._held |= {each.shard.index: "unsure" for each in done if each not in published}

    def park(self) -> None:
        """Leaves what was made of unfinished shards for other machines, as far as time allows."""
        until = time.monotonic() + PARK_S
        for claimed in self._ours.values():
            if not self._is_published(claimed.shard.index):
                self._ledger.park(claimed.shard, until=until)

    def close(self) -> None:
        """Lets go of every shard that was ours, when none is open any more; others may take it at once."""
        newest = self._claims.newest()
        for index, claimed in list(self._ours.items()):
            owner = newest.get(index, Newest(-1, False))
            if owner.generation <= claimed.generation and not self._is_published(index):
                self._claims.release(*self._ours.pop(index))
        self.let_go(lambda _: False)

    def _pass_on(self) -> None:
        if self._own:
            self.num_rows_ahead -= self._ledger.shards[self._own.popleft()].num_rows
        else:
            self._others.popleft()

    def _claim(self, index: int, newest: Mapping[int, Newest] | None = None) -> ClaimedShard | None:
        """Claims a shard unless it is published or somebody's; that is noted.

        Args:
            index: Of the shard.
            newest: The claims, where they were just listed; by an old listing nobody gets a shard.
        """
        if self._seems_published(index):
            self._held.pop(index, None)
            return None
        newest = self._claims.newest() if newest is None else newest
        generation = self._next_generation(index, newest)
        shard = self._ledger.shards[index]
        if generation is not None:
            # What others left may be of a later generation than the claims.
            self._ledger.unpark(shard)
            generation = max(generation, newest_generation(self._ledger.partials, shard.stem) + 1)
        if generation is None or not self._claims.create(shard, generation):
            self._held.setdefault(index, "unsure")
            return None
        if (owner := newest.get(index)) is not None and not owner.released:
            claim = self._claims.read(shard, owner.generation)
            is_of_this_job = claim.job_id == self._claims.job_id  # another one's may be alive
            # One that ended in good order may not have cleared up yet.
            if is_of_this_job and not self._watch.has_ended(claim):
                record_death(self._ledger.out, claim.worker)
        self._held.pop(index, None)
        self._ledger.refresh(shard)
        if self._is_published(index):  # since the last look
            self._claims.remove([(shard, generation)])
            return None
        self._ours[index] = ClaimedShard(shard, generation)
        self.taken.append(index)
        return self._ours[index]

    def _next_generation(self, index: int, newest: Mapping[int, Newest]) -> int | None:
        """The generation that may claim a shard now; None while its owner may be at work, which is noted."""
        verdict = self._judge(index, newest)
        if verdict != "dead":
            self._held[index] = verdict
            return None
        claimed = newest[index].generation if index in newest else -1
        # Above those too whose claims are gone, but not what they have made.
        made = newest_generation(self._ledger.partials, self._ledger.shards[index].stem)
        published = self._todo.get(index)
        return max(claimed, made, -1 if published is None else published.generation) + 1

    def _judge(self, index: int, newest: Mapping[int, Newest]) -> Verdict:
        """What is known of a shard's owner; where it has none or was let go, ``dead``."""
        owner = newest.get(index)
        if owner is None or owner.released:
            return "dead"
        return self._watch.judge(self._claims.read(self._ledger.shards[index], owner.generation))

    def _is_published(self, index: int) -> bool:
        """Whether a shard was published since this worker began."""
        return self._ledger.marker(self._ledger.shards[index]) != self._todo[index]

    def _seems_published(self, index: int) -> bool:
        """As ``_is_published``, cheaper by a listing that may be a second old."""
        if self._clock() >= self._next_listing:
            self._published = self._ledger.published()
            self._next_listing = self._clock() + LOOK_INTERVAL_S
        return index in self._published if self._todo[index] is None else self._is_published(index)

    def _look_at_others(self) -> ClaimedShard | None:
        if not self._held or self._clock() < self._next_look:
            return None
        newest = self._claims.newest()  # one listing for all of them
        claims = (self._claim(index, newest) for index in sorted(self._held))
        found = next(filter(None, claims), None)
        self._next_look = self._clock() + LOOK_INTERVAL_S  # not where there was no space for a claim
        return found


def claims_of(ledger: Ledger, *, worker: str, task: int) -> Claims:
    """The claims of an output, as one worker sees and makes them."""
    return Claims(ledger.out, worker=worker, task=task, job_id=ledger.job.job_id, files=ledger.files)


def owner_watch(ledger: Ledger, job_id: str) -> OwnerWatch:
    """Watches the owners of an output's shards; on object storage with more patience: signs come seldom."""
    if ledger.remote is None:
        return OwnerWatch(ledger.out, job_id)
    return OwnerWatch(
        ledger.out,
        job_id,
        stale_s=REMOTE_STALE_S,
        files=ledger.files,
        max_gap_s=REMOTE_STALE_S / 2,
        fresh_s=REMOTE_FRESH_S,
    )


def _dearest_first(shards: Iterable[int], costs: Sequence[float]) -> list[int]:
    return sorted(shards, key=lambda index: (-costs[index], index))
