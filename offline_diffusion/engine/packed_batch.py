"""A pack of unlike requests as flat tensors: built when the composition changes, then stepped.

Layout. Sequences are ordered: the positive branch of every request, then the negative branches of
the guided ones. The image stream therefore begins with the tokens of ``latents`` as they are,
followed by a second copy of the guided requests' tokens. In *joint* order, which attention and
rotary angles use, each sequence is its text followed by its image.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from offline_diffusion.attention.metadata import AttentionMetadata
from offline_diffusion.engine.solver import SigmaTable, combine_guidance, euler_step
from offline_diffusion.models.base import DiffusionModel, PackedInput, RotaryTable
from offline_diffusion.request import Request


@dataclass(slots=True, eq=False)
class PreparedRequest:
    """A request with everything its steps need.

    Args:
        request: What was asked; its size is in pixels.
        prompt_embeds: ``[L, H]`` on the device.
        negative_embeds: ``[L', H]`` on the device, None when guidance is off.
        sigmas: ``[steps + 1]`` float32, CPU.
        timesteps: ``[steps]`` float32, CPU.
        latents: ``[S, C]`` float32 on the device. Set at the start and whenever a pack lets go.
        step_index: Steps done.
        encode_s: Seconds that preparing took, of a batch of prompts its share.
    """

    request: Request
    prompt_embeds: Tensor
    negative_embeds: Tensor | None
    sigmas: Tensor
    timesteps: Tensor
    latents: Tensor
    step_index: int = 0
    encode_s: float = 0.0

    @property
    def num_image_tokens(self) -> int:
        return self.latents.shape[0]


@dataclass(slots=True)
class _Sequence:
    """One guidance branch: whose it is, and its text."""

    owner: int
    prompt_embeds: Tensor
    num_image_tokens: int
    rotary: RotaryTable

    @property
    def length(self) -> int:
        return self.prompt_embeds.shape[0] + self.num_image_tokens


@dataclass(slots=True)
class PackedBatch:
    """The device tensors of one composition. T counts image tokens of all requests, each once.

    Args:
        requests: Those packed, in order.
        latents: ``[T, C]`` float32, current; replaced every step.
        sigmas: Schedules and progress.
        model_input: What the forward sees; its latents and timesteps are refreshed every step.
        img_source: ``[T_img]`` int64, token of ``latents`` that an image token repeats; set once.
        guided: ``[T_guided]`` int64, tokens of ``latents`` under guidance; set once.
        guidance_scale: ``[T_guided, 1]`` float32; set once.
        owner: ``[T]`` int64, request of each token; set once.
        num_seqs: Guidance branches; set once.
    """

    requests: list[PreparedRequest]
    latents: Tensor
    sigmas: SigmaTable
    model_input: PackedInput
    img_source: Tensor
    guided: Tensor
    guidance_scale: Tensor
    owner: Tensor
    num_seqs: int

    @classmethod
    def build(cls, requests: list[PreparedRequest], model: DiffusionModel) -> PackedBatch:
        """Packs ``requests``; host work and copies happen here, and only here."""
        device = model.device
        lengths = [request.num_image_tokens for request in requests]
        spans = _spans(lengths)  # of each request in latents
        guided = [index for index, request in enumerate(requests) if request.negative_embeds is not None]
        sequences = _sequences(requests, guided, model)
        latents = torch.cat([request.latents for request in requests])
        sigmas = SigmaTable(
            [request.sigmas for request in requests],
            [request.timesteps for request in requests],
            [request.step_index for request in requests],
            device,
        )
        scales = [requests[index].request.true_cfg_scale for index in guided]
        guided_lengths = [lengths[index] for index in guided]
        guided_tokens = _ranges([spans[index] for index in guided])
        return cls(
            requests=requests,
            latents=latents,
            sigmas=sigmas,
            model_input=_model_input(sequences, latents, sigmas, device),
            img_source=torch.cat((torch.arange(sum(lengths)), guided_tokens)).to(device, non_blocking=True),
            guided=guided_tokens.to(device, non_blocking=True),
            guidance_scale=_repeat(scales, guided_lengths, torch.float32)
            .unsqueeze(1)
            .to(device, non_blocking=True),
            owner=_repeat(range(len(requests)), lengths, torch.int64).to(device, non_blocking=True),
            num_seqs=len(sequences),
        )

    def refresh(self) -> PackedInput:
        """The forward's input at the current step."""
        self.model_input.latents = self.latents.index_select(0, self.img_source)
        self.model_input.timesteps = self.sigmas.current_timesteps()
        return self.model_input

    def step_scheduler(self, noise_pred: Tensor, model: DiffusionModel) -> None:
        """Combines the branches and moves every request one step on.

        Args:
            noise_pred: ``[T_img, C]`` as the forward returned it.
        """
        num_tokens = self.latents.shape[0]
        combined = noise_pred[:num_tokens].float()
        if self.guided.numel():
            positive, negative = combined.index_select(0, self.guided), noise_pred[num_tokens:].float()
            guided = combine_guidance(positive, negative, self.guidance_scale, model.guidance_rule)
            combined = combined.index_copy(0, self.guided, guided)
        delta = self.sigmas.sigma_deltas().index_select(0, self.owner).unsqueeze(1)
        self.latents = euler_step(self.latents, combined, delta)
        self.sigmas.advance()
        for request in self.requests:
            request.step_index += 1

    def release(self) -> None:
        """Gives every request its latents back (views), before the pack is rebuilt or dropped."""
        parts = self.latents.split([request.num_image_tokens for request in self.requests])
        for request, latents in zip(self.requests, parts, strict=True):
            request.latents = latents


def _sequences(requests: list[PreparedRequest], guided: list[int], model: DiffusionModel) -> list[_Sequence]:
    branches = [(index, request.prompt_embeds) for index, request in enumerate(requests)]
    for index in guided:
        embeds = requests[index].negative_embeds
        assert embeds is not None
        branches.append((index, embeds))
    sequences = []
    for index, embeds in branches:
        request = requests[index]
        rotary = model.rotary_table(request.request.height, request.request.width, embeds.shape[0])
        sequences.append(_Sequence(index, embeds, request.num_image_tokens, rotary))
    return sequences


def _model_input(
    sequences: list[_Sequence], latents: Tensor, sigmas: SigmaTable, device: torch.device
) -> PackedInput:
    txt_lengths = [sequence.prompt_embeds.shape[0] for sequence in sequences]
    img_lengths = [sequence.num_image_tokens for sequence in sequences]
    owners = [sequence.owner for sequence in sequences]
    spans = _spans([sequence.length for sequence in sequences])  # in joint order
    txt_spans = [(start, start + length) for (start, _), length in zip(spans, txt_lengths, strict=True)]
    img_spans = [(stop - length, stop) for (_, stop), length in zip(spans, img_lengths, strict=True)]

    def upload(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return PackedInput(
        latents=latents,
        timesteps=sigmas.current_timesteps(),
        prompt_embeds=torch.cat([sequence.prompt_embeds for sequence in sequences]),
        img_request=upload(_repeat(owners, img_lengths, torch.int64)),
        txt_request=upload(_repeat(owners, txt_lengths, torch.int64)),
        img_to_joint=upload(_ranges(img_spans)),
        txt_to_joint=upload(_ranges(txt_spans)),
        rotary=RotaryTable(
            torch.cat([sequence.rotary.cos for sequence in sequences]),
            torch.cat([sequence.rotary.sin for sequence in sequences]),
        ),
        attention=AttentionMetadata.from_seqlens([sequence.length for sequence in sequences], device),
    )


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    stops = list(accumulate(lengths))
    return [(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def _ranges(spans: list[tuple[int, int]]) -> Tensor:
    """All positions of ``spans`` in order, int64."""
    parts = [torch.arange(start, stop) for start, stop in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _repeat(values: list[int] | list[float] | range, lengths: list[int], dtype: torch.dtype) -> Tensor:
    """``values[i]`` repeated ``lengths[i]`` times."""
    table = torch.tensor(list(values), dtype=dtype)
    return table.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
