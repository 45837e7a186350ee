"""What a model family can do and costs, known without loading weights. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from offline_diffusion.request import Request, SamplingParams


class BatchKind(Enum):
    """How a family shares a step between requests."""

    PACKED = "packed"
    """Any mix of shapes, progress and guidance in one ragged batch."""
    STACKED = "stacked"
    """Only requests of one latent shape, stacked along a batch axis."""


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
        default_num_inference_steps, default_true_cfg_scale: As the diffusers pipeline has them.
        max_prompt_tokens: Longer prompts are cut, and the cut is recorded.
        guidance: Meaning of guidance: ``true_cfg`` or ``embedded``.
        patch_pixels: Pixels along one side of an image token.
        num_layers, hidden_size: For the FLOP formula.
        supports_lora: Whether rows may name an adapter.
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
    max_prompt_tokens: int = 512
    guidance: str = "true_cfg"
    patch_pixels: int = 16
    num_layers: int = 60
    hidden_size: int = 3072
    supports_lora: bool = False

    def num_image_tokens(self, height: int, width: int) -> int:
        """Image tokens of a ``height`` × ``width`` pixel image."""
        return (height // self.patch_pixels) * (width // self.patch_pixels)

    def forward_flops(self, num_tokens: int) -> float:
        """FLOPs of one forward of one sequence of ``num_tokens`` image and text tokens.

        24·H²·S·L for the projections and feed-forwards, 4·S²·H·L for attention.
        """
        h, layers, s = self.hidden_size, self.num_layers, num_tokens
        return 24.0 * h * h * s * layers + 4.0 * s * s * h * layers

    def with_defaults(self, overrides: dict[str, Any]) -> Capabilities:
        """A copy with other defaults: height, width, num_inference_steps, true_cfg_scale."""
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

    def check_request(self, request: Request) -> str | None:
        """Why this model cannot draw ``request``, or None when it can."""
        if (fault := self.check_size(request.height, request.width)) is not None:
            return fault
        if request.num_inference_steps < 1:
            return f"num_inference_steps must be at least 1, got {request.num_inference_steps}"
        if request.lora is not None and not self.supports_lora:
            return f"lora is not supported for model family {self.family!r}"
        return None

    def resolve(self, request_id: str, prompt: str, params: SamplingParams, *, seed: int) -> Request:
        """Fills in the model's defaults.

        Raises:
            ValueError: The size does not fit the model, or it lacks what the parameters ask for.
        """
        height, width = params.height, params.width
        steps, scale = params.num_inference_steps, params.true_cfg_scale
        request = Request(
            request_id=request_id,
            prompt=prompt,
            negative_prompt=params.negative_prompt,
            height=self.default_height if height is None else height,
            width=self.default_width if width is None else width,
            num_inference_steps=self.default_num_inference_steps if steps is None else steps,
            true_cfg_scale=self.default_true_cfg_scale if scale is None else scale,
            guidance_scale=params.guidance_scale,
            seed=seed,
            lora=params.lora,
            lora_scale=params.lora_scale,
            slo_ms=params.slo_ms,
        )
        if (fault := self.check_request(request)) is not None:
            raise ValueError(fault)
        return request
