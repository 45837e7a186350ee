"""From decoded pixels to image files and back."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from offline_diffusion.config import DEFAULT_IMAGE_LEVELS, ImageFormat

Pixels = npt.NDArray[np.uint8]
"""RGB, ``[height, width, 3]``."""

ENCODE_ERRORS = (ValueError, OSError, MemoryError, PIL.Image.DecompressionBombError)
"""What ``encode_image`` raises when a format cannot hold an image."""

DECODE_ERRORS = (*ENCODE_ERRORS, SyntaxError)
"""What ``decode_image`` raises for a damaged image."""

PNG_SEARCH_LEVEL = 6
"""From this level on zlib searches for repeats; below it looks for runs only. On photographs runs give files
as small as this level's in a fifth of its time, and smaller ones than levels 1 to 5 (benchmarks/LOG.md)."""


def _save_options(image_format: ImageFormat, level: int) -> dict[str, Any]:
    """Arguments of Pillow's ``save``."""
    if image_format == "png":
        runs_only = {"compress_type": PIL.Image.RLE} if level < PNG_SEARCH_LEVEL else {}
        return {"format": "PNG", "compress_level": level, **runs_only}
    if image_format == "jpeg":
        return {"format": "JPEG", "quality": level, "subsampling": "4:4:4"}
    # For lossless WebP quality is effort too: more takes longer than the next method for less.
    return {"format": "WEBP", "lossless": True, "quality": 20, "method": level}


def crop_centre(pixels: Pixels, height: int, width: int) -> Pixels:
    """The middle ``height`` × ``width`` pixels; an odd rest is cut at the bottom and the right."""
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    assert min(top, left) >= 0, "a crop must be smaller than what was drawn"
    return pixels[top : top + height, left : left + width]


def encode_image(pixels: Pixels, image_format: ImageFormat, level: int | None = None) -> tuple[bytes, str]:
    """Encodes an image.

    Args:
        pixels: What is encoded.
        image_format: As what.
        level: One of ``config.IMAGE_LEVELS``; None is the format's default.

    Returns:
        The file's bytes, and the SHA-256 of the pixels that a reader of them decodes.

    Raises:
        One of ENCODE_ERRORS: The format cannot hold it (WebP ends at 16,383 pixels a side).
    """
    pixels = np.ascontiguousarray(pixels)
    file = io.BytesIO()
    level = DEFAULT_IMAGE_LEVELS[image_format] if level is None else level
    PIL.Image.fromarray(pixels).save(file, **_save_options(image_format, level))
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
