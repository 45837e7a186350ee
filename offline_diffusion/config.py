"""Options of the engine and of a job: validated once, here. Free of torch."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from offline_diffusion.errors import ConfigError, did_you_mean

MAX_SHOWN_CHARS = 200

AttentionBackendName = Literal["auto", "fa3", "flash_attn", "torch_varlen", "sdpa"]
ImageFormat = Literal["png", "jpeg", "webp"]
OnBadSize = Literal["error", "round", "crop"]
SchedulingPolicy = Literal["fifo", "pack", "shortest", "deadline"]
Batching = Literal["auto", "packed", "same_shape"]

IMAGE_LEVELS: dict[ImageFormat, range] = {"png": range(1, 10), "jpeg": range(1, 101), "webp": range(7)}
"""Values of ``image_level``: JPEG's quality; for PNG and WebP, which lose nothing, time spent on size."""
DEFAULT_IMAGE_LEVELS: dict[ImageFormat, int] = {"png": 1, "jpeg": 95, "webp": 1}

DEFAULT_MODEL = "shapes"
"""A small Qwen-Image trained on drawn shapes, which comes with this package."""

TINY_MODEL = "tiny"
"""A smaller one with random weights, for tests; made on first use, see ``models.tiny``."""

BUILT_IN_MODELS = {
    DEFAULT_MODEL: "the default: a small Qwen-Image trained on drawn shapes, part of this package",
    TINY_MODEL: "a smaller one with random weights, made on first use: for tests",
}
"""Models that need no download, and what they are; their names win over folders of the same name."""

DEFAULT_MAX_NUM_BATCHED_TOKENS = 16_896
"""The token budget where it is neither given nor measured, as on a CPU: two guided images of 1024 × 1024
pixels with 128 text tokens a branch. 16,384 would hold one, or seven of 512 × 512."""


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_STORAGE_URL = re.compile(r"[A-Za-z0-9+.-]+://[^/\[\]*?]+(/[^/\[\]*?]+)*/?")
_HALF_A_PAIR = re.compile("[\ud800-\udbff\udd00-\udfff]")
"""Those from dc80 to dcff are left out: Python writes bytes of a file's name that are not UTF-8 so."""


