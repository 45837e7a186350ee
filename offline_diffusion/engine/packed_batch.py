"""A pack of unlike requests as flat tensors: built when the composition changes, then stepped.

Layout. Sequences are ordered: the positive branch of every request, then the negative branches of
the guided ones. The image stream therefore begins with the tokens of ``latents`` as they are,
followed by a second copy of the guided requests' tokens. In *joint* order, which keys, values and
rotary angles use, each sequence is its text followed by its image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from offline_diffusion.attention.metadata import AttentionMetadata, SequenceBounds
from offline_diffusion.engine.solver import SigmaTable
from offline_diffusion.kernels.packed_ops import guided_step_
from offline_diffusion.models.base import (
    DiffusionModel,
    PackedInput,
    PackedModel,
    PromptEmbeds,
    RotaryTable,
    SequenceInputs,
)
from offline_diffusion.request import Request
from offline_diffusion.upload import upload


@dataclass(slots=True, eq=False)
class PreparedRequest:
    """A request with everything its steps need.

    Args:
        request: What was asked; its size is in pixels.
        prompt_embeds: On the device.
        negative_embeds: On the device, None when guidance is off.
        sigmas: ``[steps + 1]`` float32, CPU; of a stacked family ``LinearSteps.columns`` instead.
        timesteps: ``[steps]`` float32, CPU.
        latents: ``[S, C]`` float32 on the device. Set at the start and whenever a pack lets go.
        step_index: Steps done.
        encode_s: Seconds that preparing took, of a batch of prompts its share.
        sequences: Its guidance branches, the positive one first; set by the request's first pack.
        noise: ``[draws, S, C]`` float32 on the device, what the steps of a stacked family add, if any; set by
            the request's first batch.
        shown_step: Steps done at its last preview, or when it was prepared; set by `previews.Previews`.
    """

    request: Request
    prompt_embeds: PromptEmbeds
    negative_embeds: PromptEmbeds | None
    sigmas: Tensor
    timesteps: Tensor
    latents: Tensor
    step_index: int = 0
    encode_s: float = 0.0
    sequences: list[_Sequence] = field(default_factory=list)
    noise: Tensor | None = None
    shown_step: int = 0

    @property
    def num_image_tokens(self) -> int:
        return self.latents.shape[0]

    def branches(self, model: DiffusionModel) -> list[_Sequence]:
        """Its sequences, the positive one first."""
        if not self.sequences:
            embeds = [self.prompt_embeds] + ([] if self.negative_embeds is None else [self.negative_embeds])
            self.sequences = [
                _Sequence(own.stream, self.num_image_tokens, model.prepare_sequence(self.request, own))
                for own in embeds
            ]
        return self.sequences


@dataclass(slots=True)
class _Sequence:
    """One guidance branch."""

    prompt_embeds: Tensor
    num_image_tokens: int
    inputs: SequenceInputs

    @property
    def length(self) -> int:
        return self.prompt_embeds.shape[0] + self.num_image_tokens


@dataclass(slots=True)
class PackedBatch:
    """The device tensors of one composition. T counts image tokens of all requests, each once.

    Args:
        requests: Those packed, in order.
        latents: ``[T, C]`` float32, changed in place by every step.
        sigmas: Schedules and progress.
        model_input: What the forward sees; its latents and conditioning are refilled every step.
        img_source: ``[T_img]`` int64, token of ``latents`` that an image token repeats; set once.
        negative_row: ``[T]`` int64, image token of the negative branch, -1 where guidance is off; set once.
        guidance_scale: ``[R]`` float32; set once.
        owner: ``[T]`` int64, request of each token; set once.
        timesteps: Of each request, from the step it was packed at; set once.
        seq_request: Of each sequence its request; set once.
        num_steps: Steps done since packing.
        replay: Does the device's part of a step; set by the runner when it has recorded one.
    """

    requests: list[PreparedRequest]
    latents: Tensor
    sigmas: SigmaTable
    model_input: PackedInput
    img_source: Tensor
    negative_row: Tensor
    guidance_scale: Tensor
    owner: Tensor
    timesteps: list[list[float]]
    seq_request: list[int]
    num_steps: int = 0
    replay: Callable[[], None] | None = None

    @property
    def num_seqs(self) -> int:
        """Guidance branches."""
        return len(self.seq_request)

    @property
    def num_tokens(self) -> int:
        """Image and text tokens of all sequences."""
        return sum(self.model_input.seqlens)

    @property
    def num_steps_left(self) -> int:
        """Steps until the first request is done."""
        return min(map(len, self.timesteps)) - self.num_steps

    @classmethod
    def build(cls, requests: list[PreparedRequest], model: DiffusionModel) -> PackedBatch:
        """Packs ``requests``; host work and copies happen here, and only here."""
        device = model.device
        lengths = [request.num_image_tokens for request in requests]
        spans = _spans(lengths)  # of each request in latents
        guided = [index for index, request in enumerate(requests) if request.negative_embeds is not None]
        branches = [request.branches(model) for request in requests]
        sequences = [own[0] for own in branches] + [branches[index][1] for index in guided]
        seq_request = [*range(len(requests)), *guided]
        latents = torch.cat([request.latents for request in requests])
        guided_tokens = _ranges([spans[index] for index in guided])
        img_source = torch.cat((torch.arange(sum(lengths)), guided_tokens))
        negative_row = torch.full((sum(lengths),), -1)
        negative_row[guided_tokens] = torch.arange(sum(lengths), img_source.shape[0])
        timesteps = [request.timesteps[request.step_index :].tolist() for request in requests]
        scales = [request.request.true_cfg_scale for request in requests]

        conditioning = _packed(model).prepare_step(_current(timesteps, seq_request, 0), _later(timesteps, 0))
        img_source = upload(img_source, device)
        return cls(
            requests=requests,
            latents=latents,
            sigmas=SigmaTable(
                [request.sigmas for request in requests],
                [request.step_index for request in requests],
                device,
            ),
            model_input=_model_input(sequences, latents.index_select(0, img_source), conditioning, device),
            img_source=img_source,
            negative_row=upload(negative_row, device),
            guidance_scale=upload(torch.tensor(scales, dtype=torch.float32), device),
            owner=upload(_repeat(range(len(requests)), lengths), device),
            timesteps=timesteps,
            seq_request=seq_request,
        )

    def refresh(self, model: DiffusionModel) -> None:
        """Gives the model the sequences' timesteps; the only host work of a step."""
        if self.num_steps:
            current = _current(self.timesteps, self.seq_request, self.num_steps)
            conditioning = _packed(model).prepare_step(current, _later(self.timesteps, self.num_steps))
            self.model_input.conditioning.copy_(conditioning)

    def forward(self, model: DiffusionModel) -> Tensor:
        """The noise prediction at the current step, ``[T_img, C]``; device work only."""
        torch.index_select(self.latents, 0, self.img_source, out=self.model_input.latents)
        return _packed(model).denoise_step(self.model_input)

    def step_scheduler(self, noise_pred: Tensor, model: DiffusionModel) -> None:
        """Combines the branches and moves every request's latents one step on; device work only.

        Args:
            noise_pred: ``[T_img, C]`` as the forward returned it.
        """
        guided_step_(
            self.latents,
            noise_pred,
            self.owner,
            self.negative_row,
            self.guidance_scale,
            self.sigmas.sigmas,
            self.sigmas.step_index,
            rescale=_packed(model).guidance_rule == "norm_rescale",
        )
        self.sigmas.advance()

    def advance(self) -> None:
        """Counts a step that was done."""
        self.num_steps += 1
        for request in self.requests:
            request.step_index += 1

    def release(self) -> None:
        """Gives every request its latents back (views), before the pack is rebuilt or dropped."""
        parts = self.latents.split([request.num_image_tokens for request in self.requests])
        for request, latents in zip(self.requests, parts, strict=True):
            request.latents = latents


