"""How much work a manifest holds, and how its shards fall on tasks. Free of torch.

A plan keeps no rows: its memory grows with the number of tasks, of shards and of distinct sizes only.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offline_diffusion.config import ImageFormat
from offline_diffusion.data.packing import PackingModel
from offline_diffusion.data.rows import ManifestRow, RowDefaults, RowFault
from offline_diffusion.data.work import Work, WorkMeter
from offline_diffusion.models.capabilities import BatchKind, Capabilities

BYTES_PER_PIXEL: dict[ImageFormat, float] = {"png": 1.45, "jpeg": 0.45, "webp": 1.2}
"""Rough sizes of encoded photographs, see bench_encode.py; a drawing is smaller, noise larger."""

_NUM_RECENT_PROMPTS = 1_024
"""About as many as an engine keeps encoded."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLoad:
    """What one task has to do, all its images on one device.

    Args:
        task_index, num_shards: Which it is, and the shards it owns.
        flops: Of its denoise steps; encoding prompts and decoding images come on top.
        num_steps: Engine steps.
        step_tokens: Tokens times steps, over all sequences.
        step_squares: Squared lengths times steps, likewise.
        num_images, num_pixels: To decode.
        num_prompts: To encode; what is repeated soon counts once.
        step_fill: Filled share of the token budget.
    """

    task_index: int
    num_shards: int
    flops: float
    num_steps: int
    step_tokens: int
    step_squares: int
    num_images: int
    num_pixels: int
    num_prompts: int
    step_fill: float


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
        num_steps, step_fill: Engine steps of all tasks, and the filled share of their budget.
        step_bytes: Least memory of a full step and the blocks, in 16 bits; see `Capabilities.step_bytes`.
        output_bytes: Estimated size of the encoded images.
        num_shards: Output shards.
        tasks: What each task has to do, as long as none helps another.
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
    step_bytes: int
    output_bytes: int
    num_shards: int
    tasks: list[TaskLoad]

    @property
    def slowest_task_flops(self) -> float:
        return max(task.flops for task in self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON's types; resolutions are spelled ``WIDTHxHEIGHT``."""
        values = asdict(self)
        values["resolutions"] = {f"{w}x{h}": count for (w, h), count in self.resolutions.items()}
        values["inference_steps"] = {str(steps): n for steps, n in self.inference_steps.items()}
        return values


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


class _Task:
    """Adds up the work of one task."""

    def __init__(self, packing: PackingModel) -> None:
        self.packing = packing
        self.num_shards = 0
        self.last_shard = -1
        self.flops = 0.0
        self.step_tokens = 0
        self.step_squares = 0
        self.num_images = 0
        self.num_pixels = 0
        self.num_prompts = 0

    def add(self, lengths: Sequence[int], work: Work, key: int) -> None:
        """Images that are alike, of sequences of ``lengths`` tokens each; see `PackingModel` for ``key``."""
        num_tokens, num_steps, num_images = sum(lengths), work.num_steps, work.num_images
        num_pixels = work.size.drawn[0] * work.size.drawn[1]
        self.step_tokens += num_tokens * num_steps * num_images
        self.step_squares += sum(length * length for length in lengths) * num_steps * num_images
        self.num_images += num_images
        self.num_pixels += num_pixels * num_images
        for _ in range(num_images):
            self.packing.add(num_tokens, num_steps, key)


class _RecentPrompts:
    """Which prompts are still encoded from a moment ago."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def num_new(self, *prompts: str) -> int:
        """How many of ``prompts`` were not among the last ones."""
        count = 0
        for key in map(hash, prompts):
            if key in self._hashes:
                self._hashes.move_to_end(key)
                continue
            count += 1
            self._hashes[key] = None
            if len(self._hashes) > _NUM_RECENT_PROMPTS:
                self._hashes.popitem(last=False)
        return count


class PlanBuilder:
    """Adds rows up to a ``Plan``.

    Args:
        capabilities: The model's limits, defaults and cost formula.
        defaults: The job's values for rows that are silent.
        shard_size: Rows of a shard.
        max_num_batched_tokens, max_num_seqs: The budget of a step.
        look_ahead: Waiting images that a step's company is chosen from.
        shares: For each task its shards, see ``assign_shards``; None: one task has all.
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
        look_ahead: int = 1,
        shares: Sequence[Sequence[int]] | None = None,
        image_format: ImageFormat = "png",
    ) -> None:
        self._meter = WorkMeter(capabilities, defaults)
        self._is_stacked = capabilities.batch_kind is BatchKind.STACKED
        self._shard_size = shard_size
        self._image_format = image_format
        self._step_bytes = capabilities.step_bytes(max_num_batched_tokens)
        self._tasks = [
            _Task(PackingModel(max_num_batched_tokens, max_num_seqs, look_ahead)) for _ in shares or [()]
        ]
        self._owners = {shard: task for task, owned in enumerate(shares or ()) for shard in owned}
        self._prompts = _RecentPrompts()
        self._num_shards = 0
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
        """Counts one row, good or faulty; rows come in order."""
        self._totals.num_rows += 1
        shard = row.row // self._shard_size
        task = self._tasks[self._owners.get(shard, 0)]
        if shard >= self._num_shards:
            self._num_shards = shard + 1
        if shard != task.last_shard:
            task.last_shard = shard
            task.num_shards += 1
        if isinstance(row, RowFault):
            return
        work = self._meter.measure(row)
        if isinstance(work, str):
            self._faults[work] += 1
        else:
            self._add_images(work, task)

    def _add_images(self, work: Work, task: _Task) -> None:
        totals, size, num_images = self._totals, work.size, work.num_images
        tokens = [size.image_tokens + text for text in work.text_tokens]
        totals.num_good_rows += 1
        totals.num_guidance_off_rows += work.guidance_is_off
        totals.num_images += num_images
        totals.num_cfg_images += num_images if len(tokens) > 1 else 0
        totals.image_tokens += size.image_tokens * len(tokens) * num_images
        totals.text_tokens += sum(work.text_tokens) * num_images
        totals.step_tokens += sum(tokens) * work.num_steps * num_images
        totals.flops += work.flops
        self._resolutions[size.drawn] += num_images
        self._steps[work.num_steps] += num_images
        self._final_pixels += size.final_pixels * num_images
        task.flops += work.flops
        task.num_prompts += self._prompts.num_new(*work.prompts)
        task.add(tokens, work, hash(size.drawn) if self._is_stacked else 0)

    def finish(self) -> Plan:
        """The plan over the rows added so far; no more may follow."""
        tasks = [self._task_load(index, task) for index, task in enumerate(self._tasks)]
        num_steps = sum(task.num_steps for task in tasks)
        filled = sum(task.step_fill * task.num_steps for task in tasks)
        return Plan(
            **asdict(self._totals),
            resolutions=dict(sorted(self._resolutions.items(), key=lambda item: (-item[1], item[0]))),
            inference_steps=dict(sorted(self._steps.items())),
            faults=dict(self._faults.most_common()),
            num_steps=num_steps,
            step_fill=filled / num_steps if num_steps else 0.0,
            step_bytes=self._step_bytes,
            output_bytes=round(self._final_pixels * BYTES_PER_PIXEL[self._image_format]),
            num_shards=self._num_shards,
            tasks=tasks,
        )

    @staticmethod
    def _task_load(task_index: int, task: _Task) -> TaskLoad:
        task.packing.drain()
        return TaskLoad(
            task_index=task_index,
            num_shards=task.num_shards,
            flops=task.flops,
            num_steps=task.packing.num_steps,
            step_tokens=task.step_tokens,
            step_squares=task.step_squares,
            num_images=task.num_images,
            num_pixels=task.num_pixels,
            num_prompts=task.num_prompts,
            step_fill=task.packing.step_fill,
        )
