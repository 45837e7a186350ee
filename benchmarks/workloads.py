"""The requests that are measured: named mixes of sizes, steps, guidance and prompts. Free of torch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, zip_longest

from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import Request

TRUE_CFG_SCALE, NEGATIVE_PROMPT = 4.0, " "

RIVALS = ("diffusers_serial", "diffusers_batch")
COMPILED_RIVALS = ("diffusers_serial_compiled", "diffusers_batch_compiled")

PROMPT_STRIDE = 97
"""Prompts of a set are taken so far apart: sets are sorted by topic, and topics differ in length."""


@dataclass(frozen=True)
class Workload:
    """A job to measure.

    Args:
        name: Of the records.
        label: As people write it.
        requests: In the order in which the manifest has them.
        systems: Those measured by default.
        num_serial: Images that our engine draws one by one, where all of them would take too long and
            are alike; None for all.
    """

    name: str
    label: str
    requests: list[Request]
    systems: tuple[str, ...]
    num_serial: int | None = None


@dataclass(frozen=True)
class _Draft:
    """A workload without prompts: per image height, width and steps."""

    label: str
    images: list[tuple[int, int, int]]
    systems: tuple[str, ...] = (*RIVALS, "serial", "packed")
    num_serial: int | None = None
    unguided: frozenset[int] = field(default_factory=frozenset)


def _drafts(steps: int) -> dict[str, _Draft]:
    def square(side: int, count: int, own_steps: int = 20) -> list[tuple[int, int, int]]:
        return [(side, side, max(1, round(own_steps * steps / 20)))] * count

    mixed = square(512, 8) + square(768, 5) + square(1024, 3)
    dataset_c = square(512, 3) + square(768, 5) + square(1024, 9, 25) + square(1536, 3, 35)
    with_compiled = (*RIVALS, *COMPILED_RIVALS, "serial", "packed")
    spread = _shuffled([(height, width, steps) for height, width in uniform_shapes() * 4])
    return {
        "256": _Draft("256²", square(256, 96), num_serial=4),
        "512": _Draft("512²", square(512, 24), with_compiled, num_serial=4),
        "1024": _Draft("1024²", square(1024, 8), with_compiled, num_serial=2),
        "mixed16": _Draft("8×512², 5×768², 3×1024²", mixed),
        "mixed32": _Draft("the same twice over", mixed * 2, ("packed",)),
        "uniform": _Draft(
            "256–1024 px in 8 shapes, a fifth unguided",
            spread,
            (*RIVALS, "serial", "presorted", "packed"),
            unguided=frozenset(range(4, len(spread), 5)),
        ),
        "dataset_c": _Draft("512²–1536², 20–35 steps", _shuffled(dataset_c)),
        "forty_aspects": _Draft(
            "forty aspect ratios",
            [(height, width, min(8, steps)) for height, width in aspect_shapes(40)],
            ("packed",),
        ),
    }


def _shuffled(images: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return random.Random(0).sample(images, len(images))


def uniform_shapes(count: int = 8) -> list[tuple[int, int]]:
    """Heights and widths in pixels, each spread evenly over 256 to 1024 in steps of 64, paired at random."""
    sides = [64 * round((256 + 768 * (index + 0.5) / count) / 64) for index in range(count)]
    return list(zip(sides, random.Random(0).sample(sides, count), strict=True))


def aspect_shapes(count: int) -> list[tuple[int, int]]:
    """``count`` different shapes of about 512² pixels, from 1:4 to 4:1."""
    shapes = []
    for index in range(count):
        side = 4 ** (index / (count - 1) - 0.5)  # 1/2 to 2
        shapes.append((16 * round(512 * side / 16), 16 * round(512 / side / 16)))
    return shapes


def make_workloads(
    steps: int = 20, prompts: Sequence[str] = (), *, scale: int = 1, max_images: int | None = None
) -> dict[str, Workload]:
    """All workloads by name.

    Every image has a prompt of its own as far as ``prompts`` reach, so that no system saves an encode.

    Args:
        steps: Denoise steps where the workload says 20.
        prompts: Real ones, see `read_prompts`; none for prompts made of words.
        scale: Heights and widths are divided by this, for small models.
        max_images: Only so many images of each workload.
    """
    source: Iterator[str] = cycle(prompts)
    workloads = {}
    for name, draft in _drafts(steps).items():
        requests = []
        for index, (height, width, own_steps) in enumerate(draft.images):
            requests.append(
                Request(
                    request_id=f"{name}-{index}",
                    prompt=next(source) if prompts else words(name, index),
                    negative_prompt=None if index in draft.unguided else NEGATIVE_PROMPT,
                    height=scaled(height, scale),
                    width=scaled(width, scale),
                    num_inference_steps=own_steps,
                    true_cfg_scale=TRUE_CFG_SCALE,
                    seed=1000 + index,
                )
            )
        workloads[name] = Workload(name, draft.label, requests[:max_images], draft.systems, draft.num_serial)
    return workloads


def scaled(side: int, scale: int) -> int:
    """A height or width for a model that is ``scale`` times smaller; a multiple of 16."""
    return side if scale == 1 else max(16, side // scale // 16 * 16)


def words(name: str, index: int) -> str:
    """A prompt of 5 to 58 words that no other image has."""
    text = ["a", "red", "fox", "under", "an", "old", "bridge", "at", "dawn", "in", "soft", "light"]
    return f"{name} {index} " + " ".join(text[: 3 + index * 5 % 12] * (1 + index % 4))


def read_prompts(sources: Sequence[str]) -> list[str]:
    """The distinct prompts of one or more prompt sets, taken in turn from each.

    Args:
        sources: Whatever ``offdiff run`` reads.

    Raises:
        ManifestError: A source cannot be read.
    """
    from offline_diffusion.data.manifest import open_manifest
    from offline_diffusion.data.rows import ManifestRow

    sets = []
    for source in sources:
        rows = open_manifest([source]).read()
        texts = list(dict.fromkeys(row.prompt for row in rows if isinstance(row, ManifestRow)))
        sets.append([text for start in range(PROMPT_STRIDE) for text in texts[start::PROMPT_STRIDE]])
    turns = zip_longest(*sets)
    return list(dict.fromkeys(text for turn in turns for text in turn if text is not None))


def useful_flops(
    requests: Sequence[Request], capabilities: Capabilities, num_text_tokens: Callable[[str], int]
) -> float:
    """FLOPs of real tokens over all steps and guidance branches of ``requests``."""
    return math.fsum(
        step_flops(request, capabilities, num_text_tokens) * request.num_inference_steps
        for request in requests
    )


def step_flops(request: Request, capabilities: Capabilities, num_text_tokens: Callable[[str], int]) -> float:
    """FLOPs of real tokens in one step of one request, both guidance branches."""
    image = capabilities.num_image_tokens(request.height, request.width)
    texts = [request.prompt] + ([request.negative_prompt or ""] if request.cfg_active else [])
    return math.fsum(capabilities.forward_flops(image + num_text_tokens(text)) for text in texts)


def like(requests: Sequence[Request], tag: str, *, count: int, steps: int | None = None) -> list[Request]:
    """``count`` requests of the same shapes with other prompts, and other ``steps`` if given.

    For warm-ups and traces: their prompts must not be found encoded by the run that counts.
    """
    return [
        replace(
            request,
            request_id=f"{tag}-{index}",
            prompt=f"{tag} {index}: {request.prompt}",
            negative_prompt=None if request.negative_prompt is None else "",
            num_inference_steps=steps or request.num_inference_steps,
        )
        for index, request in zip(range(count), cycle(requests), strict=False)
    ]
