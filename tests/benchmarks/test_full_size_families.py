"""Models with random weights are those that were published: counted without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from full_size_families import build


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("flux_dev", 11.90),
        ("flux_schnell", 11.89),
        ("sd3_medium", 2.03),
        ("sd35_medium", 2.24),
        ("sd35_large", 8.06),
        ("sdxl", 2.57),
        ("sdxl_turbo", 2.57),
    ],
)
def test_parameters_are_as_many_as_published(name: str, billions: float) -> None:
    pipeline, checkpoint = build(name, torch.device("meta"))
    denoiser = pipeline.unet if name.startswith("sdxl") else pipeline.transformer
    assert _billions(denoiser) == pytest.approx(billions, abs=0.005)
    assert checkpoint.capabilities.num_parameters == pytest.approx(billions * 1e9, rel=0.03)
    encoders = [_billions(part) for part_name, part in pipeline.components.items() if "text_enc" in part_name]
    published = {"flux": [0.123, 4.76], "sd3": [0.124, 0.695, 4.76], "sdxl": [0.123, 0.695]}
    family = checkpoint.family.name
    # vocabularies are left out: of 49,408 rows for CLIP, 32,128 for T5
    vocabularies = {0.123: 0.038, 0.124: 0.038, 0.695: 0.063, 4.76: 0.132}
    for own, whole in zip(encoders, published[family], strict=True):
        assert own == pytest.approx(whole - vocabularies[whole], rel=0.01)


def _billions(module: Any) -> float:
    return sum(parameter.numel() for parameter in module.parameters()) / 1e9
