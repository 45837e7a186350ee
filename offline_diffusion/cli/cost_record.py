"""What steps cost on this machine before, so that ``plan`` can say how long a job takes.

``run`` writes one small file a model, device and number format; a record that cannot be read or
written is no fault of the job.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

import offline_diffusion
from offline_diffusion.config import EngineConfig, cache_folder

if TYPE_CHECKING:
    from offline_diffusion.engine.cost import CostModel, MeasuredCost

MIN_SECONDS, ENOUGH_SECONDS, ENOUGH_IMAGES = 1.0, 10.0, 50
"""A run says something about a long one from ``ENOUGH_SECONDS`` on, or from ``ENOUGH_IMAGES`` in
``MIN_SECONDS``."""

MUCH_SHORTER = 1 / 4
"""Of a record's seconds: a run so short does not take the record's place, unless that is of another
version of this package."""

CPU = "CPU"


class CostRecord(BaseModel):
    """A cost model and where it was measured.

    Args:
        model, device, dtype, quantization: What it is true of; ``device`` is a product name or ``CPU``.
        fixed_s, token_s, square_s, image_s, pixel_s, prompt_s: The terms, see ``engine.cost.CostModel``.
        max_num_batched_tokens: The budget of the steps; ``budget_was_given`` when the user said it.
        num_steps, num_images, seconds: What it rests on.
        measured_at: Unix time.
        version: Of this package.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    model: str
    device: str
    dtype: str
    quantization: str
    fixed_s: float = Field(ge=0)
    token_s: float = Field(ge=0)
    square_s: float = Field(ge=0)
    image_s: float = Field(ge=0)
    pixel_s: float = Field(ge=0)
    prompt_s: float = Field(ge=0)
    max_num_batched_tokens: int = Field(ge=1)
    budget_was_given: bool
    num_steps: int = Field(ge=1)
    num_images: int = Field(ge=0)
    seconds: float = Field(gt=0)
    measured_at: float
    version: str

    def cost_model(self) -> CostModel:
        """The terms as a model."""
        from offline_diffusion.engine.cost import CostModel

        steps = (self.fixed_s, self.token_s, self.square_s)
        return CostModel(*steps, self.image_s, self.pixel_s, self.prompt_s)

    def serves(self, config: EngineConfig) -> bool:
        """Whether a run of ``config`` may be expected to cost as much."""
        on_cpu = self.device == CPU
        auto_dtype = "float32" if on_cpu else "bfloat16"
        return (
            self.model == config.model
            and self.quantization == config.quantization
            and self.dtype == (auto_dtype if config.dtype == "auto" else config.dtype)
            and (config.device == "auto" or (config.device == "cpu") is on_cpu)
        )


def device_name(device: str) -> str:
    """The name of the device that option ``device`` means: a GPU's product name, else ``CPU``."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(None if device == "auto" else torch.device(device))
    return CPU


def remember(cost: MeasuredCost, config: EngineConfig, *, folder: Path | None = None) -> None:
    """Writes a record of a run in place of the last one of the same model, device and number format.

    Nothing happens when the run tells too little, or much less than the record that is there.
    """
    folder = folder or _records_folder()
    if folder is None or not _is_enough(cost):
        return
    record = _record(cost, config)
    key = "\0".join((record.model, record.device, record.dtype, record.quantization))
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    path, temporary = folder / f"{name}.json", folder / f".{name}.{os.getpid()}"
    if (last := _read(path)) is not None and _better(last, record) is last:
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(record.model_dump_json() + "\n", encoding="utf-8")
        temporary.replace(path)


def recall(config: EngineConfig, *, folder: Path | None = None) -> CostRecord | None:
    """The newest record that serves a plan, on whichever device; a much shorter run is no newer one."""
    found = [record for record in _records(folder or _records_folder()) if record.serves(config)]
    found.sort(key=lambda record: record.measured_at)
    return reduce(_better, found) if found else None


def _is_enough(cost: MeasuredCost) -> bool:
    has_many_images = cost.num_images >= ENOUGH_IMAGES and cost.seconds >= MIN_SECONDS
    return cost.seconds >= ENOUGH_SECONDS or has_many_images


def _record(cost: MeasuredCost, config: EngineConfig) -> CostRecord:
    return CostRecord(
        model=config.model,
        device=device_name(config.device),
        dtype=cost.dtype,
        quantization=config.quantization,
        **asdict(cost.model),
        max_num_batched_tokens=cost.max_num_batched_tokens,
        budget_was_given=config.max_num_batched_tokens is not None,
        num_steps=cost.num_steps,
        num_images=cost.num_images,
        seconds=cost.seconds,
        measured_at=time.time(),
        version=offline_diffusion.__version__,
    )


def _records_folder() -> Path | None:
    with suppress(RuntimeError):  # a user without a home
        return cache_folder() / "costs"
    return None


def _records(folder: Path | None) -> Iterator[CostRecord]:
    for path in folder.glob("*.json") if folder else ():
        if (record := _read(path)) is not None:
            yield record


def _better(old: CostRecord, new: CostRecord) -> CostRecord:
    is_much_shorter = new.seconds < old.seconds * MUCH_SHORTER
    return old if is_much_shorter and old.version == new.version else new


def _read(path: Path) -> CostRecord | None:
    with suppress(OSError, ValueError):  # among them pydantic's
        return CostRecord.model_validate_json(path.read_bytes())
    return None
