"""The execution modes: which the options ask for, and whether a family can do it. Free of torch."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

from offline_diffusion.config import EngineConfig
from offline_diffusion.errors import ConfigError
from offline_diffusion.models.capabilities import BatchKind, Capabilities, GuidanceMeaning
from offline_diffusion.request import Request


class ExecutionMode(Enum):
    """How requests share the device. One engine runs them all, and none changes a pixel."""

    SERIAL = "serial"
    """One request from its first step to its last."""
    REQUEST_BATCH = "request_batch"
    """Waves of like requests, each run to its end."""
    SINGLE_STEP = "single_step"
    """Likewise, and its unfinished image can be shown."""
    SAME_SHAPE = "same_shape"
    """Like requests join and leave between steps. Asked for, they are like by `same_shape_key`; a family that
    can do no better has a key of its own."""
    PACKED = "packed"
    """Unlike requests, too."""

    @property
    def options(self) -> str:
        """How a command is told."""
        return _OPTIONS[self]


_OPTIONS = {
    ExecutionMode.SERIAL: "--no-step-execution --max-num-seqs 1",
    ExecutionMode.REQUEST_BATCH: "--no-step-execution --max-num-seqs N",
    ExecutionMode.SINGLE_STEP: "--step-execution --max-num-seqs 1",
    ExecutionMode.SAME_SHAPE: "--step-execution --max-num-seqs N --batching same_shape",
    ExecutionMode.PACKED: "--step-execution --max-num-seqs N --batching packed",
}


def execution_mode(config: EngineConfig, batch_kind: BatchKind) -> ExecutionMode:
    """The mode that options mean for a family that shares steps in its own way."""
    if config.max_num_seqs == 1:
        return ExecutionMode.SINGLE_STEP if config.step_execution else ExecutionMode.SERIAL
    if not config.step_execution:
        return ExecutionMode.REQUEST_BATCH
    if config.batching == "same_shape" or (config.batching == "auto" and batch_kind is BatchKind.STACKED):
        return ExecutionMode.SAME_SHAPE
    return ExecutionMode.PACKED


def mode_fault(mode: ExecutionMode, batch_kind: BatchKind) -> str | None:
    """Why a family that shares steps in its own way cannot do ``mode``, or None when it can."""
    if mode is ExecutionMode.PACKED and batch_kind is not BatchKind.PACKED:
        return "its model takes whole images, so only those of one shape can be stacked in a step"
    return None


def preview_fault(batch_kind: BatchKind) -> str | None:
    """Why unfinished images of a family cannot be shown, or None when they can: see `engine.previews`."""
    if batch_kind is not BatchKind.PACKED:
        return "its noise schedulers do not walk straight, so where a step leads cannot be told"
    return None


def check_mode(config: EngineConfig, capabilities: Capabilities) -> None:
    """Refuses options that ask of a model what its family cannot do; before weights are loaded.

    Raises:
        ConfigError: With the reason and what works.
    """
    batch_kind = capabilities.batch_kind
    if (fault := mode_fault(execution_mode(config, batch_kind), batch_kind)) is not None:
        raise ConfigError(
            f"batching packed is not supported for model family {capabilities.family!r}: {fault}",
            hint="leave --batching away, or give same_shape; `offdiff models` lists what each family can do",
        )


def same_shape_key(request: Request, guidance: GuidanceMeaning) -> Hashable:
    """Requests with equal keys are alike, as vLLM-Omni's scheduler has it: size, guidance and adapter.

    Neither the number of steps nor the progress is part of it, nor a scale that is without effect.

    Args:
        request: With everything filled in.
        guidance: What its family makes of the scales.
    """
    scale = request.true_cfg_scale if request.cfg_active else None
    return (
        request.height,
        request.width,
        request.cfg_active,
        scale,
        request.guidance_scale if guidance == "embedded" else None,
        request.lora,
        request.lora_scale if request.lora is not None else None,
    )
