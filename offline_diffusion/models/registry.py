"""The families, and what a checkpoint can do, read from its configs. Free of torch.

A family is registered with the class name that its ``model_index.json`` carries; its module is
imported only when its weights are loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offline_diffusion.config import BUILT_IN_MODELS, DEFAULT_MODEL
from offline_diffusion.errors import ModelError, UnsupportedModelError, did_you_mean
from offline_diffusion.models.capabilities import BatchKind, Capabilities
from offline_diffusion.models.configs import (
    ConfigReader,
    flux_capabilities,
    qwen_image_capabilities,
    sd3_capabilities,
    sdxl_capabilities,
)
from offline_diffusion.request import SamplingParams

CONTENT_SUFFIXES = (".json", ".safetensors", ".txt", ".jinja", ".model")
WHOLE_BYTES, SAMPLE_BYTES, NUM_SAMPLES = 16 * 2**20, 65_536, 64
"""Files up to the first are read whole, of larger ones so many samples of so many bytes: a checkpoint of
60 GB is told from another in a fraction of a second."""

LIBRARIES = ("diffusers", "transformers")
"""Where the parts of a pipeline may come from."""

PACKAGED_FOLDER = Path(__file__).parent / DEFAULT_MODEL

LAYOUT_HINT = "give a folder in diffusers' layout, as save_pretrained writes it"
REINSTALL_HINT = "this model comes with offline-diffusion: install the package again"

DEFAULTS_FILE = "generation_config.json"
"""May hold a checkpoint's own defaults; absent in most."""


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    Args:
        name: Short name.
        pipeline: Class name in ``model_index.json``.
        module, class_name: Where the model is.
        capabilities: Makes a checkpoint's capabilities from its configs.
        batch_kind: How requests share a step.
        example: A checkpoint's hub id.
        named_defaults: Defaults of checkpoints whose name contains a word, where no config tells them apart.
    """

    name: str
    pipeline: str
    module: str
    class_name: str
    capabilities: Callable[[ConfigReader], Capabilities]
    batch_kind: BatchKind
    example: str
    named_defaults: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def defaults_of(self, source: str) -> dict[str, float]:
        """What ``named_defaults`` say of the checkpoint at ``source``, a folder or a hub id."""
        name = Path(source).name.lower()
        return {
            key: value
            for word, own in self.named_defaults.items()
            if word in name
            for key, value in own.items()
        }


FAMILIES = (
    Family(
        name="qwen_image",
        pipeline="QwenImagePipeline",
        module="offline_diffusion.models.qwen_image",
        class_name="QwenImage",
        capabilities=qwen_image_capabilities,
        batch_kind=BatchKind.PACKED,
        example="Qwen/Qwen-Image",
    ),
    Family(
        name="flux",
        pipeline="FluxPipeline",
        module="offline_diffusion.models.flux",
        class_name="Flux",
        capabilities=flux_capabilities,
        batch_kind=BatchKind.PACKED,
        example="black-forest-labs/FLUX.1-dev",
    ),
    Family(
        name="sd3",
        pipeline="StableDiffusion3Pipeline",
        module="offline_diffusion.models.sd3",
        class_name="StableDiffusion3",
        capabilities=sd3_capabilities,
        batch_kind=BatchKind.PACKED,
        example="stabilityai/stable-diffusion-3.5-large",
        named_defaults={"turbo": {"num_inference_steps": 4, "true_cfg_scale": 0.0, "guidance_scale": 0.0}},
    ),
    Family(
        name="sdxl",
        pipeline="StableDiffusionXLPipeline",
        module="offline_diffusion.models.sdxl",
        class_name="SDXL",
        capabilities=sdxl_capabilities,
        batch_kind=BatchKind.STACKED,
        example="stabilityai/stable-diffusion-xl-base-1.0",
        named_defaults={
            "turbo": {"num_inference_steps": 1, "guidance_scale": 0.0},
            "lightning": {"num_inference_steps": 4, "guidance_scale": 0.0},
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint found: its family and capabilities, no weights loaded.

    ``identity`` goes into ``job.json``: a resume with another one is refused.
    """

    source: str
    revision: str | None
    family: Family
    capabilities: Capabilities
    identity: dict[str, Any]


