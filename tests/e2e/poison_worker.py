"""``offdiff`` with a model whose process dies in the step of some rows: with ABORT, KILL or MEMORY.

One with DEVICE loses the device: on a GPU by an index that is out of bounds, elsewhere by raising what that
raises, in this call and all later ones. The first step of the job with HANG hangs, and soon counts as that.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from offline_diffusion import job, pulse
from offline_diffusion.cli.main import main as offdiff
from offline_diffusion.config import JobConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.models.loader import load_model
from offline_diffusion.models.registry import Checkpoint

DEATHS = {"ABORT": signal.SIGABRT, "KILL": signal.SIGKILL, "MEMORY": None, "DEVICE": None, "HANG": None}

MARK = 4096.0
"""Of a deadly row's latents; powers of two are the same in every dtype."""


def use_all_memory() -> None:
    """Until the system kills this process; where it has no limit, at 16 GiB with an error."""
    hoard = []
    while len(hoard) < 256:
        hoard.append(bytearray(os.urandom(1)) * 2**26)
    raise MemoryError("nobody limits the memory")


class DeadlyModel:
    """The tiny model; a deadly prompt marks its latents, and a step with such latents is the last."""

    def __init__(self, model: Any, has_hung: Path) -> None:
        self._model, self._has_hung = model, has_hung
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prepare_latents(self, request: Any) -> Any:
        latents = self._model.prepare_latents(request)
        for number, word in enumerate(DEATHS):
            if word in request.prompt:
                latents[0, 0] = MARK * 2**number
        return latents

    def denoise_step(self, batch: Any) -> Any:
        if batch.latents.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._model.denoise_step(batch)
        for number, (word, death) in enumerate(DEATHS.items()):
            if (batch.latents == MARK * 2**number).any():
                self._is_lost = word == "DEVICE"
                if death is not None:
                    os.kill(os.getpid(), death)
                elif word == "MEMORY":
                    use_all_memory()
                elif word == "HANG" and not self._has_hung.exists():
                    self._has_hung.touch()
                    pulse.HUNG_S = pulse.FIRST_HUNG_S = pulse.HUNG_FACTOR = 1.0
                    time.sleep(600)
        if self._is_lost and batch.latents.is_cuda:
            return self._model.denoise_step(batch)[torch.full((1,), 2**40, device=batch.latents.device)]
        if self._is_lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nMore of it.")
        return self._model.denoise_step(batch)


def load_engine(config: JobConfig, checkpoint: Checkpoint) -> Engine:
    model: Any = DeadlyModel(load_model(config, checkpoint), config.folder / "_state" / "has-hung")
    return Engine(model, config)


def main() -> None:
    job._load_engine = load_engine
    offdiff(sys.argv[1:])


if __name__ == "__main__":
    main()
