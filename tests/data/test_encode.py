import hashlib
import io

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.config import IMAGE_LEVELS
from offline_diffusion.data.encode import crop_centre, encode_image


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)


def landscape() -> np.ndarray:
    """Smooth colours under fine grain, as photographs have."""
    rows, columns = np.mgrid[:128, :128] / 128
    waves = np.stack([np.sin(5 * rows + 2 * columns), np.cos(3 * columns), rows * columns], -1)
    grain = np.random.default_rng(4).normal(0, 2, waves.shape)
    return (128 + 90 * waves + grain).clip(0, 255).astype(np.uint8)


def pillow(pixels: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, **options)
    return file.getvalue()


def opened(data: bytes) -> PIL.Image.Image:
    image = PIL.Image.open(io.BytesIO(data))
    image.load()
    return image


@pytest.mark.parametrize("image_format", ["png", "webp"])
def test_lossless_formats_give_the_pixels_back(image_format: str) -> None:
    pixels = noise(17, 31)
    data, sha256 = encode_image(pixels, image_format)
    image = opened(data)
    assert image.format == image_format.upper()
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.array(image), pixels)
    assert sha256 == hashlib.sha256(pixels.tobytes()).hexdigest()


def test_the_hash_of_a_jpeg_is_of_what_a_reader_decodes() -> None:
    ramp = np.tile(np.arange(64, dtype=np.uint8)[None, :, None], (48, 1, 3))
    data, sha256 = encode_image(ramp, "jpeg")
    image = opened(data)
    assert image.format == "JPEG"
    decoded = np.array(image)
    assert sha256 == hashlib.sha256(decoded.tobytes()).hexdigest()
    assert np.abs(decoded.astype(int) - ramp).max() <= 3
    assert image.layer[0][1:3] == image.layer[1][1:3] == (1, 1)  # no chroma subsampling


@pytest.mark.parametrize("image_format", ["png", "webp"])
def test_no_level_of_a_lossless_format_changes_a_pixel(image_format: str) -> None:
    pixels = landscape()
    for level in IMAGE_LEVELS[image_format]:
        data, sha256 = encode_image(pixels, image_format, level)
        np.testing.assert_array_equal(np.array(opened(data)), pixels)
        assert sha256 == hashlib.sha256(pixels.tobytes()).hexdigest()


def test_a_png_is_smaller_than_zlib_makes_it_at_its_fast_levels() -> None:
    """Runs alone beat a search for repeats on what looks like a photograph."""
    pixels = landscape()
    ours, _ = encode_image(pixels, "png")
    assert len(ours) < min(len(pillow(pixels, format="PNG", compress_level=level)) for level in (1, 2, 3))


@pytest.mark.parametrize("level", [6, 9])
def test_high_png_levels_are_those_of_zlib(level: int) -> None:
    pixels = landscape()
    assert encode_image(pixels, "png", level)[0] == pillow(pixels, format="PNG", compress_level=level)


def test_the_level_of_a_jpeg_is_its_quality() -> None:
    pixels = landscape()
    for level, quality in ((None, 95), (30, 30)):
        data, sha256 = encode_image(pixels, "jpeg", level)
        reference = opened(pillow(pixels, format="JPEG", quality=quality))
        assert opened(data).quantization == reference.quantization
        assert sha256 == hashlib.sha256(np.array(opened(data)).tobytes()).hexdigest()


def test_higher_webp_levels_make_smaller_files() -> None:
    sizes = [len(encode_image(landscape(), "webp", level)[0]) for level in (0, 1)]
    assert sizes[0] > sizes[1] == len(encode_image(landscape(), "webp")[0])


def test_views_are_encoded_as_they_look() -> None:
    pixels = noise(20, 20)[::2, ::-1]
    data, _ = encode_image(pixels, "png")
    np.testing.assert_array_equal(np.array(opened(data)), pixels)


def test_webp_refuses_what_it_cannot_hold() -> None:
    with pytest.raises((ValueError, OSError)):
        encode_image(np.zeros((1, 16_384, 3), np.uint8), "webp")


@given(
    drawn=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    cut=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_the_crop_is_the_middle(drawn: tuple[int, int], cut: tuple[int, int]) -> None:
    height, width = max(1, drawn[0] - cut[0]), max(1, drawn[1] - cut[1])
    rows, columns = np.meshgrid(np.arange(drawn[0]), np.arange(drawn[1]), indexing="ij")
    pixels = np.stack([rows, columns, rows], -1).astype(np.uint8)
    cropped = crop_centre(pixels, height, width)
    assert cropped.shape == (height, width, 3)
    above, below = int(cropped[0, 0, 0]), drawn[0] - 1 - int(cropped[-1, 0, 0])
    left, right = int(cropped[0, 0, 1]), drawn[1] - 1 - int(cropped[0, -1, 1])
    assert below - above in (0, 1)
    assert right - left in (0, 1)
