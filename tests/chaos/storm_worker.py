"""``offdiff run`` that also counts, in a file of its own, every denoise step it makes of an image."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from offline_diffusion import job
from offline_diffusion.cli.main import main
from offline_diffusion.config import JobConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.request_state import RequestState
from offline_diffusion.models.loader import load_model
from offline_diffusion.models.registry import Checkpoint


class SteppedEngine(Engine):
    """Appends the time and the number of images of each step to a file; slow, so that a storm has time."""

    log: int
    pause_s: float

    def _count_step(self, running: Sequence[RequestState], num_seqs: int) -> None:
        super()._count_step(running, num_seqs)
        time.sleep(self.pause_s)
        os.write(self.log, f"{time.monotonic():.3f} {len(running)}\n".encode())


def make_engine(config: JobConfig, checkpoint: Checkpoint) -> SteppedEngine:
    engine = SteppedEngine(load_model(config, checkpoint), config)
    engine.log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    engine.pause_s = float(sys.argv[2])
    return engine


if __name__ == "__main__":
    Path(sys.argv[1]).touch()
    job._load_engine = make_engine
    main(sys.argv[3:])
