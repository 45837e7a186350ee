"""Why a request cannot be drawn, and what an exception says of the request that met it."""

from __future__ import annotations

import torch

from offline_diffusion.engine.memory import check_memory, is_out_of_memory
from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.request import Request


def refusal(request: Request, model: DiffusionModel) -> tuple[str, str] | None:
    """Why ``model`` can never draw ``request``, as ``error_type`` and ``error`` of an output; or None."""
    if (fault := model.capabilities.check_request(request)) is not None:
        return "invalid_request", fault
    if (fault := check_memory(request, model.device)) is not None:
        return "out_of_memory", fault
    return None


def is_device_error(error: BaseException) -> bool:
    """Whether an exception says that the device is lost to this process: every later call would fail, too."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def row_fault(error: Exception, device: torch.device) -> tuple[str, str]:
    """``error_type`` and ``error`` of an output.

    Raises:
        torch.AcceleratorError: The device is lost, and with it the requests that share it.
    """
    if is_out_of_memory(error):
        return "out_of_memory", str(error)
    if is_device_error(error):
        raise error
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # raises where it is lost: a library may have told it in its own words
    return "model_error", f"{type(error).__name__}: {error}"
