"""What an NVIDIA GPU has taken, as its driver counts it. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

JOULES = Callable[[], float]
"""Joules since the driver was loaded."""


def energy_meter(index: int, environ: Mapping[str, str] = os.environ) -> JOULES | None:
    """The meter of CUDA device ``index``; None where NVML is not installed or the device does not count.

    Args:
        index: As CUDA counts the devices that it sees.
        environ: Holds ``CUDA_VISIBLE_DEVICES``.
    """
    try:
        import pynvml
    except ImportError:
        return None
    with suppress(pynvml.NVMLError, IndexError):
        pynvml.nvmlInit()
        name = visible_device(index, environ)
        by_name = pynvml.nvmlDeviceGetHandleByUUID
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else by_name(name)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
    return None


def visible_device(index: int, environ: Mapping[str, str]) -> str:
    """The driver's number or name of what CUDA counts as ``index``.

    Raises:
        IndexError: CUDA sees no such device.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[index].strip() if visible.strip() else str(index)