def find_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Finds a diffusers folder or hub id and reads its configs.

    Args:
        model: A name in `config.BUILT_IN_MODELS`, a folder, or a hub id.
        revision: Of a hub id.

    Raises:
        ModelError: It is not there, or is no diffusers checkpoint.
        UnsupportedModelError: Its pipeline belongs to no family here.
    """
    source = str(_built_in_folder(model)) if model in BUILT_IN_MODELS else model
    # Path.is_dir() raises for names too long to be one
    is_folder = model in BUILT_IN_MODELS or os.path.isdir(source)
    read = _folder_reader(Path(source), model) if is_folder else _hub_reader(source, revision)
    index = read("model_index.json")
    family = _family_of(str(index.get("_class_name")), model)
    _check_libraries(index, model)
    try:
        capabilities = family.capabilities(read)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ModelError(f"{model}: its configuration files make no sense: {error}") from None
    overrides = family.defaults_of(model) | _checked_defaults(_optional(read, DEFAULTS_FILE), model)
    capabilities = capabilities.with_defaults(overrides)
    content = _folder_content(Path(source)) if is_folder else _hub_commit(source, revision)
    identity = {"model": model, "revision": revision, "pipeline": family.pipeline, "content": content}
    return Checkpoint(source, revision, family, capabilities, identity)


def _checked_defaults(overrides: dict[str, Any], model: str) -> dict[str, Any]:
    names = ("height", "width", "num_inference_steps", "true_cfg_scale", "guidance_scale")
    defaults: dict[str, Any] = {name: overrides[name] for name in names if overrides.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise ModelError(f"{model}: {DEFAULTS_FILE}: {error}") from None
    return defaults


def capabilities_for(model: str, revision: str | None = None) -> Capabilities:
    """What a checkpoint can do; see `find_checkpoint`."""
    return find_checkpoint(model, revision).capabilities


def _built_in_folder(model: str) -> Path:
    if model == DEFAULT_MODEL:
        return PACKAGED_FOLDER
    from offline_diffusion.models.tiny import tiny_model_folder

    return tiny_model_folder()


def _family_of(pipeline: str, model: str) -> Family:
    for family in FAMILIES:
        if family.pipeline == pipeline:
            return family
    known = ", ".join(family.pipeline for family in FAMILIES)
    raise UnsupportedModelError(f"{model}: pipeline {pipeline} is not supported, supported: {known}")


def _folder_reader(folder: Path, model: str) -> ConfigReader:
    def read(name: str) -> dict[str, Any]:
        if not (folder / name).exists():
            raise _MissingFileError(
                f"{folder} has no {name}", hint=REINSTALL_HINT if model == DEFAULT_MODEL else LAYOUT_HINT
            )
        return _read_json(folder / name)

    return read


def _check_libraries(index: dict[str, Any], model: str) -> None:
    """Refuses parts that diffusers would have to import from anywhere else: a checkpoint brings no code."""
    for part, found in index.items():
        library = found[0] if isinstance(found, list) and found else None
        if library is not None and library not in LIBRARIES:
            raise ModelError(
                f"{model}: model_index.json takes {part} from {library!r}, allowed: {', '.join(LIBRARIES)}",
                hint="code that comes with a checkpoint is never run",
            )


def _hub_reader(model: str, revision: str | None) -> ConfigReader:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
    )

    def read(name: str) -> dict[str, Any]:
        try:
            path = hf_hub_download(model, name, revision=revision)
        except RemoteEntryNotFoundError:
            raise _MissingFileError(
                f"{model} has no {name}", hint="it must be a diffusers checkpoint"
            ) from None
        except (HFValidationError, HfHubHTTPError, OSError) as error:
            close = None if "/" in model else did_you_mean(model, BUILT_IN_MODELS)
            # Without a network, a cached checkpoint does not tell a file it lacks from one not fetched.
            error_class = _MissingFileError if isinstance(error, LocalEntryNotFoundError) else ModelError
            raise error_class(
                f"model {model!r} is no folder here and cannot be had from the hub: {type(error).__name__}",
                hint=f"did you mean {close!r}?" if close else "check the path, or the network and HF_TOKEN",
            ) from None
        return _read_json(Path(path))

    return read


class _MissingFileError(ModelError):
    """The checkpoint is there, the file is not."""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _optional(read: ConfigReader, name: str) -> dict[str, Any]:
    try:
        return read(name)
    except _MissingFileError:
        return {}


def _folder_content(folder: Path) -> str:
    """A digest of every file that pixels depend on: configs and vocabularies whole, weights by samples."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*")):
        if path.suffix not in CONTENT_SUFFIXES:
            continue
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}:{size}:".encode())
        stride = SAMPLE_BYTES if size <= WHOLE_BYTES else size // NUM_SAMPLES
        with path.open("rb") as file:
            for start in range(0, size, stride):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _hub_commit(model: str, revision: str | None) -> str:
    """The commit of the snapshot that the configs were read from."""
    from huggingface_hub import hf_hub_download

    snapshot = Path(hf_hub_download(model, "model_index.json", revision=revision)).parent
    return snapshot.name
