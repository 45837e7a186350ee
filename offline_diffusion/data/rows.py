"""Manifest rows, their faults, and the images a row asks for. Free of torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from offline_diffusion.config import OnBadSize
from offline_diffusion.data.values import show
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import MAX_SEED, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class ManifestRow:
    """A good row.

    Args:
        row: Its number in the whole manifest, from 0, over all files and including faulty rows.
        id: Unique in the job; ``<row, 8 digits>`` when the manifest has none.
        file: Path or URL of its file, as the user gave or globbed it.
        line: Line number in a text file, from 1; row number in the file, from 1, elsewhere.
        content_hash: 16 hex digits over every value of the row but its place in the manifest.
        prompt: Not blank.
        params: As given, None where the row is silent.
        carried: The other columns, unchanged.
    """

    row: int
    id: str
    file: str
    line: int
    content_hash: str
    prompt: str
    params: SamplingParams
    carried: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowFault:
    """Why a row is quarantined.

    ``value`` is the offending value as text, cut to a readable length; ``column`` is the name in
    the user's file, empty when the row as a whole is broken.
    """

    row: int
    id: str
    file: str
    line: int
    column: str
    value: str
    reason: str
    content_hash: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return (
            f"{where}: {self.column}={self.value}: {self.reason}"
            if self.column
            else f"{where}: {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class ImageTask:
    """One requested image of a row, fully resolved.

    ``request.height`` × ``request.width`` is what the model draws. ``requested_height`` ×
    ``requested_width`` is what the row asked for, ``final_height`` × ``final_width`` what is
    written (smaller than drawn under ``on_bad_size=crop``).
    """

    row: int
    image_index: int
    id: str
    request: Request
    requested_height: int
    requested_width: int
    final_height: int
    final_width: int

    @property
    def key(self) -> tuple[int, int]:
        """``(row, image_index)``."""
        return self.row, self.image_index


@dataclass(frozen=True, slots=True)
class RowImages:
    """All images of a row, each made when it is asked for: a row may ask for thousands.

    Args:
        first: The image with index 0; the others differ from it in index and seed.
        count: How many there are.
    """

    first: ImageTask
    count: int

    @property
    def row(self) -> int:
        return self.first.row

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> ImageTask:
        if not 0 <= index < self.count:
            raise IndexError(index)
        request = self.first.request
        seed = image_seed(request.seed, index)
        request = replace(request, request_id=_request_id(self.row, index), seed=seed)
        return replace(self.first, image_index=index, request=request)

    def __iter__(self) -> Iterator[ImageTask]:
        return (self[index] for index in range(self.count))


def _request_id(row: int, image_index: int) -> str:
    return f"{row}-{image_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDefaults:
    """What the job says for rows that are silent, and how it treats sizes the model cannot draw."""

    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    true_cfg_scale: float | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    seed: int = 0
    on_bad_size: OnBadSize = "error"


def derive_seed(job_seed: int, row_id: str) -> int:
    """The seed of a row without one: 64 bits of BLAKE2b over the job seed and the row's id."""
    digest = hashlib.blake2b(f"{job_seed}:{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def image_seed(seed: int, image_index: int) -> int:
    """Seed of image ``image_index`` of a row: ``seed + image_index`` modulo 2⁶⁴."""
    return (seed + image_index) & MAX_SEED


def resolve_row(row: ManifestRow, capabilities: Capabilities, defaults: RowDefaults) -> RowImages | RowFault:
    """The images a row asks for, or why the model cannot draw them.

    Args:
        row: A good row.
        capabilities: The model's limits and defaults.
        defaults: The job's.
    """
    if (refused := capabilities.check_columns(row.carried)) is not None:
        column, reason = refused
        value = show(row.carried[column])
        return RowFault(row.row, row.id, row.file, row.line, column, value, reason, row.content_hash)
    params = _with_job_defaults(row.params, defaults, capabilities)
    height = params.height or capabilities.default_height
    width = params.width or capabilities.default_width
    drawn = fit_size(height, width, capabilities.size_multiple, defaults.on_bad_size)
    final = (height, width) if defaults.on_bad_size == "crop" else drawn
    params = replace(params, height=drawn[0], width=drawn[1], **capabilities.pairs(row.carried))
    seed = derive_seed(defaults.seed, row.id) if params.seed is None else params.seed
    try:
        request = capabilities.resolve(_request_id(row.row, 0), row.prompt, params, seed=seed)
    except ValueError as error:
        return _size_fault(row, str(error), height, width)
    first = ImageTask(row.row, 0, row.id, request, height, width, *final)
    return RowImages(first, params.num_images_per_prompt)


def given_scales(
    params: SamplingParams, defaults: RowDefaults, capabilities: Capabilities
) -> tuple[float | None, float | None]:
    """``true_cfg_scale`` and ``guidance_scale`` of a row, the job's where it is silent.

    Where both names mean one scale, a row that gives either is not silent.
    """
    own = params.true_cfg_scale, params.guidance_scale
    if capabilities.guidance == "classic" and own != (None, None):
        return own
    return (
        defaults.true_cfg_scale if own[0] is None else own[0],
        defaults.guidance_scale if own[1] is None else own[1],
    )


def _with_job_defaults(
    params: SamplingParams, defaults: RowDefaults, capabilities: Capabilities
) -> SamplingParams:
    names = ("height", "width", "num_inference_steps", "negative_prompt")
    missing = {name: getattr(defaults, name) for name in names if getattr(params, name) is None}
    true_cfg_scale, guidance_scale = given_scales(params, defaults, capabilities)
    return replace(params, true_cfg_scale=true_cfg_scale, guidance_scale=guidance_scale, **missing)


def fit_size(height: int, width: int, multiple: int, on_bad_size: OnBadSize) -> tuple[int, int]:
    """The size to draw: as asked, rounded to the nearest multiple, or enlarged to crop from."""
    if on_bad_size == "round":
        return _nearest(height, multiple), _nearest(width, multiple)
    if on_bad_size == "crop":
        return -(-height // multiple) * multiple, -(-width // multiple) * multiple
    return height, width


def _nearest(value: int, multiple: int) -> int:
    return max(multiple, (value + multiple // 2) // multiple * multiple)


def _size_fault(row: ManifestRow, reason: str, height: int, width: int) -> RowFault:
    column: Literal["height", "width", "lora", ""] = ""
    value = ""
    if reason.startswith("height"):
        column, value = "height", str(height)
    elif reason.startswith("width"):
        column, value = "width", str(width)
    elif reason.startswith("lora"):
        column, value = "lora", str(row.params.lora)
    return RowFault(row.row, row.id, row.file, row.line, column, value, reason, row.content_hash)
