"""JSON as rows need it: strict, exact, and a fault instead of an exception."""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate
from typing import Any, NoReturn

from offline_diffusion.data.readers.base import BrokenRecord, broken
from offline_diffusion.data.values import show

MAX_LEVELS = 200
"""Of lists and objects in one another. Python's own limit depends on who calls: what ``validate`` takes
must not fail in a run."""

TOO_DEEP = f"is nested in more than {MAX_LEVELS} levels"

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP_OF = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}


class _RefusedError(ValueError):
    """JSON that Python would take but that cannot be kept as it is."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _RefusedError(f"the key {show(twice)!r} occurs twice")
    return values


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _RefusedError(f"{show(text)} is too large for a number")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedError(f"{name} is not a number in JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_refuse_constant)


def is_too_deep(raw: bytes) -> bool:
    """Whether lists and objects are nested in more than ``MAX_LEVELS`` levels."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_LEVELS:
        return False
    brackets = _STRING.sub(b"", raw).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEP_OF.__getitem__, brackets)), default=0) > MAX_LEVELS


def decode_json(raw: bytes) -> Any:
    """The value of one JSON text, or a ``BrokenRecord`` that says why there is none."""
    try:
        if is_too_deep(raw):
            raise RecursionError
        return _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return broken(f"is not UTF-8 (byte {error.start + 1}: {raw[error.start]:#04x})", raw)
    except json.JSONDecodeError as error:
        return broken(f"is not valid JSON: {error.msg} (character {error.pos + 1})", raw)
    except _RefusedError as error:
        return broken(f"is not valid JSON: {error}", raw)
    except ValueError:  # Python's limit on the digits of an integer
        return broken("holds an integer of too many digits", raw)
    except RecursionError:
        return broken(TOO_DEEP, raw)


def object_record(value: Any, raw: bytes) -> dict[str, Any] | BrokenRecord:
    """``value`` where it can be a row: an object, or already broken."""
    if isinstance(value, dict | BrokenRecord):
        return value
    return broken("a row must be a JSON object", raw)
