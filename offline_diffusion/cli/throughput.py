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
from pathlib import Path

from offline_diffusion.progress import Progress

MIN_SECONDS = 1.0
"""A shorter run says nothing about a long one."""


@dataclass(frozen=True, slots=True)
class ThroughputRecord:
    """Denoise work per second that a run reached, decoding and writing included.

    ``measured_at`` is Unix time.
    """

    model: str
    device: str
    flops_per_s: float
    num_images: int
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

    def measured(self) -> tuple[float, int] | None:
        """FLOP/s and the images they were measured over, or None when it was too little."""
        if self._first is None or self._last is None:
            return None
        (start, before), (end, after) = self._first, self._last
        work = after.work_done - before.work_done
        if end - start < MIN_SECONDS or work <= 0:
            return None
        return work / (end - start), after.num_done - before.num_done


def device_name(device: str) -> str:
    """The name of the device that option ``device`` means: a GPU's product name, else ``CPU``."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(None if device == "auto" else torch.device(device))
    return "CPU"


def cache_folder() -> Path:
    """``offline_diffusion/throughput`` under ``$XDG_CACHE_HOME``, else under ``~/.cache``."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = given if given.is_absolute() else Path.home() / ".cache"
    return cache / "offline_diffusion" / "throughput"


def remember(
    model: str, device: str, flops_per_s: float, num_images: int, *, folder: Path | None = None
) -> None:
    """Writes a record in place of the last one of the same model and device."""
    folder = folder or cache_folder()
    record = ThroughputRecord(model, device, flops_per_s, num_images, time.time())
    key = hashlib.sha256(f"{model}\0{device}".encode()).hexdigest()[:16]
    temporary = folder / f".{key}.{os.getpid()}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
        temporary.replace(folder / f"{key}.json")


def recall(model: str, folder: Path | None = None) -> ThroughputRecord | None:
    """The newest record of a model on any device, or None."""
    records = []
    for path in (folder or cache_folder()).glob("*.json"):
        with suppress(OSError, ValueError, TypeError):
            record = ThroughputRecord(**json.loads(path.read_text(encoding="utf-8")))
            if record.model == model and record.flops_per_s > 0:
                records.append(record)
    return max(records, key=lambda record: record.measured_at, default=None)
