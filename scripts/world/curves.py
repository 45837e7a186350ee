"""What every training here does beside its steps: a rate that falls, averaged weights, a log of the curve."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WARMUP_STEPS = 200


class Pace:
    """How far a training has come, by steps or by seconds, and the learning rate that goes with it.

    Args:
        steps: Steps in all; 0 leaves it to ``seconds``.
        seconds: Seconds in all of this and earlier sittings; the log tells how many steps that came to.
        peak: The highest learning rate.
    """

    def __init__(self, steps: int, seconds: float, peak: float) -> None:
        assert steps > 0 or seconds > 0
        self.steps, self.seconds, self.peak = steps, seconds, peak
        self.step, self.earlier_s = 0, 0.0
        self.agreed: float | None = None  # share done, where several processes train together
        self.begin()

    def begin(self) -> None:
        """Starts the clock of this sitting again: what went before was no training."""
        self._start = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, earlier sittings included."""
        return self.earlier_s + time.perf_counter() - self._start

    @property
    def done(self) -> float:
        """The share done, 0 … 1; of several processes what they last agreed on, so that all end together."""
        return self.own_share if self.agreed is None else self.agreed

    @property
    def own_share(self) -> float:
        """The share done by this process's own steps or clock, 0 … 1."""
        share = self.step / self.steps if self.steps else self.elapsed_s / self.seconds
        return min(1.0, share)

    def learning_rate(self) -> float:
        """Rises over the first steps, then falls along a quarter of a cosine to a hundredth."""
        rise = min(1.0, (self.step + 1) / WARMUP_STEPS)
        return self.peak * rise * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.own_share)))


class Average:
    """Exponential moving average of a model's parameters, in float32.

    Args:
        parameters: Those of the model, in a fixed order.
        decay: Once warm; early on it is shorter, so that the start is forgotten.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self._parameters = list(parameters)
        self.values = [parameter.detach().clone() for parameter in self._parameters]
        self.decay, self.num_updates = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        """After every optimizer step."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        torch._foreach_lerp_(self.values, [p.detach() for p in self._parameters], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the model's weights and the averaged ones; a second call undoes it."""
        for parameter, value in zip(self._parameters, self.values, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(kept)


class Curve:
    """A log as JSON lines: the first tells what ran where, the others the curve.

    Args:
        path: Of the file; lines of earlier sittings and trainings are kept.
        about: Of a training's first line: command, seed, configs.
        goes_on: Whether an earlier sitting wrote that line.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, goes_on: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        if not goes_on:
            self.write(about | hardware())

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends one line and shows it."""
        rounded = {name: _rounded(value) for name, value in values.items()}
        line = json.dumps(rounded)
        print(line, flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def hardware() -> dict[str, str]:
    """Device and versions, for a log's first line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"device": device, "torch": torch.__version__, "python": platform.python_version()}


def _rounded(value: Any) -> Any:
    value = value.item() if isinstance(value, Tensor) else value
    return float(f"{value:.4g}") if isinstance(value, float) else value
