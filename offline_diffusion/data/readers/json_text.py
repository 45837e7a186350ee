"""JSON as rows need it: strict, exact, and a fault instead of an exception."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from offline_diffusion.data.readers.base import BrokenRecord, broken


class _RefusedError(ValueError):
    """JSON that Python would take but that cannot be kept as it is."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _RefusedError(f"the key {twice!r} occurs twice")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedError(f"{name} is not a number in JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


def decode_json(raw: bytes) -> Any:
    """The value of one JSON text, or a ``BrokenRecord`` that says why there is none."""
    try:
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
        return broken("is nested too deep", raw)


def object_record(value: Any, raw: bytes) -> dict[str, Any] | BrokenRecord:
    """``value`` where it can be a row: an object, or already broken."""
    if isinstance(value, dict | BrokenRecord):
        return value
    return broken("a row must be a JSON object", raw)
