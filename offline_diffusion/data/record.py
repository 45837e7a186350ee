"""From an engine's output to the record that is kept of it."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from offline_diffusion.config import ImageFormat
from offline_diffusion.data.encode import ENCODE_ERRORS, crop_centre, encode_image
from offline_diffusion.data.partial import Record
from offline_diffusion.data.rows import ImageTask
from offline_diffusion.request import RequestOutput

_MAX_ERROR_CHARS = 2_000


def make_record(
    image: ImageTask,
    output: RequestOutput,
    *,
    row_hash: str,
    image_format: ImageFormat,
    image_level: int | None = None,
    task: int,
    worker: str,
    earlier_attempts: int = 0,
) -> Record:
    """Crops, hashes and encodes an output. What cannot be encoded becomes a failed record.

    Args:
        image: What was asked.
        output: What came out, ``ok`` or ``failed``.
        row_hash: The row's content hash.
        image_format, image_level: Of the encoded image; no level is the format's default.
        task, worker: Who made it.
        earlier_attempts: Of earlier runs, added to the output's own.
    """
    started = time.perf_counter()
    data, sha256 = None, None
    error_type, error = output.error_type, output.error
    if output.status == "ok":
        try:
            data, sha256 = _encode_output(image, output, image_format, image_level)
        except ENCODE_ERRORS as problem:
            error_type, error = "encode_error", f"cannot encode as {image_format}: {problem}"
    result: dict[str, Any] = asdict(output.metrics) | {
        "id": image.id,
        "attempts": earlier_attempts + output.metrics.attempts,
        "row_hash": row_hash,
        "negative_prompt": image.request.negative_prompt,
        "seed": image.request.seed,
        "width": image.final_width,
        "height": image.final_height,
        "num_inference_steps": image.request.num_inference_steps,
        "true_cfg_scale": image.request.true_cfg_scale,
        "guidance_scale": image.request.guidance_scale,
        "sha256": sha256,
        "error_type": error_type,
        "error": None if error is None else error[:_MAX_ERROR_CHARS],
        "write_s": time.perf_counter() - started,
        "task": task,
        "worker": worker,
        "finished_at": time.time_ns() // 1000,
        "requested_height": image.requested_height,
        "requested_width": image.requested_width,
    }
    return Record(image.row, image.image_index, "failed" if data is None else "ok", data, result)


def _encode_output(
    image: ImageTask, output: RequestOutput, image_format: ImageFormat, image_level: int | None
) -> tuple[bytes, str]:
    assert output.pixels is not None, "an output that is ok has pixels"
    drawn = (image.request.height, image.request.width, 3)
    assert output.pixels.shape == drawn, f"pixels are {output.pixels.shape}, asked were {drawn}"
    pixels = crop_centre(output.pixels, image.final_height, image.final_width)
    return encode_image(pixels, image_format, image_level)
