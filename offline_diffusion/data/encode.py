"""From decoded pixels to image files and back."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from offline_diffusion.config import ImageFormat

Pixels = npt.NDArray[np.uint8]
"""RGB, ``[height, width, 3]``."""

ENCODE_ERRORS = (ValueError, OSError, MemoryError, PIL.Image.DecompressionBombError)
"""What ``encode_image`` raises when a format cannot hold an image."""

DECODE_ERRORS = (*ENCODE_ERRORS, SyntaxError)
"""What ``decode_image`` raises for a damaged image."""

_SAVE_OPTIONS: dict[ImageFormat, dict[str, Any]] = {
    # Level 3 takes 1.5 times as long for a file 1 to 8 % smaller, level 6 three times for 15 %.
    "png": {"format": "PNG", "compress_level": 1},
    "jpeg": {"format": "JPEG", "quality": 95, "subsampling": "4:4:4"},
    # For lossless WebP quality is effort: 100 takes three times as long for about the same size.
    "webp": {"format": "WEBP", "lossless": True, "quality": 20, "method": 1},
}


def crop_centre(pixels: Pixels, height: int, width: int) -> Pixels:
    """The middle ``height`` × ``width`` pixels; an odd rest is cut at the bottom and the right."""
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    assert min(top, left) >= 0, "a crop must be smaller than what was drawn"
    return pixels[top : top + height, left : left + width]


def encode_image(pixels: Pixels, image_format: ImageFormat) -> tuple[bytes, str]:
    """Encodes an image.

    Returns:
        The file's bytes, and the SHA-256 of the pixels that a reader of them decodes.

    Raises:
        One of ENCODE_ERRORS: The format cannot hold it (WebP ends at 16,383 pixels a side).
    """
    pixels = np.ascontiguousarray(pixels)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, **_SAVE_OPTIONS[image_format])
    data = file.getvalue()
    decoded = decode_image(data) if image_format == "jpeg" else pixels
    return data, pixels_sha256(decoded)


def decode_image(data: bytes) -> Pixels:
    """The pixels of an encoded image.

    Raises:
        One of DECODE_ERRORS: It is damaged.
    """
    with PIL.Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def pixels_sha256(pixels: Pixels) -> str:
    """SHA-256 over RGB bytes row by row, as hex."""
    return hashlib.sha256(np.ascontiguousarray(pixels).data).hexdigest()
