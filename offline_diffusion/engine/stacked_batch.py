"""Requests of one latent shape as rows of one batch: built when the composition changes, then stepped.

Rows are ordered as a pack's sequences are: the positive branch of every request, then the negative branches
of the guided ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from offline_diffusion.engine.packed_batch import PreparedRequest
from offline_diffusion.kernels.packed_ops import combine_guidance
from offline_diffusion.kernels.stacked_ops import linear_step_
from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.models.stacked import StackedInput, StackedModel
from offline_diffusion.upload import upload


@dataclass(slots=True)
class StackedBatch:
    """The device tensors of one composition. R counts requests, N their guidance branches.

    Args:
        requests: Those stacked, in order.
        state: ``[R, S, K·C]`` float32: each request's sample and what its noise scheduler remembers; changed
            in place by every step.
        columns: ``[R, steps, 1 + K·(K + 2)]`` float32, see ``LinearSteps.columns``; set once.
        timesteps: ``[R, steps]`` float32; set once.
        step_index: ``[R]`` int64, the step each request is at.
        noise: ``[R, S, C]`` float32, what this step adds; refilled every step. None where no step adds any.
        model_input: What the forward sees; its latents and timesteps are refilled every step.
        source: ``[N]`` int64, request of each row; set once.
        guided: ``[G]`` int64, requests with a negative branch; set once.
        guidance_scale: ``[G, 1, 1]`` float32, of those; set once.
        num_steps_left: Steps until the first request is done.
        num_tokens: Latent positions of all rows, which is what a step's work grows with; set once.
        num_steps: Steps done since stacking.
        replay: Does the device's part of a step; set by the runner when it has recorded one.
    """

    requests: list[PreparedRequest]
    state: Tensor
    columns: Tensor
    timesteps: Tensor
    step_index: Tensor
    noise: Tensor | None
    model_input: StackedInput
    source: Tensor
    guided: Tensor
    guidance_scale: Tensor
    num_steps_left: int
    num_tokens: int
    num_steps: int = 0
    replay: Callable[[], None] | None = None

    @property
    def num_seqs(self) -> int:
        """Guidance branches."""
        return self.source.shape[0]

    @classmethod
    def build(cls, requests: list[PreparedRequest], model: DiffusionModel) -> StackedBatch:
        """Stacks ``requests``; host work and copies happen here, and little else."""
        device, num_channels = model.device, _stacked(model).num_sample_channels
        state = torch.stack([request.latents for request in requests])
        guided = [index for index, request in enumerate(requests) if request.negative_embeds is not None]
        source = [*range(len(requests)), *guided]
        branches = [request.branches(model) for request in requests]
        rows = [own[0] for own in branches] + [branches[index][1] for index in guided]
        scales = [requests[index].request.true_cfg_scale for index in guided]
        vectors = [row.inputs.vector for row in rows if row.inputs.vector is not None]
        sample = state[:, :, :num_channels]
        has_noise = [_has_noise(request, model) for request in requests]
        first = requests[0].request

        return cls(
            requests=requests,
            state=state,
            columns=upload(_padded([request.sigmas for request in requests]), device),
            timesteps=upload(_padded([request.timesteps for request in requests]), device),
            step_index=_indices([request.step_index for request in requests], device),
            noise=torch.zeros_like(sample) if any(has_noise) else None,
            model_input=StackedInput(
                latents=torch.empty(len(rows), *sample.shape[1:], device=device),
                timesteps=torch.empty(len(rows), device=device),
                prompt_embeds=torch.stack([row.prompt_embeds for row in rows]),
                vectors=torch.stack(vectors) if vectors else None,
                height=first.height,
                width=first.width,
            ),
            source=_indices(source, device),
            guided=_indices(guided, device),
            guidance_scale=_numbers(scales, device).view(-1, 1, 1),
            num_steps_left=min(len(own.timesteps) - own.step_index for own in requests),
            num_tokens=sum(row.num_image_tokens for row in rows),
        )

    def refresh(self, model: DiffusionModel) -> None:  # noqa: ARG002
        """Puts this step's noise in place; the only host work of a step, and for most none."""
        if self.noise is None:
            return
        for row, request in zip(self.noise, self.requests, strict=True):
            if request.noise is not None and request.step_index < request.noise.shape[0]:
                row.copy_(request.noise[request.step_index])
            else:
                row.zero_()

    def forward(self, model: DiffusionModel) -> Tensor:
        """The model's output at the current step, ``[N, S, C]``; device work only."""
        batch = self.model_input
        here = self._here(self.columns)
        scaled = self.state[:, :, : batch.latents.shape[-1]] * here[:, :1, None]
        torch.index_select(scaled, 0, self.source, out=batch.latents)
        torch.index_select(self._here(self.timesteps), 0, self.source, out=batch.timesteps)
        return _stacked(model).denoise_step(batch)

    def step_scheduler(self, noise_pred: Tensor, model: DiffusionModel) -> None:  # noqa: ARG002
        """Combines the branches and moves every request one step on; device work only.

        Args:
            noise_pred: ``[N, S, C]`` as the forward returned it.
        """
        num_requests = len(self.requests)
        output = noise_pred[:num_requests].float()
        if self.guided.shape[0]:
            positive = output.index_select(0, self.guided)
            negative = noise_pred[num_requests:].float()
            combined = combine_guidance(positive, negative, self.guidance_scale, rescale=False)
            output = output.index_copy(0, self.guided, combined)
        num_slots = self.state.shape[-1] // output.shape[-1]
        matrices = self._here(self.columns)[:, 1:].unflatten(1, (num_slots, num_slots + 2))
        linear_step_(self.state, output, self.noise, matrices)
        self.step_index += 1

    def _here(self, table: Tensor) -> Tensor:
        """``[R, steps, …]`` → ``[R, …]``, at the step that each request is at."""
        return table[torch.arange(table.shape[0], device=table.device), self.step_index]

    def advance(self) -> None:
        """Counts a step that was done."""
        self.num_steps += 1
        self.num_steps_left -= 1
        for request in self.requests:
            request.step_index += 1

    def release(self) -> None:
        """Gives every request its state back (views), before the batch is rebuilt or dropped."""
        for request, state in zip(self.requests, self.state, strict=True):
            request.latents = state


def _indices(values: list[int], device: torch.device) -> Tensor:
    return _numbers(values, device, torch.int64)


def _numbers(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """On the device; there is nothing to pin of none."""
    tensor = torch.tensor(values, dtype=dtype)
    return upload(tensor, device) if values else tensor.to(device)


def _padded(tables: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)


def _stacked(model: DiffusionModel) -> StackedModel:
    return cast(StackedModel, model)


def _has_noise(request: PreparedRequest, model: DiffusionModel) -> bool:
    """Whether any step of it adds noise; draws it at the first time."""
    if request.noise is None and (noise := _stacked(model).prepare_noise(request.request)) is not None:
        request.noise = upload(noise, model.device).float()
    return request.noise is not None
