"""How much of a job has failed in other workers' hands, as its folder tells: for ``--max-failures``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from offline_diffusion.data.heartbeat import STALE_S, Heartbeat, SignWatch, read_heartbeats
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import Marker
from offline_diffusion.progress import Counts

LOOK_INTERVAL_S = 5.0
MAX_SHARE = 0.02
"""Of a worker's time, for looking: with many workers or a slow file system it looks less often."""


class FailuresElsewhere:
    """Counts what became of the shards that are not one worker's own.

    Published shards count by their markers, each read once, and those that others are at by these workers'
    last signs, once they were seen to change. So the count is up to a few seconds old, and what a worker
    drew that died is missing until its shard is taken over.

    Args:
        ledger: The open output folder.
        worker: Whose shards do not count: it knows more of them itself.
        todo: Shards that are to be made, each with the publication that is to be made again: its failures do
            not count.
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        worker: str,
        todo: Mapping[int, Marker | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger, self._worker, self._todo, self._clock = ledger, worker, todo, clock
        self._published: dict[int, tuple[int, Counts]] = {}  # by shard, with the publication's number
        self._at_others: dict[int, Counts] = {}
        self._signs = SignWatch(clock)
        self._counts, self._num_own = Counts(), -1
        self._next_look = clock()

    def count(self, own: Collection[int]) -> Counts:
        """Of all shards but a worker's own, by index, which only grow in number; seldom more than a look at
        the clock."""
        now = self._clock()
        if now < self._next_look and len(own) == self._num_own:
            return self._counts
        if now >= self._next_look:
            self._read_new_markers()
            self._read_signs()
            self._next_look = now + max(LOOK_INTERVAL_S, (self._clock() - now) / MAX_SHARE)
        mine = set(own)
        done = {index: counts for index, (_, counts) in self._published.items()}
        others = (counts for index, counts in (self._at_others | done).items() if index not in mine)
        self._counts, self._num_own = sum(others, Counts()), len(own)
        return self._counts

    def _read_signs(self) -> None:
        self._at_others = {
            index: Counts(shard.num_ok, shard.num_failed)
            for beat in read_heartbeats(self._ledger.out)
            if beat.worker != self._worker and self._is_at_work(beat)
            for index, shard in beat.shards.items()
        }

    def _is_at_work(self, beat: Heartbeat) -> bool:
        seen = self._signs.note(beat.worker, beat.count)
        return beat.may_run and seen.has_changed and seen.silent_s < STALE_S

    def _read_new_markers(self) -> None:
        for index, number in self._ledger.numbers().items():
            known = self._published.get(index)
            if known is not None and known[0] == number:
                continue
            if (marker := self._ledger.marker(self._ledger.shards[index])) is not None:
                is_made_again = marker == self._todo.get(index)
                counts = Counts(marker.num_ok, marker.num_failed, marker.num_invalid_rows)
                self._published[index] = number, Counts() if is_made_again else counts
