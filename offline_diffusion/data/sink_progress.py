"""How far a sink is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkProgress:
    """What a sink has done since it was made.

    Args:
        num_ok, num_failed: Images handed in and written.
        num_recovered: Images that need not be made again, in the shards opened.
        num_invalid_rows: Quarantined rows in the shards published.
        num_shards: Shards published, or found published when opened.
        num_lost_shards: Shards that another process published or took over; not counted above.
        num_pending: Images handed in but not written.
    """

    num_ok: int = 0
    num_failed: int = 0
    num_recovered: int = 0
    num_invalid_rows: int = 0
    num_shards: int = 0
    num_lost_shards: int = 0
    num_pending: int = 0
