"""One random model of real widths for all GPU tests: every GEMM has the shape it has at full size.

``OFFDIFF_GPU_LAYERS`` sets the depth; 60 is the full model.
"""

from __future__ import annotations

import os
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
