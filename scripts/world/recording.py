"""How weights change by a step, which on a GPU is one CUDA graph: its thousand launches would keep the host
busy four times as long as the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from world.curves import Average, Pace

AVERAGE_EVERY = 8
"""Steps between updates of the averaged weights, and between those at which processes share their weights."""

NUM_EAGER_STEPS = 3
"""Compilation, the optimizer's state and the libraries' workspaces come about in these."""


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


class Optimization(Generic[B]):
    """Parameters, their optimizer and their average, and the steps that change them.

    Of several processes (``torch.distributed``, begun by the caller) each goes on by itself from what all
    had in the mean a few steps ago; they begin with the first one's weights.

    Args:
        groups: Of the parameters, as AdamW takes them.
        loss: Of a batch: what a step lowers, and what it tells.
        pace: How long, and the learning rate.
        betas, weight_decay: AdamW's.
        decay: Of the average, at an update.
        device: Where everything is.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        loss: Callable[[B], tuple[Tensor, Tensor]],
        pace: Pace,
        *,
        betas: tuple[float, float],
        weight_decay: float,
        decay: float,
        device: torch.device,
    ) -> None:
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.pace, self._loss, self._device = pace, loss, device
        self._rate, on_gpu = torch.zeros((), device=device), device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            groups, self._rate, betas, weight_decay=weight_decay, fused=on_gpu, capturable=on_gpu
        )
        self._is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._share(begin=True)
        self.average = Average(self.parameters, decay)
        self._recorded: dict[int, RecordedStep[B]] = {}

    def step(self, batch: B, kind: int = 0) -> Tensor:
        """One step; batches of one ``kind`` have the same shapes. What the loss tells, on the device."""
        if kind not in self._recorded:
            self._recorded[kind] = RecordedStep(self._update, self._device)
        self._rate.fill_(self.pace.learning_rate())
        told = self._recorded[kind](batch)
        self.pace.step += 1
        if self.pace.step % AVERAGE_EVERY == 0:
            self._share()
            self.average.update()
        return told

    @torch.no_grad()
    def _share(self, *, begin: bool = False) -> None:
        """Makes the parameters, and how much is done, what all processes have in the mean.

        In place, as a recorded step needs it; torch's ``PeriodicModelAverager`` moves parameters.
        """
        if self._is_alone:
            return
        done = self._rate.new_tensor([self.pace.own_share])
        own = torch.cat((parameters_to_vector(self.parameters), done))
        if begin:
            dist.broadcast(own, src=0)
        else:
            dist.all_reduce(own)
            own /= dist.get_world_size()
        *values, done = own.split([*(parameter.numel() for parameter in self.parameters), 1])
        torch._foreach_copy_(
            self.parameters, [v.view_as(p) for v, p in zip(values, self.parameters, strict=True)]
        )
        self.pace.agreed = done.item()

    def _update(self, batch: B) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False):
            lowered, told = self._loss(batch)
        lowered.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        return told.detach()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """The state of `optimizer`, as it was saved."""
        self.optimizer.load_state_dict(state)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
