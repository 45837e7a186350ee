"""A training step as one CUDA graph: its thousand launches would keep the host busy four times as long as the
device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

NUM_EAGER_STEPS = 3
"""Compilation, the optimizer's state and the libraries' workspaces come about in these."""


def make_optimizer(
    groups: list[dict[str, Any]], betas: tuple[float, float], weight_decay: float, device: torch.device
) -> tuple[torch.optim.AdamW, Tensor]:
    """AdamW that can be recorded, and its learning rate: one number on ``device``, filled before a step."""
    rate, on_gpu = torch.zeros((), device=device), device.type == "cuda"
    optimizer = torch.optim.AdamW(
        groups, rate, betas, weight_decay=weight_decay, fused=on_gpu, capturable=on_gpu
    )
    return optimizer, rate


class Batch(Protocol):
    """What a step reads."""

    def tensors(self) -> list[Tensor]:
        """All of it, of the same shapes in every step."""
        ...


B = TypeVar("B", bound=Batch)


class RecordedStep(Generic[B]):
    """``update``, on a GPU recorded after a few steps and replayed from then on.

    Args:
        update: Changes weights in place by a batch and returns the loss. It must not wait for the device, nor
            read on the host what changes from step to step.
        device: Where everything is; elsewhere than on a GPU nothing is recorded.
    """

    def __init__(self, update: Callable[[B], Tensor], device: torch.device) -> None:
        self._update = update
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_eager = 0

    def __call__(self, batch: B) -> Tensor:
        """One step; its loss."""
        if self._stream is None:
            return self._update(batch)
        if self._num_eager < NUM_EAGER_STEPS:
            return self._run_eagerly(batch, self._stream)
        if self._graph is None:
            self._own = copy.deepcopy(batch)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._loss = self._update(self._own)
        torch._foreach_copy_(self._own.tensors(), batch.tensors())
        self._graph.replay()
        return self._loss.clone()

    def _run_eagerly(self, batch: B, stream: torch.cuda.Stream) -> Tensor:
        """On the stream that will be recorded, which autograd remembers."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = self._update(batch)
        torch.cuda.current_stream().wait_stream(stream)
        self._num_eager += 1
        return loss
