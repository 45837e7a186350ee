"""How much work a manifest holds, and how its shards fall on tasks. Free of torch.

A plan is taken in one pass and keeps no rows: its memory grows with the number of shards and of
distinct sizes only.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from offline_diffusion.config import ImageFormat
from offline_diffusion.data.rows import ManifestRow, RowDefaults, RowFault, fit_size
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import SamplingParams

BYTES_PER_PIXEL: dict[ImageFormat, float] = {"png": 1.45, "jpeg": 0.45, "webp": 1.2}
"""Rough sizes of encoded photographs, see bench_encode.py; a drawing is smaller, noise larger."""

UTF8_BYTES_PER_TOKEN = 4.0
"""Rough for English, and for Chinese, where a character is three bytes."""

_MAX_CACHED_SIZES = 65_536


def task_shards(num_shards: int, num_tasks: int, task_index: int) -> range:
    """The shards that task ``task_index`` of ``num_tasks`` owns: every ``num_tasks``-th.

    Depends on nothing else, so that every task knows its shards before the manifest is read.
    """
    assert 0 <= task_index < num_tasks
    return range(task_index, num_shards, num_tasks)


def assign_shards(costs: Sequence[float], num_tasks: int) -> list[list[int]]:
    """Deals shards out so that the most loaded task has little more than the mean.

    The dearest shard goes first, always to the least loaded task (Graham's LPT rule: at most 4/3 of
    the optimum). Equal loads go by task index, so the result is deterministic.

    Returns:
        For each task its shards in ascending order.
    """
    loads = [(0.0, task) for task in range(num_tasks)]
    shards: list[list[int]] = [[] for _ in range(num_tasks)]
    for shard in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, task = heapq.heappop(loads)
        shards[task].append(shard)
        heapq.heappush(loads, (load + costs[shard], task))
    return [sorted(owned) for owned in shards]


def estimate_text_tokens(text: str) -> int:
    """Tokens of a text, guessed from its UTF-8 length; at least 1."""
    return max(1, round(len(text.encode("utf-8", "surrogatepass")) / UTF8_BYTES_PER_TOKEN))


class PackingModel:
    """How full the token budget is when images are admitted in manifest order as soon as they fit.

    Args:
        max_num_batched_tokens: Token budget of a step; a single larger image runs alone.
        max_num_seqs: Most images in a step.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self._running: list[tuple[int, int]] = []  # (last step, tokens), a heap
        self._tokens = 0
        self._step = 0
        self._end = 0
        self._token_steps = 0

    def add(self, num_tokens: int, num_steps: int) -> None:
        """Admits one image of ``num_tokens`` in all its sequences for ``num_steps`` steps."""
        num_tokens = min(num_tokens, self.max_num_batched_tokens)
        room = self.max_num_batched_tokens - num_tokens
        while self._tokens > room or len(self._running) >= self.max_num_seqs:
            self._step, tokens = heapq.heappop(self._running)
            self._tokens -= tokens
        end = self._step + num_steps
        heapq.heappush(self._running, (end, num_tokens))
        self._tokens += num_tokens
        self._token_steps += num_tokens * num_steps
        self._end = max(self._end, end)

    @property
    def num_steps(self) -> int:
        """Engine steps until the last image is done."""
        return self._end

    @property
    def step_fill(self) -> float:
        """Share of the token budget in use over all steps, 0 to 1."""
        return self._token_steps / (self._end * self.max_num_batched_tokens) if self._end else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLoad:
    """What one task has to do; ``flops`` of its denoise steps."""

    task_index: int
    num_shards: int
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a manifest asks for.

    Args:
        num_rows, num_good_rows: All rows, and those the model can draw.
        num_images, num_cfg_images: Images, and those with both guidance branches.
        num_guidance_off_rows: Rows whose true_cfg_scale is without effect for want of a negative prompt.
        resolutions: ``(width, height)`` drawn → images, most frequent first.
        inference_steps: Denoise steps → images, ascending.
        faults: What the model cannot draw: reason → rows.
        image_tokens, text_tokens: Of one forward of every sequence; text tokens are estimated.
        step_tokens: Tokens times steps, over all sequences.
        flops: Of all denoise steps; encoding prompts and decoding images come on top.
        num_steps, step_fill: Engine steps on one worker, and the filled share of their budget.
        output_bytes: Estimated size of the encoded images.
        num_shards: Output shards.
        tasks: What each task has to do.
        balanced_flops: Load of the busiest task if shards were dealt out by cost.
    """

    num_rows: int
    num_good_rows: int
    num_images: int
    num_cfg_images: int
    num_guidance_off_rows: int
    resolutions: dict[tuple[int, int], int]
    inference_steps: dict[int, int]
    faults: dict[str, int]
    image_tokens: int
    text_tokens: int
    step_tokens: int
    flops: float
    num_steps: int
    step_fill: float
    output_bytes: int
    num_shards: int
    tasks: list[TaskLoad]
    balanced_flops: float

    @property
    def slowest_task_flops(self) -> float:
        return max(task.flops for task in self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON's types; resolutions are spelled ``WIDTHxHEIGHT``."""
        values = asdict(self)
        values["resolutions"] = {f"{w}x{h}": count for (w, h), count in self.resolutions.items()}
        values["inference_steps"] = {str(steps): n for steps, n in self.inference_steps.items()}
        return values


