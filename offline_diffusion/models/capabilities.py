"""What a model family can do and costs, known without loading weights. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, NamedTuple

from offline_diffusion.request import MICRO_CONDITIONING, Request, SamplingParams, read_pair


class BatchKind(Enum):
    """How a family shares a step between requests."""

    PACKED = "packed"
    """Any mix of shapes, progress and guidance in one ragged batch."""
    STACKED = "stacked"
    """Only requests of one latent shape, stacked along a batch axis."""


GuidanceMeaning = Literal["true_cfg", "embedded", "classic"]
"""What a family's diffusers pipeline makes of the two scales. ``true_cfg``: ``true_cfg_scale`` is classic
guidance, active with a negative prompt. ``embedded``: besides, ``guidance_scale`` is an input of the model.
``classic``: ``guidance_scale`` is classic guidance, and no negative prompt is an empty one."""


class Guidance(NamedTuple):
    """Both scales and the negative prompt, resolved.

    Classic guidance is on for ``true_cfg_scale`` above 1 with a negative prompt, whatever it is called.
    """

    true_cfg_scale: float
    guidance_scale: float | None
    negative_prompt: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Limits, defaults and the cost formula of one checkpoint.

    Args:
        family: Name in the registry.
        pipeline: Class name in ``model_index.json``.
        batch_kind: How requests share a step.
        default_height, default_width: Pixels.
        size_multiple: Height and width must be multiples of this.
        max_size: Largest height or width in pixels that the position tables reach.
        default_num_inference_steps, default_true_cfg_scale, default_guidance_scale: As the diffusers pipeline
            has them, or the model's card for a distilled one.
        max_prompt_tokens: Of the encoder that reads most.
        prompt_limits: Tokens that each text encoder reads, special ones included. Longer prompts are cut, and
            what any encoder has cut is recorded.
        padded_text_tokens: Text tokens of every sequence, where prompts are padded; None: a prompt's own.
        guidance: See `GuidanceMeaning`.
        patch_pixels: Pixels along one side of an image token.
        num_layers, hidden_size: For the FLOP formula.
        num_image_layers: Of the layers those with a second attention, over the image alone.
        num_parameters: Of the transformer's blocks, for the memory formula; 0 where it is not known.
        unet_flops: Of a UNet, which has no one width: FLOPs that a latent position adds to a forward, and
            that a pair of positions adds; they stand in for the formula of transformers.
        guides_from_nothing: Whether a ``classic`` family takes no negative prompt for no text at all, not for
            an empty one.
        tiled_decode: Whether large images are decoded in tiles, so that a decode's memory stops growing.
        supports_lora: Whether rows may name an adapter.
        micro_conditioning: Whether rows may give `MICRO_CONDITIONING`, in columns of these names.
        refused_columns: Columns that ask the family's diffusers pipeline for what is not built here, and what
            that is. Elsewhere they are carried like any other.
    """

    family: str
    pipeline: str
    batch_kind: BatchKind = BatchKind.PACKED
    default_height: int = 1024
    default_width: int = 1024
    size_multiple: int = 16
    max_size: int = 65_536
    default_num_inference_steps: int = 50
    default_true_cfg_scale: float = 4.0
    default_guidance_scale: float | None = None
    max_prompt_tokens: int = 512
    prompt_limits: Mapping[str, int] = field(default_factory=dict)
    padded_text_tokens: int | None = None
    guidance: GuidanceMeaning = "true_cfg"
    patch_pixels: int = 16
    num_layers: int = 60
    hidden_size: int = 3072
    num_image_layers: int = 0
    num_parameters: int = 0
    unet_flops: tuple[float, float] | None = None
    guides_from_nothing: bool = False
    tiled_decode: bool = False
    supports_lora: bool = False
    micro_conditioning: bool = False
    refused_columns: Mapping[str, str] = field(default_factory=dict)

    def num_image_tokens(self, height: int, width: int) -> int:
        """Image tokens of a ``height`` × ``width`` pixel image."""
        return (height // self.patch_pixels) * (width // self.patch_pixels)

    def own_tokens(self, num_tokens: int) -> int:
        """How many of this family's tokens cover what ``num_tokens`` of 16 × 16 pixels do."""
        return num_tokens * 16**2 // self.patch_pixels**2

    def num_text_tokens(self, num_prompt_tokens: int) -> int:
        """Text tokens of a sequence whose prompt has so many."""
        if self.padded_text_tokens is not None:
            return self.padded_text_tokens
        return min(num_prompt_tokens, self.max_prompt_tokens)

    def forward_flops(self, num_tokens: int, num_image_tokens: int = 0) -> float:
        """FLOPs of one forward of one sequence.

        24·H²·S·L for the projections and feed-forwards, 4·S²·H·L for attention; a second attention over the
        image is 8·H²·S + 4·S²·H of its own tokens.

        Args:
            num_tokens: S, image and text.
            num_image_tokens: Of these, where the family has layers for the image alone.
        """
        if self.unet_flops is not None:
            positions = num_image_tokens or num_tokens
            return self.unet_flops[0] * positions + self.unet_flops[1] * positions**2
        h, layers, s, i = self.hidden_size, self.num_layers, num_tokens, num_image_tokens
        joint = 24.0 * h * h * s * layers + 4.0 * s * s * h * layers
        return joint + (8.0 * h * h * i + 4.0 * i * i * h) * self.num_image_layers

    def step_bytes(self, num_tokens: int, bytes_per_value: int = 2) -> int:
        """Memory of the blocks and of a step of so many tokens: a lower bound, for plans.

        Parameters, and for each token 12·H values that live at once: its stream, normed rows, queries, keys
        and values, and what is widest of a feed-forward. Text encoders and the VAE come on top.
        """
        return (self.num_parameters + 12 * self.hidden_size * num_tokens) * bytes_per_value

    def with_defaults(self, overrides: Mapping[str, Any]) -> Capabilities:
        """A copy with other defaults: height, width, num_inference_steps, true_cfg_scale, guidance_scale."""
        known = {f"default_{key}": value for key, value in overrides.items() if value is not None}
        return replace(self, **known)

    def check_size(self, height: int, width: int) -> str | None:
        """Why this model cannot draw ``height`` × ``width`` pixels, or None when it can."""
        for name, value in (("height", height), ("width", width)):
            if value < 1 or value % self.size_multiple:
                return f"{name} must be a multiple of {self.size_multiple}, got {value}"
            if value > self.max_size:
                return f"{name} must be at most {self.max_size}, got {value}"
        return None

    def check_columns(self, carried: Mapping[str, Any]) -> tuple[str, str] | None:
        """The first of a row's other columns that must not be passed over, and why; or None."""
        for column, feature in self.refused_columns.items():
            if carried.get(column) is not None:
                return column, f"{feature} is not supported for model family {self.family!r}"
        if self.micro_conditioning:
            for column in MICRO_CONDITIONING:
                if (value := carried.get(column)) is not None and read_pair(value) is None:
                    return column, "must be two integers of at least 0, such as [768, 1024]"
        return None

    def pairs(self, carried: Mapping[str, Any]) -> dict[str, Any]:
        """What a row's other columns, which are checked, say of its micro-conditioning."""
        if not self.micro_conditioning:
            return {}
        found = {name: read_pair(carried.get(name)) for name in MICRO_CONDITIONING}
        return {name: pair for name, pair in found.items() if pair is not None}

    def check_request(self, request: Request) -> str | None:
        """Why this model cannot draw ``request``, or None when it can."""
        if (fault := self.check_size(request.height, request.width)) is not None:
            return fault
        if request.num_inference_steps < 1:
            return f"num_inference_steps must be at least 1, got {request.num_inference_steps}"
        if request.lora is not None and not self.supports_lora:
            return f"lora is not supported for model family {self.family!r}"
        for name in () if self.micro_conditioning else MICRO_CONDITIONING:
            if getattr(request, name) is not None:
                return f"{name} is not supported for model family {self.family!r}"
        return None

    def resolve_guidance(
        self, true_cfg_scale: float | None, guidance_scale: float | None, negative_prompt: str | None
    ) -> Guidance:
        """Fills in what is not given. A ``classic`` family takes either scale, ``guidance_scale`` first."""
        if self.guidance == "classic":
            given = (guidance_scale, true_cfg_scale, self.default_guidance_scale)
            scale = next(own for own in given if own is not None)
            wants_empty = negative_prompt is None and scale > 1 and not self.guides_from_nothing
            negative = "" if wants_empty else negative_prompt
            return Guidance(scale, scale, negative)
        true_scale = self.default_true_cfg_scale if true_cfg_scale is None else true_cfg_scale
        scale_in = self.default_guidance_scale if guidance_scale is None else guidance_scale
        return Guidance(true_scale, scale_in, negative_prompt)

    def resolve(self, request_id: str, prompt: str, params: SamplingParams, *, seed: int) -> Request:
        """Fills in the model's defaults.

        Raises:
            ValueError: The size does not fit the model, or it lacks what the parameters ask for.
        """
        height, width = params.height, params.width
        steps = params.num_inference_steps
        guidance = self.resolve_guidance(params.true_cfg_scale, params.guidance_scale, params.negative_prompt)
        request = Request(
            request_id=request_id,
            prompt=prompt,
            negative_prompt=guidance.negative_prompt,
            height=self.default_height if height is None else height,
            width=self.default_width if width is None else width,
            num_inference_steps=self.default_num_inference_steps if steps is None else steps,
            true_cfg_scale=guidance.true_cfg_scale,
            guidance_scale=guidance.guidance_scale,
            seed=seed,
            lora=params.lora,
            lora_scale=params.lora_scale,
            slo_ms=params.slo_ms,
            guides_from_nothing=self.guides_from_nothing,
            original_size=params.original_size,
            crops_coords_top_left=params.crops_coords_top_left,
            target_size=params.target_size,
        )
        if (fault := self.check_request(request)) is not None:
            raise ValueError(fault)
        return request
