"""What a cell of a manifest may hold: conversions that lose nothing, or say why they cannot."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

import pyarrow as pa

from offline_diffusion.request import MAX_SEED

MAX_PROMPT_BYTES = 2**20
MAX_ID_CHARS = 1024
MAX_SHOWN_CHARS = 200
MAX_STEPS = 10_000
MAX_NUM_IMAGES = 10_000
"""A row with more images would not fit in memory as one row; several rows do."""
MAX_PIXELS_A_SIDE = 2**31 - 1

MAX_EXACT_FLOAT = 2**53
"""From here on neighbouring integers share one double."""
MAX_NUMBER_CHARS = 100

SURROGATE_REASON = "holds half of a surrogate pair, which is no character"

_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_SIZE = re.compile(r"(\d{1,10})\s*[xX×*]\s*(\d{1,10})", re.ASCII)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

Convert = Callable[[Any], Any]


class ValueFault(Exception):
    """A value that its column does not allow; the text is the reason."""


def show(value: Any, limit: int = MAX_SHOWN_CHARS) -> str:
    """``value`` as one printable line of at most ``limit`` characters: text as it is, the rest as JSON."""
    if isinstance(value, str):
        text = value
    else:
        try:
            text = json_text(value)
        except (RecursionError, ValueError):
            text = f"<{type(value).__name__}>"
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    text = _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return text.encode("utf-8", "backslashreplace").decode()


def json_text(value: Any) -> str:
    """``value`` as JSON text; what JSON lacks becomes a string (bytes as Base64, times in ISO 8601)."""
    return json.dumps(value, ensure_ascii=False, default=plain)


def plain(value: Any) -> Any:
    """A JSON value for what JSON has no type for (the ``default`` of an encoder)."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, pa.Scalar):
        return f"{value.value} {value.type}" if hasattr(value, "value") else str(value)
    return str(value)


def to_integer(value: Any, *, low: int, high: int) -> int:
    """An integer from ``low`` to ``high``; text and floats are taken when they say exactly one.

    Raises:
        ValueFault: It is no integer, is out of range, or is a float too large to be exact.
    """
    number = value if type(value) is int else _exact_integer(value)
    if number is None or not low <= number <= high:
        raise ValueFault(f"must be an integer from {low} to {high}")
    return number


def _exact_integer(value: Any) -> int | None:
    if isinstance(value, str):
        return _integer_of_text(value.strip())
    if isinstance(value, float):
        if not value.is_integer():
            return None
        if abs(value) >= MAX_EXACT_FLOAT:
            raise ValueFault("is a float of 2**53 or more, which may have lost digits: write an integer")
        return int(value)
    if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value():
        return int(value)
    return None


def _integer_of_text(text: str) -> int | None:
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return _exact_integer(Decimal(text))
    return None


def to_float(value: Any, *, low: float = -math.inf) -> float:
    """A finite number of at least ``low``; text is taken.

    Raises:
        ValueFault: It is no such number.
    """
    number = math.nan
    if isinstance(value, str):
        text = value.strip()
        number = float(text) if len(text) <= MAX_NUMBER_CHARS and _NUMBER.fullmatch(text) else math.nan
    elif isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        try:
            number = float(value)
        except (OverflowError, InvalidOperation):
            number = math.inf
    if not (math.isfinite(number) and number >= low):
        at_least = f" of at least {low:g}" if math.isfinite(low) else ""
        raise ValueFault(f"must be a finite number{at_least}")
    return number


def to_text(value: Any) -> str:
    """A string that can be written as UTF-8 and is no longer than a prompt may be.

    Raises:
        ValueFault: It is no such string.
    """
    if not isinstance(value, str):
        raise ValueFault("must be text")
    if value.isascii():
        num_bytes = len(value)
    else:
        try:
            num_bytes = len(value.encode())
        except UnicodeEncodeError:
            raise ValueFault(SURROGATE_REASON) from None
    if num_bytes > MAX_PROMPT_BYTES:
        raise ValueFault(f"is {num_bytes} bytes long; at most {MAX_PROMPT_BYTES} are allowed")
    return value


def to_filled_text(value: Any) -> str:
    """As ``to_text``, and not blank.

    Raises:
        ValueFault: It is no such string.
    """
    text = to_text(value)
    if not text or text.isspace():
        raise ValueFault("must not be blank")
    return text


def to_id(value: Any) -> str:
    """A row's id: text without control characters, or an integer.

    Raises:
        ValueFault: It is neither, or too long.
    """
    if not isinstance(value, str):
        number = value if type(value) is int else _exact_integer(value)
        if number is None:
            raise ValueFault("must be text or an integer")
        # 4 bits a digit are more than enough; str() of a huge integer would raise.
        if number.bit_length() > 4 * MAX_ID_CHARS or len(text := str(number)) > MAX_ID_CHARS:
            raise ValueFault(f"must have at most {MAX_ID_CHARS} digits")
        return text
    text = to_filled_text(value)
    if len(text) > MAX_ID_CHARS:
        raise ValueFault(f"is {len(text)} characters long; at most {MAX_ID_CHARS} are allowed")
    if _CONTROL.search(text):
        raise ValueFault("must not hold control characters")
    return text


def to_size(value: Any) -> tuple[int, int] | None:
    """``(width, height)`` in pixels of text such as ``1024x768``; None for ``auto``, the model's own.

    Raises:
        ValueFault: It is no such text.
    """
    text = value.strip() if isinstance(value, str) else ""
    if text == "auto":
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueFault("must be text of the form WIDTHxHEIGHT, such as 1024x768")
    width, height = int(match[1]), int(match[2])
    for side in (width, height):
        to_integer(side, low=1, high=MAX_PIXELS_A_SIDE)
    return width, height


_to_side = partial(to_integer, low=1, high=MAX_PIXELS_A_SIDE)

PARAM_CONVERTERS: dict[str, Convert] = {
    "negative_prompt": to_text,
    "height": _to_side,
    "width": _to_side,
    "num_inference_steps": partial(to_integer, low=1, high=MAX_STEPS),
    "true_cfg_scale": partial(to_float, low=0.0),
    "guidance_scale": partial(to_float, low=0.0),
    "seed": partial(to_integer, low=0, high=MAX_SEED),
    "num_images_per_prompt": partial(to_integer, low=1, high=MAX_NUM_IMAGES),
    "lora": to_filled_text,
    "lora_scale": to_float,
}
"""Fields of ``SamplingParams`` by name, each with what makes it of a cell."""
