"""The images of a row are made one by one, and each as if it were the only one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from output_fakes import make_row

from offline_diffusion.data.rows import RowDefaults, RowImages, resolve_row
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import MAX_SEED, SamplingParams

CAPABILITIES = Capabilities(family="f", pipeline="P")


def resolve(**params: object) -> RowImages:
    row = replace(make_row(3), params=SamplingParams(**params))  # type: ignore[arg-type]
    resolved = resolve_row(row, CAPABILITIES, RowDefaults())
    assert isinstance(resolved, RowImages)
    return resolved


def test_images_differ_in_index_seed_and_request_id_only() -> None:
    images = resolve(seed=MAX_SEED - 1, num_images_per_prompt=4)
    assert len(images) == 4
    assert [image.image_index for image in images] == [0, 1, 2, 3]
    assert [image.request.seed for image in images] == [MAX_SEED - 1, MAX_SEED, 0, 1]
    assert [image.request.request_id for image in images] == ["3-0", "3-1", "3-2", "3-3"]
    first = images[0]
    for image in images:
        same = replace(image.request, request_id="3-0", seed=MAX_SEED - 1)
        assert replace(image, image_index=0, request=same) == first
    assert images[0] == images.first


@pytest.mark.parametrize("index", [-1, 2])
def test_no_image_lies_outside(index: int) -> None:
    with pytest.raises(IndexError):
        resolve(num_images_per_prompt=2)[index]


def test_ten_thousand_images_are_one_until_they_are_asked_for() -> None:
    images = resolve(num_images_per_prompt=10_000)
    assert images[9_999].request.request_id == "3-9999"
    assert images.count == 10_000
