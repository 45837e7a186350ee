"""What a run came to. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.scan import ManifestIndex
from offline_diffusion.data.status import status_of
from offline_diffusion.progress import Tally

if TYPE_CHECKING:
    from offline_diffusion.engine.cost import MeasuredCost


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """What a task did. Counts are of this task's share and of what else it took, earlier runs and the
    help of other workers included; ``seconds``, ``images_per_s`` and ``cost`` are of this run, ``cost``
    None when it drew too little to tell; ``profile`` is what ``--profile`` measured, see
    ``engine.profile``."""

    out: Path | str
    num_rows: int
    num_images: int
    num_ok: int
    num_failed: int
    num_quarantined_rows: int
    num_resumed: int
    num_shards: int
    seconds: float
    images_per_s: float
    interrupted: bool
    warnings: list[str]
    cost: MeasuredCost | None = None
    profile: dict[str, Any] | None = None


def summary_of_task(
    ledger: Ledger,
    index: ManifestIndex,
    tally: Tally,
    covered: Sequence[int],
    kept: Mapping[int, Marker],
    *,
    finished: bool,
    cost: MeasuredCost | None = None,
) -> JobSummary:
    """What one worker did.

    Args:
        ledger, index: Of the job.
        tally: Of this run.
        covered: Shards of the task's share or taken.
        kept: Of them those finished before this run.
        finished: Whether the worker was not stopped early.
        cost: What was measured.
    """
    markers = ledger.markers() if len(kept) < len(covered) else kept
    done = [markers[number] for number in covered if number in markers]
    num_ok = sum(marker.num_ok for marker in kept.values()) + tally.num_resumed + tally.num_ok
    num_failed = sum(marker.num_failed for marker in kept.values()) + tally.num_failed
    num_rows = sum(ledger.shards[number].num_rows for number in covered)
    if finished:  # exact, from what is published
        num_ok, num_failed = sum(m.num_ok for m in done), sum(m.num_failed for m in done)
        num_images = num_ok + num_failed
    else:
        share = num_rows / max(1, index.num_rows)
        num_images = max(num_ok + num_failed, round(index.num_images * share))
    return JobSummary(
        out=ledger.place,
        num_rows=num_rows,
        num_images=num_images,
        num_ok=num_ok,
        num_failed=num_failed,
        num_quarantined_rows=sum(marker.num_invalid_rows for marker in done),
        num_resumed=max(0, num_ok + num_failed - tally.num_finished),
        num_shards=len(done),
        seconds=tally.seconds,
        images_per_s=tally.images_per_s,
        interrupted=not finished,
        warnings=tally.warnings(),
        cost=cost,
    )


def summary_of_workers(
    ledger: Ledger,
    num_images: int,
    parts: Sequence[Mapping[str, Any]],
    seconds: float,
    *,
    stopped: bool,
) -> JobSummary:
    """What several workers did together, told of the whole job.

    Args:
        ledger: Of the job.
        num_images: Of the whole manifest.
        parts: Their own summaries, as dicts.
        seconds: How long they were at work.
        stopped: Whether they were asked to stop.
    """
    status = status_of(ledger)
    num_drawn = sum(part["num_ok"] + part["num_failed"] - part["num_resumed"] for part in parts)
    num_done = status.num_ok + status.num_failed
    return JobSummary(
        out=ledger.place,
        num_rows=status.num_rows,
        num_images=num_done if status.finished else max(num_images, num_done),
        num_ok=status.num_ok,
        num_failed=status.num_failed,
        num_quarantined_rows=status.num_invalid_rows,
        num_resumed=max(0, num_done - num_drawn),
        num_shards=status.num_shards_done,
        seconds=seconds,
        images_per_s=num_drawn / seconds if seconds else 0.0,
        interrupted=any(part["interrupted"] for part in parts) or (stopped and not status.finished),
        warnings=list(dict.fromkeys(line for part in parts for line in part["warnings"])),
    )
