"""What goes into the engine and what comes out. Free of torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image

MAX_SEED = 2**64 - 1

Pair = tuple[int, int]
MICRO_CONDITIONING = ("original_size", "crops_coords_top_left", "target_size")
"""Fields by diffusers' names, a pair each: heights before widths, tops before lefts."""

_PAIR = re.compile(r"\s*[\[(]?\s*(\d{1,9})\s*,\s*(\d{1,9})\s*[\])]?\s*")


def read_pair(value: object) -> Pair | None:
    """Two numbers from 0 of a list, or of text such as ``[768, 1024]``; None where it is neither."""
    if isinstance(value, str) and (match := _PAIR.fullmatch(value)) is not None:
        return int(match[1]), int(match[2])
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_integer, value)):
        first, second = int(value[0]), int(value[1])
        return (first, second) if min(first, second) >= 0 else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one prompt is to be drawn; None takes the model's default.

    Args:
        height: Image height in pixels.
        width: Image width in pixels.
        num_inference_steps: Denoise steps, at least 1.
        true_cfg_scale: Classic guidance, at least 0; active when > 1 and a negative prompt is given.
        guidance_scale: Embedded scale of a guidance-distilled model, or classic guidance where the family's
            pipeline calls it so (Stable Diffusion); at least 0.
        negative_prompt: None is none; ``""`` and ``" "`` are real negative prompts.
        seed: 0 … 2⁶⁴−1.
        num_images_per_prompt: Images of this prompt; image *k* is drawn with ``seed + k`` (mod 2⁶⁴).
        lora: Adapter name or path.
        lora_scale: Strength of the adapter.
        slo_ms: Within how many milliseconds of its arrival it should be done, for the policy ``deadline``.
        original_size, crops_coords_top_left, target_size: SDXL's micro-conditioning, two integers of at least
            0 each; None takes the picture's own size, uncropped.

    Raises:
        ValueError: A value is outside its range; the message names the field.
    """

    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    true_cfg_scale: float | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    num_images_per_prompt: int = 1
    lora: str | None = None
    lora_scale: float = 1.0
    slo_ms: float | None = None
    original_size: Pair | None = None
    crops_coords_top_left: Pair | None = None
    target_size: Pair | None = None

    def __post_init__(self) -> None:
        if self.num_images_per_prompt is None:
            raise ValueError("num_images_per_prompt must be an integer of at least 1, got None")
        # Millions of rows pass here: what is not given, and plain numbers, are settled without a call.
        counts = (self.height, self.width, self.num_inference_steps, self.num_images_per_prompt)
        for name, value in zip(_COUNTS, counts, strict=True):
            if value is None or (type(value) is int and value >= 1):
                continue
            if not (_is_integer(value) and int(value) >= 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        for name, scale in (("true_cfg_scale", self.true_cfg_scale), ("guidance_scale", self.guidance_scale)):
            if scale is not None and not (_is_finite(scale) and scale >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, got {scale!r}")
        seed = self.seed
        if seed is not None and not (_is_integer(seed) and 0 <= int(seed) <= MAX_SEED):
            raise ValueError(f"seed must be an integer from 0 to 2**64-1, got {seed!r}")
        if not _is_finite(self.lora_scale):
            raise ValueError(f"lora_scale must be a finite number, got {self.lora_scale!r}")
        if self.slo_ms is not None and not (_is_finite(self.slo_ms) and self.slo_ms > 0):
            raise ValueError(f"slo_ms must be a finite number above 0, got {self.slo_ms!r}")
        self._check_pairs()
        for name, text in (("negative_prompt", self.negative_prompt), ("lora", self.lora)):
            if text is not None and not isinstance(text, str):
                raise ValueError(f"{name} must be a string or None, got {text!r}")

    def _check_pairs(self) -> None:
        for name in MICRO_CONDITIONING:
            pair = getattr(self, name)
            if pair is not None and not (isinstance(pair, tuple) and read_pair(pair) is not None):
                raise ValueError(f"{name} must be a pair of integers of at least 0, got {pair!r}")


_COUNTS = ("height", "width", "num_inference_steps", "num_images_per_prompt")


def _is_integer(value: object) -> bool:
    # True is an int to Python, but no height.
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, (float, int, Real)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One image to draw, every parameter resolved: the engine's unit.

    ``request_id`` is unique among the requests of an engine and opaque to it. ``true_cfg_scale`` is the scale
    of classic guidance whatever the family calls it, see ``Capabilities.resolve_guidance``. With
    ``guides_from_nothing`` a negative prompt that is not given is no text at all, which is not the empty one.
    """

    request_id: str
    prompt: str
    height: int
    width: int
    num_inference_steps: int
    true_cfg_scale: float
    seed: int
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    lora: str | None = None
    lora_scale: float = 1.0
    slo_ms: float | None = None
    guides_from_nothing: bool = False
    original_size: Pair | None = None
    crops_coords_top_left: Pair | None = None
    target_size: Pair | None = None

    @property
    def cfg_active(self) -> bool:
        """Whether classic guidance is on: the rule of diffusers' pipelines, negative prompts resolved."""
        has_negative = self.negative_prompt is not None or self.guides_from_nothing
        return self.true_cfg_scale > 1 and has_negative


FinishReason = Literal["ok", "failed", "aborted"]
Status = Literal[FinishReason, "running"]


@dataclass(slots=True)
class RequestMetrics:
    """What one request cost. Times are in seconds, memory in bytes.

    ``device_s`` shares each step's device time out by tokens: summed over requests it is the time
    that the device was busy denoising. ``mean_batch_seqs`` is the mean number of sequences
    (guidance branches) in the packs this request ran in.
    """

    attempts: int = 1
    cfg_active: bool = False
    num_tokens: int = 0
    prompt_tokens: int = 0
    truncated_tokens: int = 0
    steps_run: int = 0
    queue_s: float = 0.0
    encode_s: float = 0.0
    denoise_s: float = 0.0
    device_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    mean_batch_seqs: float = 0.0
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepState:
    """How far an unfinished request has come: with it the request can go on in another process.

    Args:
        step_index: Steps done, at least 1 and fewer than the request asks for.
        latents: float32 ``[S, C]`` after those steps, in host memory.
        metrics: So far; ``mean_batch_seqs`` is of those steps.
    """

    step_index: int
    latents: np.ndarray
    metrics: RequestMetrics


@dataclass(slots=True)
class RequestOutput:
    """A finished request, or a preview of an unfinished one.

    Args:
        request: What was asked.
        status: ``ok``, ``failed`` (``error_type`` and ``error`` say why) or ``aborted``; ``running`` is a
            preview, and more of the request follows.
        pixels: Decoded image, uint8 ``[height, width, 3]`` RGB; None unless ``ok`` or ``running``.
        metrics: What it cost, of a preview so far.
        error_type: ``nan``, ``out_of_memory``, ``model_error``, ``invalid_request`` or ``crash``.
        error: The message.
        step_index: Steps done, earlier runs included.
    """

    request: Request
    status: Status
    pixels: np.ndarray | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error_type: str | None = None
    error: str | None = None
    step_index: int = 0

    @property
    def finished(self) -> bool:
        """False of a preview."""
        return self.status != "running"

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def image(self) -> PIL.Image.Image:
        """The image as PIL RGB.

        Raises:
            ValueError: The request did not finish with an image.
        """
        if self.pixels is None:
            raise ValueError(f"request {self.request_id!r} has no image: {self.status}: {self.error}")
        import PIL.Image

        return PIL.Image.fromarray(self.pixels)