def _packed(model: DiffusionModel) -> PackedModel:
    return cast(PackedModel, model)


def _current(timesteps: list[list[float]], seq_request: list[int], step: int) -> list[float]:
    """Each sequence's timestep at ``step``."""
    return [timesteps[request][step] for request in seq_request]


def _later(timesteps: list[list[float]], step: int) -> Iterator[float]:
    """The timesteps after ``step``, those of the next step first."""
    for index in range(step + 1, max(map(len, timesteps))):
        yield from (own[index] for own in timesteps if index < len(own))


def _model_input(
    sequences: list[_Sequence],
    latents: Tensor,
    conditioning: Tensor,
    device: torch.device,
) -> PackedInput:
    txt_lengths = [sequence.prompt_embeds.shape[0] for sequence in sequences]
    img_lengths = [sequence.num_image_tokens for sequence in sequences]
    spans = _spans([sequence.length for sequence in sequences])  # in joint order
    txt_spans = [(start, start + length) for (start, _), length in zip(spans, txt_lengths, strict=True)]
    img_spans = [(stop - length, stop) for (_, stop), length in zip(spans, img_lengths, strict=True)]

    keys = SequenceBounds.from_seqlens([sequence.length for sequence in sequences], device)
    inputs = [sequence.inputs for sequence in sequences]

    return PackedInput(
        latents=latents,
        conditioning=conditioning,
        prompt_embeds=torch.cat([sequence.prompt_embeds for sequence in sequences]),
        img_sequence=upload(_repeat(range(len(sequences)), img_lengths), device),
        txt_sequence=upload(_repeat(range(len(sequences)), txt_lengths), device),
        img_to_joint=upload(_ranges(img_spans), device),
        txt_to_joint=upload(_ranges(txt_spans), device),
        rotary=_joined_rotary([own.rotary for own in inputs if own.rotary is not None]),
        img_positions=_joined([own.img_positions for own in inputs if own.img_positions is not None]),
        vectors=_joined([own.vector.unsqueeze(0) for own in inputs if own.vector is not None]),
        img_attention=AttentionMetadata(SequenceBounds.from_seqlens(img_lengths, device), keys),
        txt_attention=AttentionMetadata(SequenceBounds.from_seqlens(txt_lengths, device), keys),
    )


def _joined_rotary(tables: list[RotaryTable]) -> RotaryTable | None:
    if not tables:
        return None
    return RotaryTable(torch.cat([own.cos for own in tables]), torch.cat([own.sin for own in tables]))


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if parts else None


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    stops = list(accumulate(lengths))
    return [(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def _ranges(spans: list[tuple[int, int]]) -> Tensor:
    """All positions of ``spans`` in order, int64."""
    parts = [torch.arange(start, stop) for start, stop in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _repeat(values: range, lengths: list[int]) -> Tensor:
    """``values[i]`` repeated ``lengths[i]`` times, int64."""
    table = torch.tensor(values, dtype=torch.int64)
    return table.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
