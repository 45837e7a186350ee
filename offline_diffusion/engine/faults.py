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


def row_fault(error: Exception) -> tuple[str, str]:
    """``error_type`` and ``error`` of an output.

    Raises:
        torch.AcceleratorError: The device is broken, which is no request's fault.
    """
    if is_out_of_memory(error):
        return "out_of_memory", str(error)
    if isinstance(error, torch.AcceleratorError):
        raise error
    return "model_error", f"{type(error).__name__}: {error}"
