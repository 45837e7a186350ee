"""A model small enough to have a closed form, for tests of the engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.models.base import (
    GuidanceRule,
    PackedInput,
    PromptEmbeds,
    RotaryTable,
    SequenceInputs,
    TokenizedPrompt,
)
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import Request

PATCH = 16
CHANNELS = 3
CAPABILITIES = Capabilities(
    family="fake",
    pipeline="FakePipeline",
    default_height=32,
    default_width=32,
    size_multiple=PATCH,
    patch_pixels=PATCH,
    max_prompt_tokens=40,
    default_num_inference_steps=4,
)


def _nothing(*_: Any) -> None:
    pass


class Clock:
    """Stands still but for what a test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeModel:
    """Offers ``DiffusionModel``; a token is a character, a text token's value its code / 100.

    The noise prediction of an image token ``x`` is ``x / 2 + mean of its own text + t / 1000``, so
    every row has an answer that can be worked out alone (`expected_latents`).

    Prompts are encoded ``encode_rows`` together whose lengths round up to the same ten. The ``on_*`` hooks
    are called first in each stage (``on_encode`` for every prompt) and may raise.
    """

    capabilities = CAPABILITIES
    device = torch.device("cpu")
    dtype = torch.float32
    num_latent_channels = CHANNELS
    attention_backend = "none"

    def __init__(self, guidance_rule: GuidanceRule = "plain") -> None:
        self.guidance_rule: GuidanceRule = guidance_rule
        self.encoded: Counter[str] = Counter()
        self.encode_calls: list[list[str]] = []
        self.encode_rows = 4
        self.num_sequences = 0
        self.later: list[float] = []
        self.on_tokenize: Callable[[str], None] = _nothing
        self.on_encode: Callable[[str], None] = _nothing
        self.on_denoise: Callable[[PackedInput], None] = _nothing
        self.on_decode: Callable[[int, int], None] = _nothing

    def batch_key(self, request: Request) -> None:
        return None

    def tokenize(self, prompt: str) -> TokenizedPrompt:
        self.on_tokenize(prompt)
        kept = prompt[: self.capabilities.max_prompt_tokens]
        return TokenizedPrompt(tuple(map(ord, kept)), len(kept), len(prompt) - len(kept))

    def encode_shape(self, prompt: TokenizedPrompt) -> tuple[int, int]:
        return self.encode_rows, 10 * -(len(prompt.input_ids) // -10)

    def prepare_encode(self, prompts: Sequence[TokenizedPrompt]) -> list[PromptEmbeds]:
        texts = ["".join(map(chr, prompt.input_ids)) for prompt in prompts]
        self.encode_calls.append(texts)
        for text in texts:
            self.on_encode(text)
        self.encoded.update(texts)
        values = (torch.tensor(own.input_ids, dtype=torch.float32) / 100 for own in prompts)
        return [PromptEmbeds(own.unsqueeze(1)) for own in values]

    def prepare_latents(self, request: Request) -> Tensor:
        generator = torch.Generator().manual_seed(request.seed)
        num_tokens = self.capabilities.num_image_tokens(request.height, request.width)
        return torch.randn(num_tokens, CHANNELS, generator=generator)

    def prepare_timesteps(self, request: Request) -> tuple[Tensor, Tensor]:
        sigmas = torch.linspace(1, 0, request.num_inference_steps + 1)
        return sigmas, sigmas[:-1] * 1000

    def prepare_sequence(self, request: Request, prompt: PromptEmbeds) -> SequenceInputs:
        self.num_sequences += 1
        num_tokens = self.capabilities.num_image_tokens(request.height, request.width) + prompt.num_tokens
        return SequenceInputs(rotary=RotaryTable(torch.ones(num_tokens, 1), torch.zeros(num_tokens, 1)))

    def prepare_step(self, timesteps: Sequence[float], later: Iterable[float]) -> Tensor:
        self.later = list(later)
        return torch.tensor(timesteps)

    def denoise_step(self, batch: PackedInput) -> Tensor:
        self.on_denoise(batch)
        starts = batch.img_attention.keys.cu_seqlens[1:].long()
        own_txt = torch.searchsorted(starts, batch.txt_to_joint, right=True)
        own_img = torch.searchsorted(starts, batch.img_to_joint, right=True)
        sums = torch.zeros(len(starts)).index_add(0, own_txt, batch.prompt_embeds.squeeze(1))
        means = sums / torch.bincount(own_txt, minlength=len(starts))
        times = batch.conditioning[batch.img_sequence] / 1000
        return batch.latents / 2 + (means[own_img] + times).unsqueeze(1)

    def post_decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        self.on_decode(height, width)
        return to_pixels(latents, height, width).float() / 255


class ManualClock:
    """Moves on by one millisecond a look, or by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class FakeRecorder:
    """Replays by running the work again; counts."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay


def to_pixels(latents: Tensor, height: int, width: int) -> Tensor:
    """Every token a square of one colour."""
    colours = (latents.double() * 25 + 128).clamp(0, 255).round().to(torch.uint8)
    grid = colours.view(height // PATCH, width // PATCH, CHANNELS)
    return grid.repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1)


def expected_latents(request: Request) -> Tensor:
    """What `FakeModel` with the plain guidance rule makes of a request, in float64, by hand."""
    shift = _text_mean(request.prompt)
    if request.negative_prompt is not None and request.true_cfg_scale > 1:
        negative = _text_mean(request.negative_prompt)
        shift = negative + request.true_cfg_scale * (shift - negative)
    generator = torch.Generator().manual_seed(request.seed)
    num_tokens = (request.height // PATCH) * (request.width // PATCH)
    x = torch.randn(num_tokens, CHANNELS, generator=generator).double()
    n = request.num_inference_steps
    for i in range(n):
        x = x - (x / 2 + shift + (n - i) / n) / n
    return x


def expected_pixels(request: Request) -> np.ndarray:
    return to_pixels(expected_latents(request), request.height, request.width).numpy()


def same_picture(pixels: np.ndarray | None, request: Request) -> bool:
    """Equal to the hand-made picture but for float32 rounding."""
    assert pixels is not None
    difference = pixels.astype(int) - expected_pixels(request).astype(int)
    return bool(np.abs(difference).max() <= 1)


def _text_mean(text: str) -> float:
    kept = text[: CAPABILITIES.max_prompt_tokens]
    return sum(map(ord, kept)) / len(kept) / 100


def make_request(name: str, prompt: str = "a red cup", **parameters: Any) -> Request:
    defaults: dict[str, Any] = {
        "height": 32,
        "width": 32,
        "num_inference_steps": 4,
        "true_cfg_scale": 1.0,
        "seed": sum(map(ord, name)),
    }
    return Request(request_id=name, prompt=prompt, **(defaults | parameters))


def has_text(batch: PackedInput, character: str) -> bool:
    """Whether a sequence of the pack has this character in its text."""
    return bool((batch.prompt_embeds == torch.tensor(ord(character) / 100)).any())


def num_joint_tokens(batch: PackedInput) -> int:
    return int(batch.img_attention.keys.cu_seqlens[-1])


MODES: dict[str, dict[str, Any]] = {
    "pack": {"scheduling_policy": "pack", "max_num_seqs": 5, "max_num_batched_tokens": 90},
    "fifo": {"scheduling_policy": "fifo", "max_num_seqs": 4, "max_num_batched_tokens": 120},
    "serial": {"max_num_seqs": 1},
    "waves": {"step_execution": False, "max_num_seqs": 3},
    "everything": {"max_num_seqs": 100},
}
"""Ways to run an engine that must not change a picture."""


def make_engine(model: FakeModel | None = None, **options: Any) -> Engine:
    return Engine(model or FakeModel(), EngineConfig(**options))


def random_requests(seed: int, count: int = 14) -> list[Request]:
    rng = random.Random(seed)
    return [
        make_request(
            f"{seed}-{index}",
            prompt="".join(rng.choices("abcdefgh ", k=rng.randint(1, 60))),
            negative_prompt=rng.choice([None, " ", "ugly"]),
            true_cfg_scale=rng.choice([0.0, 1.0, 2.0, 7.5]),
            height=16 * rng.randint(1, 4),
            width=16 * rng.randint(1, 4),
            num_inference_steps=rng.randint(1, 7),
            seed=rng.getrandbits(64),
        )
        for index in range(count)
    ]
