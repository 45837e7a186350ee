"""What the engine steps: requests put together in the way of their model's family."""

from __future__ import annotations

from offline_diffusion.engine.packed_batch import PackedBatch, PreparedRequest
from offline_diffusion.engine.stacked_batch import StackedBatch
from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.models.capabilities import BatchKind

Batch = PackedBatch | StackedBatch


def build_batch(requests: list[PreparedRequest], model: DiffusionModel) -> Batch:
    """Puts ``requests`` together, whose keys are equal."""
    if model.capabilities.batch_kind is BatchKind.STACKED:
        return StackedBatch.build(requests, model)
    return PackedBatch.build(requests, model)
