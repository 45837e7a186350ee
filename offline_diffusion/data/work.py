"""How much work a row is, told without a model: for plans, and for dealing shards out by cost."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from offline_diffusion.data.rows import ManifestRow, RowDefaults, RowFault, fit_size, given_scales
from offline_diffusion.models.capabilities import Capabilities

UTF8_BYTES_PER_TOKEN = 4.0
"""Rough for English, and for Chinese, where a character is three bytes."""

_MAX_CACHED_SIZES = 65_536


def estimate_text_tokens(text: str) -> int:
    """Tokens of a text, guessed from its UTF-8 length; at least 1."""
    return max(1, round(len(text.encode("utf-8", "surrogatepass")) / UTF8_BYTES_PER_TOKEN))


class Size(NamedTuple):
    """What rows that ask for one size have in common; ``drawn`` is width and height in pixels."""

    drawn: tuple[int, int]
    image_tokens: int
    final_pixels: int
    fault: str | None


class Work(NamedTuple):
    """What a row that can be drawn asks for.

    Args:
        size: Of its images.
        prompts: The prompt and, where guidance is on, the negative prompt.
        text_tokens: Of each of those, estimated.
        num_steps: Denoise steps of an image.
        num_images: That many are alike.
        flops: Of all denoise steps of all images.
        guidance_is_off: Guidance is asked for, but there is no negative prompt.
    """

    size: Size
    prompts: list[str]
    text_tokens: list[int]
    num_steps: int
    num_images: int
    flops: float
    guidance_is_off: bool


class WorkMeter:
    """Tells the work of rows.

    Args:
        capabilities: The model's limits, defaults and cost formula.
        defaults: The job's values for rows that are silent.
    """

    def __init__(self, capabilities: Capabilities, defaults: RowDefaults) -> None:
        self._capabilities, self._defaults = capabilities, defaults
        self._sizes: dict[tuple[int | None, int | None], Size] = {}

    def measure(self, row: ManifestRow) -> Work | str:
        """The work of a row, or why the model cannot draw it."""
        capabilities, params = self._capabilities, row.params
        size = self._size(params.height, params.width)
        if size.fault is not None:
            return size.fault
        if (refused := capabilities.check_columns(row.carried)) is not None:
            return refused[1]
        if params.lora is not None and not capabilities.supports_lora:
            return f"lora is not supported for model family {capabilities.family!r}"
        default_steps = self._defaults.num_inference_steps or capabilities.default_num_inference_steps
        num_steps = params.num_inference_steps or default_steps
        prompts, guidance_is_off = self._prompts_of_branches(row)
        text_tokens = [capabilities.num_text_tokens(estimate_text_tokens(text)) for text in prompts]
        image = size.image_tokens
        flops = sum(capabilities.forward_flops(image + text, image) for text in text_tokens)
        num_images = params.num_images_per_prompt
        flops *= num_steps * num_images
        return Work(size, prompts, text_tokens, num_steps, num_images, flops, guidance_is_off)

    def _prompts_of_branches(self, row: ManifestRow) -> tuple[list[str], bool]:
        params, defaults = row.params, self._defaults
        scale, _, negative = self._capabilities.resolve_guidance(
            *given_scales(params, defaults, self._capabilities),
            defaults.negative_prompt if params.negative_prompt is None else params.negative_prompt,
        )
        if scale > 1 and (negative is not None or self._capabilities.guides_from_nothing):
            return [row.prompt, negative or ""], False
        return [row.prompt], scale > 1

    def _size(self, height: int | None, width: int | None) -> Size:
        key = height, width
        size = self._sizes.get(key)
        if size is None:
            if len(self._sizes) >= _MAX_CACHED_SIZES:
                self._sizes.clear()
            size = self._sizes[key] = self._resolve_size(height, width)
        return size

    def _resolve_size(self, height: int | None, width: int | None) -> Size:
        defaults, capabilities = self._defaults, self._capabilities
        height = height or defaults.height or capabilities.default_height
        width = width or defaults.width or capabilities.default_width
        drawn = fit_size(height, width, capabilities.size_multiple, defaults.on_bad_size)
        final = (height, width) if defaults.on_bad_size == "crop" else drawn
        return Size(
            drawn=(drawn[1], drawn[0]),
            image_tokens=capabilities.num_image_tokens(*drawn),
            final_pixels=final[0] * final[1],
            fault=capabilities.check_size(*drawn),
        )


class ShardCosts:
    """Adds up the work of every shard of a manifest, 8 bytes a shard: FLOPs of all denoise steps.

    Rows must be added in order. One that repeats an id counts although it will not be drawn: that is
    known only at the end, and what counts is that every task comes to the same numbers.

    Args:
        meter: Tells the work of a row.
        shard_size: Rows of a shard.
    """

    def __init__(self, meter: WorkMeter, shard_size: int) -> None:
        self.shard_size = shard_size
        self.values = array("d")
        self._meter = meter

    def add(self, row: ManifestRow | RowFault) -> None:
        """Counts one row, good or faulty."""
        shard = row.row // self.shard_size
        while len(self.values) <= shard:
            self.values.append(0.0)
        if isinstance(row, ManifestRow):
            work = self._meter.measure(row)
            if isinstance(work, Work):
                self.values[shard] += work.flops
