"""The contract between the engine and a model family.

A family is one file with one class that offers `DiffusionModel`. It knows its weights and its
arithmetic; which requests run together, when and for how long is none of its business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from offline_diffusion.attention.metadata import AttentionMetadata
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import Request

GuidanceRule = Literal["plain", "norm_rescale"]
"""How the two branches are combined; ``norm_rescale`` restores the positive branch's norm per token."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as token ids, cut to the model's limit.

    ``num_tokens`` is the length of the text stream, ``truncated_tokens`` how many of the prompt were cut.
    """

    input_ids: tuple[int, ...]
    num_tokens: int
    truncated_tokens: int

    def nothing(self) -> TokenizedPrompt:
        """No prompt at all, in a text stream as long as this one's."""
        return TokenizedPrompt((), self.num_tokens, 0)


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """An encoded prompt.

    Args:
        stream: ``[L, H]``, the text stream, ready for the first block.
        pooled: ``[P]``, the prompt as one vector; None in families that have none.
    """

    stream: Tensor
    pooled: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """L, the length of the text stream."""
        return self.stream.shape[0]


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Rotary angles of one sequence in joint order (text, then image), ``[S, D/2]`` float32 each."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SequenceInputs:
    """What one sequence has besides its text and latents, the same at every step.

    A family sets what it uses, and the same for all its sequences.

    Args:
        rotary: Angles of its tokens.
        img_positions: ``[S_img]`` int64, row of each image token in the family's own table of positions.
        vector: ``[V]``, what it is conditioned on besides its timestep.
    """

    rotary: RotaryTable | None = None
    img_positions: Tensor | None = None
    vector: Tensor | None = None


@dataclass(slots=True)
class PackedInput:
    """What a packed family's forward sees: two flat streams and how they fall into sequences.

    All but ``latents`` and ``conditioning`` are set by ``PackedBatch`` when the composition changes
    and stay; those two are refilled in place every step. N is the number of sequences; T_img and T_txt count
    tokens over all of them, T_joint is their sum.

    Args:
        latents: ``[T_img, C]`` float32, noisy image tokens of every sequence.
        conditioning: ``[N, …]``, what ``PackedModel.prepare_step`` made of the sequences' timesteps.
        prompt_embeds: ``[T_txt, H]``, the text stream at the blocks' width.
        img_sequence: ``[T_img]`` int64, the sequence of an image token.
        txt_sequence: ``[T_txt]`` int64, likewise for text tokens.
        img_to_joint: ``[T_img]`` int64, place of an image token in joint order.
        txt_to_joint: ``[T_txt]`` int64, place of a text token in joint order.
        rotary: Angles of every token in joint order; this and the next two None where the family's
            `SequenceInputs` have none.
        img_positions: ``[T_img]`` int64, see `SequenceInputs`.
        vectors: ``[N, V]``, likewise.
        img_attention: Bounds of the sequences: queries in the image stream, keys in joint order.
        txt_attention: Likewise for queries in the text stream.
    """

    latents: Tensor
    conditioning: Tensor
    prompt_embeds: Tensor
    img_sequence: Tensor
    txt_sequence: Tensor
    img_to_joint: Tensor
    txt_to_joint: Tensor
    rotary: RotaryTable | None
    img_positions: Tensor | None
    vectors: Tensor | None
    img_attention: AttentionMetadata
    txt_attention: AttentionMetadata

    @property
    def seqlens(self) -> tuple[int, ...]:
        """Text and image tokens of each sequence."""
        return self.img_attention.keys.seqlens


class DiffusionModel(Protocol):
    """A loaded model: what all families have. How steps are shared: `PackedModel` or `stacked.StackedModel`.

    Tensors it returns lie on ``device`` unless said otherwise.
    """

    capabilities: Capabilities
    device: torch.device
    dtype: torch.dtype
    num_latent_channels: int
    """Channels C of an image token, or of what a stacked family carries from step to step."""
    attention_backend: str

    def quantizable(self) -> Iterable[tuple[object, str]]:
        """Owner and attribute name of each large product that ``accel.quantize`` may replace."""
        ...

    def batch_key(self, request: Request) -> Any:
        """Requests with equal keys may share a step. Constant for packed families."""
        ...

    def tokenize(self, prompt: str) -> TokenizedPrompt:
        """Token ids as the family's diffusers pipeline makes them for this prompt alone. Host only."""
        ...

    def encode_shape(self, prompt: TokenizedPrompt) -> tuple[int, int]:
        """Prompts and tokens of the batch in which this one is encoded, by its own length alone.

        Prompts of one shape share a batch, which costs the same whether it is full or not.
        """
        ...

    def prepare_encode(self, prompts: Sequence[TokenizedPrompt]) -> list[PromptEmbeds]:
        """Each prompt encoded, its stream ``[num_tokens, H]``.

        A prompt's bits are the same whichever others are given with it.
        """
        ...

    def prepare_latents(self, request: Request) -> Tensor:
        """The request's own noise, ``[image tokens, C]`` on the CPU, as diffusers draws it."""
        ...

    def prepare_timesteps(self, request: Request) -> tuple[Tensor, Tensor]:
        """``sigmas`` ``[steps + 1]`` and ``timesteps`` ``[steps]``, float32 on the CPU."""
        ...

    def prepare_sequence(self, request: Request, prompt: PromptEmbeds) -> SequenceInputs:
        """What one guidance branch of a request has, from the request's own shape and values."""
        ...

    def post_decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """The image of one request's final ``latents`` ``[S, C]``: float32 ``[height, width, 3]``, 0 … 1."""
        ...


class PackedModel(DiffusionModel, Protocol):
    """A loaded model whose requests share a step as sequences of any shape."""

    guidance_rule: GuidanceRule

    def prepare_step(self, timesteps: Sequence[float], later: Iterable[float]) -> Tensor:
        """What `denoise_step` needs of the sequences' timesteps (0 … 1000), ``[N, …]``.

        Host code and uploads belong here, none into `denoise_step`. ``later`` are the timesteps that will
        be wanted next, the most urgent first.
        """
        ...

    def denoise_step(self, batch: PackedInput) -> Tensor:
        """Noise prediction ``[T_img, C]`` in the model's dtype."""
        ...