class _Size(NamedTuple):
    """What rows that ask for one size have in common."""

    drawn: tuple[int, int]  # width, height
    image_tokens: int
    final_pixels: int
    fault: str | None


@dataclass(slots=True)
class _Totals:
    """Counts over the rows added so far, by the names they have in ``Plan``."""

    num_rows: int = 0
    num_good_rows: int = 0
    num_images: int = 0
    num_cfg_images: int = 0
    num_guidance_off_rows: int = 0
    image_tokens: int = 0
    text_tokens: int = 0
    step_tokens: int = 0
    flops: float = 0.0


class PlanBuilder:
    """Adds rows up to a ``Plan``.

    Args:
        capabilities: The model's limits, defaults and cost formula.
        defaults: The job's values for rows that are silent.
        shard_size: Rows of a shard.
        max_num_batched_tokens, max_num_seqs: The budget of a step.
        image_format: For the size of the output.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        defaults: RowDefaults,
        *,
        shard_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        image_format: ImageFormat = "png",
    ) -> None:
        self._capabilities = capabilities
        self._defaults = defaults
        self._shard_size = shard_size
        self._image_format = image_format
        self._packing = PackingModel(max_num_batched_tokens, max_num_seqs)
        self._sizes: dict[tuple[int | None, int | None], _Size] = {}
        self._costs = array("d")
        self._totals = _Totals()
        self._resolutions: Counter[tuple[int, int]] = Counter()
        self._steps: Counter[int] = Counter()
        self._faults: Counter[str] = Counter()
        self._final_pixels = 0

    @property
    def num_rows(self) -> int:
        """Rows added so far."""
        return self._totals.num_rows

    def add(self, row: ManifestRow | RowFault) -> None:
        """Counts one row, good or faulty."""
        self._totals.num_rows += 1
        shard = row.row // self._shard_size
        while len(self._costs) <= shard:
            self._costs.append(0.0)
        if isinstance(row, RowFault):
            return
        size = self._size(row.params.height, row.params.width)
        fault = size.fault or self._lora_fault(row.params)
        if fault is not None:
            self._faults[fault] += 1
            return
        self._costs[shard] += self._add_images(row, size)

    def _add_images(self, row: ManifestRow, size: _Size) -> float:
        params, totals, num_images = row.params, self._totals, row.params.num_images_per_prompt
        default_steps = self._defaults.num_inference_steps or self._capabilities.default_num_inference_steps
        num_steps = params.num_inference_steps or default_steps
        text_tokens = self._text_tokens_of_branches(row)
        tokens = [size.image_tokens + text for text in text_tokens]
        forward = sum(tokens)
        flops = sum(map(self._capabilities.forward_flops, tokens)) * num_steps * num_images
        totals.num_good_rows += 1
        totals.num_images += num_images
        totals.num_cfg_images += num_images if len(tokens) > 1 else 0
        totals.image_tokens += size.image_tokens * len(tokens) * num_images
        totals.text_tokens += sum(text_tokens) * num_images
        totals.step_tokens += forward * num_steps * num_images
        totals.flops += flops
        self._resolutions[size.drawn] += num_images
        self._steps[num_steps] += num_images
        self._final_pixels += size.final_pixels * num_images
        for _ in range(num_images):
            self._packing.add(forward, num_steps)
        return flops

    def _text_tokens_of_branches(self, row: ManifestRow) -> list[int]:
        """Of the prompt and, where guidance is on, of the negative prompt."""
        params, defaults, limit = row.params, self._defaults, self._capabilities.max_prompt_tokens
        tokens = [min(estimate_text_tokens(row.prompt), limit)]
        negative = defaults.negative_prompt if params.negative_prompt is None else params.negative_prompt
        asked = defaults.true_cfg_scale if params.true_cfg_scale is None else params.true_cfg_scale
        scale = self._capabilities.default_true_cfg_scale if asked is None else asked
        if scale > 1 and negative is None:
            self._totals.num_guidance_off_rows += 1
        elif scale > 1 and negative is not None:
            tokens.append(min(estimate_text_tokens(negative), limit))
        return tokens

    def _lora_fault(self, params: SamplingParams) -> str | None:
        if params.lora is None or self._capabilities.supports_lora:
            return None
        return f"lora is not supported for model family {self._capabilities.family!r}"

    def _size(self, height: int | None, width: int | None) -> _Size:
        key = height, width
        size = self._sizes.get(key)
        if size is None:
            if len(self._sizes) >= _MAX_CACHED_SIZES:
                self._sizes.clear()
            size = self._sizes[key] = self._resolve_size(height, width)
        return size

    def _resolve_size(self, height: int | None, width: int | None) -> _Size:
        defaults, capabilities = self._defaults, self._capabilities
        height = height or defaults.height or capabilities.default_height
        width = width or defaults.width or capabilities.default_width
        drawn = fit_size(height, width, capabilities.size_multiple, defaults.on_bad_size)
        final = (height, width) if defaults.on_bad_size == "crop" else drawn
        return _Size(
            drawn=(drawn[1], drawn[0]),
            image_tokens=capabilities.num_image_tokens(*drawn),
            final_pixels=final[0] * final[1],
            fault=capabilities.check_size(*drawn),
        )

    def finish(self, num_tasks: int = 1) -> Plan:
        """The plan over the rows added so far, for ``num_tasks`` tasks."""
        balanced = assign_shards(self._costs, num_tasks)
        return Plan(
            **asdict(self._totals),
            resolutions=dict(sorted(self._resolutions.items(), key=lambda item: (-item[1], item[0]))),
            inference_steps=dict(sorted(self._steps.items())),
            faults=dict(self._faults.most_common()),
            num_steps=self._packing.num_steps,
            step_fill=self._packing.step_fill,
            output_bytes=round(self._final_pixels * BYTES_PER_PIXEL[self._image_format]),
            num_shards=len(self._costs),
            tasks=[self._task_load(task, num_tasks) for task in range(num_tasks)],
            balanced_flops=max(self._load(owned) for owned in balanced),
        )

    def _task_load(self, task_index: int, num_tasks: int) -> TaskLoad:
        owned = task_shards(len(self._costs), num_tasks, task_index)
        return TaskLoad(task_index=task_index, num_shards=len(owned), flops=self._load(owned))

    def _load(self, shards: Sequence[int]) -> float:
        return sum(self._costs[shard] for shard in shards)
