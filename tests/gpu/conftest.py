"""One random model of real widths for all GPU tests: every GEMM has the shape it has at full size.

``OFFDIFF_GPU_LAYERS`` sets the depth; 60 is the full model.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="session")
def gpu_model() -> Any:
    from full_size import build_pipeline, checkpoint

    from offline_diffusion.models.loader import model_from_pipeline

    layers = int(os.environ.get("OFFDIFF_GPU_LAYERS", "6"))
    device = torch.device("cuda")
    pipeline = build_pipeline(device, num_layers=layers, num_text_layers=4)
    return model_from_pipeline(pipeline, checkpoint(layers), device)


@pytest.fixture
def no_sync() -> Callable[[], AbstractContextManager[None]]:
    """``with no_sync():`` fails where the host would wait for the device."""
    return _no_sync


@contextmanager
def _no_sync() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
