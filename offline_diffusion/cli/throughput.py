"""What this machine reached before, so that ``plan`` can say how long a job takes.

``run`` writes one small file a model and device; a record that cannot be read or written is no
fault of the job.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path

from offline_diffusion.config import cache_folder
from offline_diffusion.progress import Progress

MIN_SECONDS, ENOUGH_SECONDS, ENOUGH_IMAGES = 1.0, 10.0, 50
"""A run says something about a long one from ``ENOUGH_SECONDS`` on, or from ``ENOUGH_IMAGES`` in
``MIN_SECONDS``."""

MUCH_SHORTER = 1 / 4
"""Of a record's seconds: a run so short does not take the record's place."""


@dataclass(frozen=True, slots=True)
class ThroughputRecord:
    """Denoise work per second that a run reached, decoding and writing included.

    ``seconds`` is how long it was measured, ``measured_at`` Unix time.
    """

    model: str
    device: str
    flops_per_s: float
    num_images: int
    seconds: float
    measured_at: float


class ThroughputMeter:
    """Measures from the first to the last report of a running job."""

    def __init__(self) -> None:
        self._first: tuple[float, Progress] | None = None
        self._last: tuple[float, Progress] | None = None

    def observe(self, progress: Progress, now: float) -> None:
        """Takes the newest state; ``now`` in seconds of any steady clock."""
        if progress.phase not in ("running", "finishing"):
            return
        self._first = self._first or (now, progress)
        self._last = (now, progress)

    def measured(self) -> tuple[float, int, float] | None:
        """FLOP/s and the images and seconds they were measured over, or None when it was too little."""
        if self._first is None or self._last is None:
            return None
        (start, before), (end, after) = self._first, self._last
        seconds, work = end - start, after.work_done - before.work_done
        num_images = after.num_done - before.num_done
        is_enough = seconds >= ENOUGH_SECONDS or (num_images >= ENOUGH_IMAGES and seconds >= MIN_SECONDS)
        return (work / seconds, num_images, seconds) if is_enough and work > 0 else None


def device_name(device: str) -> str:
    """The name of the device that option ``device`` means: a GPU's product name, else ``CPU``."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(None if device == "auto" else torch.device(device))
    return "CPU"


def _records_folder() -> Path | None:
    with suppress(RuntimeError):  # a user without a home
        return cache_folder() / "throughput"
    return None


def remember(
    model: str,
    device: str,
    flops_per_s: float,
    num_images: int,
    seconds: float,
    *,
    folder: Path | None = None,
) -> None:
    """Writes a record in place of the last one of the same model and device, unless it is much shorter."""
    if (folder := folder or _records_folder()) is None:
        return
    record = ThroughputRecord(model, device, flops_per_s, num_images, seconds, time.time())
    key = hashlib.sha256(f"{model}\0{device}".encode()).hexdigest()[:16]
    path = folder / f"{key}.json"
    if (last := _read(path)) is not None and _better(last, record) is last:
        return
    temporary = folder / f".{key}.{os.getpid()}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
        temporary.replace(path)


def recall(model: str, folder: Path | None = None) -> ThroughputRecord | None:
    """The newest record of a model on any device that is not much shorter than one before, or None."""
    if (folder := folder or _records_folder()) is None:
        return None
    records = [_read(path) for path in folder.glob("*.json")]
    of_model = [record for record in records if record is not None and record.model == model]
    of_model.sort(key=lambda record: record.measured_at)
    return reduce(_better, of_model) if of_model else None


def _better(old: ThroughputRecord, new: ThroughputRecord) -> ThroughputRecord:
    return old if new.seconds < old.seconds * MUCH_SHORTER else new


def _read(path: Path) -> ThroughputRecord | None:
    with suppress(OSError, ValueError, TypeError):
        record = ThroughputRecord(**json.loads(path.read_text(encoding="utf-8")))
        return record if record.flops_per_s > 0 and record.seconds > 0 else None
    return None
