"""What an exception says of the request that met it."""

from __future__ import annotations

import torch

from offline_diffusion.engine.memory import is_out_of_memory


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
