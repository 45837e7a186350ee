"""From the host to the device without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, which lies on the CPU, on ``device``.

    A GPU takes it from pinned memory when it is through with what was launched before; from any other
    memory the host would have to wait for that, and the GPU would run dry meanwhile.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
