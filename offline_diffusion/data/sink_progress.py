"""How far a sink is, and how fast."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

RATE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkProgress:
    """What a sink has done since it was made.

    Args:
        num_ok, num_failed: Images handed in and written.
        num_recovered: Images that need not be made again, in the shards opened.
        num_invalid_rows: Quarantined rows in the shards published.
        num_shards: Shards published, or found published when opened.
        num_lost_shards: Shards that another process published or took over; not counted above.
        num_pending: Images handed in but not written, and shards that wait for their publication.
    """

    num_ok: int = 0
    num_failed: int = 0
    num_recovered: int = 0
    num_invalid_rows: int = 0
    num_shards: int = 0
    num_lost_shards: int = 0
    num_pending: int = 0


class RecentRate:
    """Images a second over the last minute, or since it was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._counted_at: deque[float] = deque()

    def count(self) -> None:
        """One more, now."""
        self._counted_at.append(time.monotonic())

    @property
    def per_s(self) -> float:
        now = time.monotonic()
        while self._counted_at and self._counted_at[0] < now - RATE_WINDOW_S:
            self._counted_at.popleft()
        return len(self._counted_at) / min(RATE_WINDOW_S, max(1e-3, now - self._started))
