"""The speeds and bounds that the project has set itself, compared with records. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from records import Record, key


@dataclass(frozen=True)
class Target:
    """A bound on one field of one record; ``found.x`` names a field of what a check found."""

    workload: str
    precision: str
    field: str
    bound: float
    at_least: bool = True
    system: str = "packed"

    def value(self, records: Sequence[Record]) -> float | None:
        """What was measured, None where it was not."""
        wanted = (self.workload, self.system, self.precision)
        value: Any = next((record for record in records if key(record) == wanted), None)
        for name in self.field.split("."):
            value = None if value is None else value.get(name)
        return value

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def _fast(workload: str, precision: str, **bounds: float) -> list[Target]:
    return [Target(workload, precision, f"ratio_to_{rival}", bound) for rival, bound in bounds.items()]


def _at_most(workload: str, precision: str, field: str, bound: float) -> Target:
    return Target(workload, precision, field, bound, at_least=False)


TARGETS = [
    *_fast("256", "bf16", diffusers_serial=12, diffusers_batch=1.5),
    *_fast("256", "fp8", diffusers_serial=16),
    *_fast("512", "bf16", diffusers_serial=4, diffusers_batch=1.6, diffusers_batch_compiled=1.25),
    _at_most("512", "bf16", "wall_s_per_image", 0.95),
    _at_most("512", "fp8", "wall_s_per_image", 0.66),
    *_fast("1024", "bf16", diffusers_serial=1.6, diffusers_serial_compiled=1.25),
    _at_most("1024", "bf16", "wall_s_per_image", 4.2),
    _at_most("1024", "fp8", "wall_s_per_image", 2.9),
    _at_most("mixed16", "bf16", "wall_s", 32),
    _at_most("mixed16", "fp8", "wall_s", 23),
    *_fast("uniform", "bf16", diffusers_serial=2.2, presorted=1.0),
    *_fast("uniform", "fp8", diffusers_serial=3),
    Target("dataset_c", "bf16", "share_of_floor", 0.8),
    *[
        _at_most("exactness", precision, f"found.max_abs_{what}", 0)
        for precision in ("bf16", "fp8", "int8")
        for what in ("noise_pred", "latents", "pixels")
    ],
    _at_most("promise_cost", "bf16", "found.full_pack", 0.02),
    _at_most("plan_estimate", "bf16", "found.error", 0.15),
    _at_most("512", "bf16", "outside_share", 0.03),
    _at_most("512", "bf16", "gpu_idle_share", 0.02),
    _at_most("forty_aspects", "bf16", "longest_stall_s", 1.0),
]
"""Seconds are of the whole run, text encoding, decoding and copies included; ratios are of denoising."""


def lines(records: Sequence[Record]) -> list[str]:
    """Each target that something was measured for: bound, value, met or missed."""
    found = []
    for target in TARGETS:
        value = target.value(records)
        if value is None:
            continue
        sign = ">=" if target.at_least else "<="
        verdict = "met" if target.is_met(value) else "MISSED"
        what = f"{target.workload} {target.precision} {target.field.removeprefix('found.')}"
        found.append(f"{what:<58}{sign} {target.bound:<6g} is {value:<10.4g} {verdict}")
    return found
