"""The model under test, in one precision at a time."""

from __future__ import annotations

import gc
from typing import Any, Literal, get_args

import torch
from full_size import build_pipeline, build_transformer, checkpoint

from offline_diffusion.accel.quantize import apply_quantization
from offline_diffusion.config import EngineConfig
from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.models.loader import model_from_pipeline
from offline_diffusion.models.registry import Checkpoint, find_checkpoint
from offline_diffusion.models.tiny import tiny_model_folder

ModelKind = Literal["full", "tiny"]


def offered_precisions() -> tuple[str, ...]:
    """What the engine can be told to quantize to, and bf16."""
    names = get_args(EngineConfig.model_fields["quantization"].annotation)
    return tuple("bf16" if name == "none" else name for name in names)


class Subject:
    """A pipeline with random weights, and our model over the same weights.

    Quantization takes the bf16 weights away, from the pipeline too; for another precision after that the
    transformer is made again from the same seed, while text encoder and VAE stay.

    Args:
        kind: ``full`` is Qwen-Image as it is published, ``tiny`` the package's model of that name.
        device: Where the weights are.
        num_layers: Transformer blocks of ``full``.
        attention_backend: Of our model.
    """

    def __init__(
        self, kind: ModelKind, device: torch.device, num_layers: int, attention_backend: str
    ) -> None:
        self.kind, self.device, self.num_layers = kind, device, num_layers
        self._attention_backend = attention_backend
        self.pipeline: Any = (
            build_pipeline(device, num_layers=num_layers) if kind == "full" else _tiny(device)
        )
        self.precision = "bf16"
        self.model: DiffusionModel = self._wrap()

    def switch(self, precision: str) -> None:
        """Brings the model to ``precision``; earlier ones, and engines over them, must not be held."""
        if precision == self.precision:
            return
        if self.precision != "bf16":
            self._build_again()
        if precision != "bf16":
            apply_quantization(self.model, precision)
        self.precision = precision
        self._give_memory_back()

    def _build_again(self) -> None:
        before = self.pipeline.transformer.proj_out.weight.clone()  # drawn last, and never quantized
        del self.model
        self.pipeline.transformer = None
        self._give_memory_back()
        if self.kind == "full":
            self.pipeline.transformer = build_transformer(self.device, num_layers=self.num_layers)
        else:
            self.pipeline.transformer = _tiny(self.device).transformer
        assert torch.equal(self.pipeline.transformer.proj_out.weight, before), "other weights than before"
        self.model = self._wrap()

    def _wrap(self) -> DiffusionModel:
        return model_from_pipeline(
            self.pipeline, describe(self.kind, self.num_layers), self.device, self._attention_backend
        )

    def _give_memory_back(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def describe(kind: ModelKind, num_layers: int) -> Checkpoint:
    """What is known of the model without its weights."""
    return checkpoint(num_layers) if kind == "full" else find_checkpoint(str(tiny_model_folder()), None)


def _tiny(device: torch.device) -> Any:
    import diffusers

    pipeline = diffusers.QwenImagePipeline.from_pretrained(tiny_model_folder(), dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)
