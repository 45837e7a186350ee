"""Loads a checkpoint's weights through diffusers and hands them to its family."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch

from offline_diffusion.accel.quantize import apply_quantization
from offline_diffusion.config import DEFAULT_MODEL, EngineConfig
from offline_diffusion.errors import BackendError, ModelError
from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.models.modes import check_mode
from offline_diffusion.models.registry import REINSTALL_HINT, Checkpoint, find_checkpoint

SAFETENSORS_HINT = (
    "weights are read from .safetensors files only: .bin, .pt and .ckpt files can run code when opened; "
    "where you trust them, save_pretrained of diffusers writes them anew"
)


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device, else the CPU.

    Raises:
        BackendError: The device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BackendError(f"unknown device {name!r}, allowed: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"device {name!r} is not supported, allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BackendError(f"device {name!r} is not there: {torch.cuda.device_count()} CUDA devices found")
    return device


def cuda_devices() -> list[str]:
    """Every CUDA device of this machine, as ``cuda:N``."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return cast(torch.dtype, getattr(torch, name))


def load_model(config: EngineConfig, checkpoint: Checkpoint | None = None) -> DiffusionModel:
    """Loads the weights onto the device.

    Raises:
        ModelError: The checkpoint cannot be loaded; `UnsupportedModelError` names a config key.
        BackendError: The device or the attention backend does not work here.
        ConfigError: The family cannot do the execution mode that was asked for.
    """
    checkpoint = checkpoint or find_checkpoint(config.model, config.revision)
    check_mode(config, checkpoint.capabilities)
    device = resolve_device(config.device)
    if device.index is not None:
        torch.cuda.set_device(device)  # what names no device, events and kernels among it, means this one
    pipeline = _load_pipeline(checkpoint, resolve_dtype(config.dtype, device), device)
    model = model_from_pipeline(pipeline, checkpoint, device, config.attention_backend)
    apply_quantization(model, config.quantization)
    return model


def model_from_pipeline(
    pipeline: Any, checkpoint: Checkpoint, device: torch.device, attention_backend: str = "auto"
) -> DiffusionModel:
    """Wraps a loaded diffusers pipeline whose modules are on ``device``; its weights are shared."""
    family = checkpoint.family
    model_class = getattr(importlib.import_module(family.module), family.class_name)
    return cast(DiffusionModel, model_class(pipeline, checkpoint.capabilities, device, attention_backend))


def _load_pipeline(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    pipeline_class = getattr(diffusers, checkpoint.family.pipeline)
    try:
        return pipeline_class.from_pretrained(
            checkpoint.source, revision=checkpoint.revision, dtype=dtype, use_safetensors=True
        ).to(device)
    except Exception as error:  # a damaged folder makes the libraries raise nearly anything
        hint = SAFETENSORS_HINT if ".safetensors" in str(error) else None
        hint = REINSTALL_HINT if checkpoint.identity["model"] == DEFAULT_MODEL else hint
        raise ModelError(f"{checkpoint.source} cannot be loaded: {error}", hint=hint) from error
