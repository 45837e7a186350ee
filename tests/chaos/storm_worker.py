"""``offdiff run`` that also counts, in a file of its own, every denoise step it makes of an image.

Imported once by a process from which the lives of a storm are forked: each is a process of its own that
begins with the libraries loaded, which otherwise takes most of a short life.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import diffusers

import offline_diffusion.cli.run
import offline_diffusion.models.tiny  # noqa: F401
from offline_diffusion import job
from offline_diffusion.cli.main import main
from offline_diffusion.config import JobConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.request_state import RequestState
from offline_diffusion.models.loader import load_model
from offline_diffusion.models.registry import Checkpoint

diffusers.QwenImagePipeline  # imports what a model is loaded with  # noqa: B018


class SteppedEngine(Engine):
    """Appends the time and the number of images of each step to a file; slow, so that a storm has time."""

    log: int
    pause_s: float

    def _count_step(self, running: Sequence[RequestState], num_seqs: int) -> None:
        super()._count_step(running, num_seqs)
        time.sleep(self.pause_s)
        os.write(self.log, f"{time.monotonic():.3f} {len(running)}\n".encode())


def live(steps: Path, errors: Path, pause_s: float, arguments: Sequence[str]) -> None:
    """The life of one worker, in a process of its own.

    Args:
        steps: Gets a line a step.
        errors: Gets its standard error.
        pause_s: Seconds between two steps.
        arguments: Of ``offdiff``.
    """
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)

    def make_engine(config: JobConfig, checkpoint: Checkpoint) -> SteppedEngine:
        engine = SteppedEngine(load_model(config, checkpoint), config)
        engine.log = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        engine.pause_s = pause_s
        return engine

    job._load_engine = make_engine
    main(list(arguments))