class Options(BaseModel):
    """Base of all option groups: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        # Python counts True as 1, and YAML reads yes, no, on and off as truth values.
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("must not be a truth value (YAML reads yes, no, on and off as such)")
        return value

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _text_can_be_written(cls, value: Any) -> Any:
        # No file can have such a name, and no prompt can hold half a character.
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and ("\0" in text or _HALF_A_PAIR.search(text)):
                raise ValueError("must not hold a NUL or half of a surrogate pair")
        return value


GroupT = TypeVar("GroupT", bound=Options)


class EngineConfig(Options):
    """Options that the engine understands.

    ``max_num_batched_tokens`` counts image and text tokens of all sequences of a step (both
    guidance branches of a guided request); a single larger request still runs, alone. None is what the
    device does best, measured when the engine starts; on a CPU `DEFAULT_MAX_NUM_BATCHED_TOKENS`.

    ``batching`` says who may share a step: ``packed`` anyone, ``same_shape`` only requests of one size,
    guidance and adapter, ``auto`` what the family does best. With ``step_execution`` and ``max_num_seqs`` it
    names the execution mode, see `models.modes`.

    ``diffusion_streaming_output`` yields a preview of every unfinished image each ``preview_interval`` steps.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    step_execution: bool = True
    batching: Batching = "auto"
    max_num_seqs: int = Field(default=128, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    request_batch_max_wait_ms: float = Field(default=0.0, ge=0)
    diffusion_streaming_output: bool = False
    preview_interval: int = Field(default=10, ge=1)
    scheduling_policy: SchedulingPolicy = "pack"
    attention_backend: AttentionBackendName = "auto"
    quantization: Literal["none", "fp8", "int8"] = "none"

    @pydantic.field_validator("diffusion_streaming_output")
    @classmethod
    def _of_steps(cls, value: bool, info: pydantic.ValidationInfo) -> bool:
        if value and info.data.get("step_execution") is False:
            raise ValueError("needs step execution: leave --no-step-execution away")
        return value


class JobConfig(EngineConfig):
    """Everything ``offdiff run`` can be told; ``out`` is text where it is a URL of object storage."""

    manifests: tuple[str, ...] = Field(min_length=1)
    out: Path | str
    work_dir: Path | None = None
    map: dict[str, str] = Field(default_factory=dict)
    on_bad_size: OnBadSize = "error"
    height: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    num_inference_steps: int | None = Field(default=None, ge=1)
    true_cfg_scale: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    guidance_scale: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    negative_prompt: str | None = None
    seed: int = Field(default=0, ge=0, le=2**64 - 1)
    limit: int | None = Field(default=None, ge=0)
    shard_size: int = Field(default=500, ge=1, le=100_000)
    num_tasks: int = Field(default=1, ge=1)
    task_index: int = Field(default=0, ge=0)
    devices: str | None = Field(default=None, coerce_numbers_to_str=True)
    launcher: Literal["local", "ray"] = "local"
    image_format: ImageFormat = "png"
    image_level: int | None = Field(default=None, validate_default=True)
    retry_failed: bool = False
    allow_manifest_change: bool = False
    max_failures: str | None = Field(default=None, coerce_numbers_to_str=True)
    checkpoint_interval: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    time_limit: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    profile: bool = False

    @pydantic.field_validator("out")
    @classmethod
    def _folder_or_url(cls, value: Path | str) -> Path | str:
        if not isinstance(value, str):
            return value
        if is_storage_url(value):
            if not _STORAGE_URL.fullmatch(value):
                raise ValueError("must be a URL with a bucket, without empty parts and without []*?")
            return value
        if "::" in value and "://" in value:
            raise ValueError("must be a folder or one URL: chains such as a::b:// are for manifests")
        return Path(value.removeprefix("file://"))

    @property
    def folder(self) -> Path:
        """The output folder; for an output on object storage the working folder on this machine.

        Raises:
            ConfigError: There is no place for working folders.
        """
        if isinstance(self.out, Path):
            return self.out
        url = self.out.rstrip("/")
        digest = hashlib.sha256(url.encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9._-]", "-", url.rpartition("/")[2])
        try:
            parent = self.work_dir or cache_folder() / "work"
        except RuntimeError:
            raise ConfigError("no home folder is known", hint="give a folder with --work-dir") from None
        return parent / f"{name}-{digest}"

    @pydantic.field_validator("manifests", mode="before")
    @classmethod
    def _one_manifest_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @pydantic.field_validator("image_level")
    @classmethod
    def _level_of_the_format(cls, value: int | None, info: pydantic.ValidationInfo) -> int | None:
        image_format = info.data.get("image_format")  # absent when it is faulty itself
        if image_format is None:
            return value
        if value is None:
            return DEFAULT_IMAGE_LEVELS[image_format]
        allowed = IMAGE_LEVELS[image_format]
        if value not in allowed:
            raise ValueError(f"must be {allowed[0]} to {allowed[-1]} for {image_format}")
        return value

    @pydantic.field_validator("max_failures")
    @classmethod
    def _count_or_share(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not re.fullmatch(r"\d+|\d+(\.\d+)?%", value):
            raise ValueError("must be a count such as 10 or a share such as 5%")
        if value.endswith("%") and float(value.removesuffix("%")) > 100:
            raise ValueError("a share must be at most 100%")
        return value

    @pydantic.field_validator("time_limit", mode="before")
    @classmethod
    def _seconds_of_a_clock(cls, value: Any) -> Any:
        """``[D-]HH:MM:SS`` as Slurm writes it, in seconds; anything else as it is."""
        match = (
            re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", value) if isinstance(value, str) else None
        )
        if match is None:
            return value
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

    @pydantic.field_validator("devices")
    @classmethod
    def _list_of_devices(cls, value: str | None) -> str | None:
        device = r"(cpu|cuda:\d+|\d+)"
        if value is not None and not re.fullmatch(rf"all|{device}(,{device})*", value):
            raise ValueError("must be all, or a list such as 0,1 or cpu,cpu")
        return value

    @pydantic.field_validator("profile")
    @classmethod
    def _of_one_worker(cls, value: bool, info: pydantic.ValidationInfo) -> bool:
        if value and (info.data.get("devices") is not None or info.data.get("launcher") == "ray"):
            raise ValueError("is of one worker: leave --devices and --launcher away")
        return value

    @pydantic.field_validator("task_index")
    @classmethod
    def _task_in_range(cls, value: int, info: pydantic.ValidationInfo) -> int:
        num_tasks = info.data.get("num_tasks")  # absent when it is faulty itself
        if num_tasks is not None and value >= num_tasks:
            raise ValueError(f"must be below the number of tasks, {num_tasks}")
        return value


PIXEL_OPTIONS = (
    "model",
    "revision",
    "dtype",
    "quantization",
    "on_bad_size",
    "height",
    "width",
    "num_inference_steps",
    "true_cfg_scale",
    "guidance_scale",
    "negative_prompt",
    "seed",
    "image_format",
    "image_level",
)
"""Options that change the dataset: a resume with another value is refused. ``image_level`` counts only
where it changes pixels, in JPEG."""

LAYOUT_OPTIONS = ("map", "limit", "shard_size")
"""Options that change which rows fall into which shard: likewise refused."""


def check_option_names(names: Iterable[str], *, source: str, options: type[Options] = JobConfig) -> None:
    """Refuses names that are no options.

    Args:
        names: Option names, spelled with underscores.
        source: Where they come from, for the message.
        options: The group they must belong to.

    Raises:
        ConfigError: A name is unknown; the hint has the closest one.
    """
    for name in names:
        if name not in options.model_fields:
            close = did_you_mean(name, options.model_fields)
            known = f"known: {', '.join(sorted(options.model_fields))}"
            raise ConfigError(
                f"{source}: unknown option {name!r}", hint=f"did you mean {close!r}?" if close else known
            )


def is_storage_url(out: str) -> bool:
    """Whether an output is named by a URL of object storage; a path and ``file://`` are folders."""
    return bool(_URL.match(out)) and not out.startswith("file://")


def cache_folder() -> Path:
    """``offline_diffusion`` under ``$XDG_CACHE_HOME``, else under ``~/.cache``.

    Raises:
        RuntimeError: Neither is known: the user has no home.
    """
    # The XDG specification: a value that is empty or relative counts as unset.
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "offline_diffusion"


def make_job_config(
    values: dict[str, Any], *, source: str = "options", spelling: Mapping[str, str] | None = None
) -> JobConfig:
    """Builds the options of a job.

    Args:
        values: Option name to value; None values are left out.
        source: Where they come from, for the message.
        spelling: How the user writes an option (``--max-num-seqs``); takes the place of ``source``.

    Raises:
        ConfigError: A key is unknown or a value is not allowed.
    """
    given = {key: value for key, value in values.items() if value is not None}
    return make_options(JobConfig, given, source=source, spelling=spelling)


def make_engine_config(values: Mapping[str, Any], *, source: str = "options") -> EngineConfig:
    """Builds the options of an engine alone; see `make_job_config`."""
    return make_options(EngineConfig, values, source=source)


def make_options(
    options: type[GroupT],
    values: Mapping[str, Any],
    *,
    source: str = "options",
    spelling: Mapping[str, str] | None = None,
) -> GroupT:
    """Builds any group of options; see `make_job_config`."""
    check_option_names(values, source=source, options=options)
    try:
        return options(**values)
    except pydantic.ValidationError as error:
        lines = "; ".join(_describe(detail, spelling or {}) for detail in error.errors())
        raise ConfigError(lines if spelling else f"{source}: {lines}") from None


def _describe(detail: Any, spelling: Mapping[str, str]) -> str:
    first, *rest = (str(part) for part in detail["loc"] or ("",))
    name = ".".join((spelling.get(first, first), *rest))
    if detail["type"] == "missing":
        return f"{name} is required"
    message = detail["msg"].removeprefix("Value error, ")
    shown = repr(detail["input"])
    if len(shown) > MAX_SHOWN_CHARS:
        shown = f"{shown[: MAX_SHOWN_CHARS - 1]}…"
    return f"{name}: {message}, got {shown}" if name else message
