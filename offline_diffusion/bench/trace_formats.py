"""The formats of traces that need more than a manifest's reader. Free of torch."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from offline_diffusion.bench.draws import WORDS, Draws
from offline_diffusion.data.columns import KNOWN_COLUMNS, SIZE, names_prompt
from offline_diffusion.data.readers.base import BrokenRecord
from offline_diffusion.data.values import ValueFault, show, to_float, to_integer

REQUEST_LINE = "Request("
GENTD26_TIME = "gmt_create"
SLO = "slo_ms"
MAX_PROMPT_WORDS = 100_000

Values = dict[str, Any] | BrokenRecord

_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*", re.ASCII)
_STRING = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_WORD = re.compile(r"[A-Za-z0-9_.+-]+", re.ASCII)
_BRACKETS = re.compile(r"""[(\[{](?:[^'"()\[\]{}]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")*[)\]}]""", re.DOTALL)
_COMMA = re.compile(r"\s*(,|$)")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,100}", re.ASCII)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0"}
_CONSTANTS = {"None": None, "True": True, "False": False}


def parse_request_line(text: str) -> Values:
    """The fields of a line ``Request(name=value, …)`` as vLLM-Omni's traces have it.

    A value is a number, a string, None, True or False; what stands in brackets is kept as text. Nothing is
    evaluated.
    """
    text = text.strip()
    if not (text.startswith(REQUEST_LINE) and text.endswith(")")):
        return BrokenRecord("is not of the form Request(name=value, …)", show(text))
    inner, position = text[len(REQUEST_LINE) : -1], 0
    values: dict[str, Any] = {}
    while inner[position:].strip():
        if (match := _NAME.match(inner, position)) is None:
            return BrokenRecord("has no name=value where one is due", show(inner[position:]))
        name, position = match[1], match.end()
        if name in values:
            return BrokenRecord("is given twice", column=name)
        try:
            values[name], position = _literal(inner, position)
        except ValueFault as fault:
            return BrokenRecord(str(fault), show(inner[position:]), name)
        if (match := _COMMA.match(inner, position)) is None:
            return BrokenRecord("is not followed by a comma", show(inner[position:]), name)
        position = match.end()
    return values


def _literal(text: str, position: int) -> tuple[Any, int]:
    """The value at ``position`` and where it ends."""
    if match := _STRING.match(text, position):
        return _unescaped(match[1] if match[1] is not None else match[2]), match.end()
    if match := _BRACKETS.match(text, position):
        return match[0], match.end()
    if match := _WORD.match(text, position):
        if match[0] in _CONSTANTS:
            return _CONSTANTS[match[0]], match.end()
        if _INTEGER.fullmatch(match[0]):
            return int(match[0]), match.end()
        try:
            return to_float(match[0]), match.end()
        except ValueFault:
            pass
    raise ValueFault("must be a number, a string in quotes, None, True or False")


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_escaped_character, text)


def _escaped_character(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) == 1:
        return _ESCAPES.get(code, code if code in "\\'\"" else match[0])
    number = int(code[1:], 16)
    return chr(number) if number < 0x110000 else match[0]


def gentd26_values(values: dict[str, Any], draws: Draws) -> Values:
    """A row of GenTD26's ``lora_request_trace.csv``, which has neither prompts nor sizes.

    Its lengths are taken for words. Of a column that is blank the request says nothing; a blank length of
    the negative prompt is no negative prompt. What the service did with a request is left out; what a row
    says itself, in columns of a manifest or `SLO`, is kept.
    """
    kept = {name: value for name, value in values.items() if value is not None and _is_asked_for(name)}
    try:
        if not any(map(names_prompt, kept)):
            kept["prompt"] = draws.prompt(_num_words(values, column := "prompt_length"))
        if "negative_prompt" not in kept:
            length = _num_words(values, column := "negative_prompt_length")
            if length is not None:
                kept["negative_prompt"] = " ".join(WORDS[index % len(WORDS)] for index in range(length))
    except ValueFault as fault:
        return BrokenRecord(str(fault), show(values.get(column)), column)
    return {GENTD26_TIME: values.get(GENTD26_TIME), **kept}


def _is_asked_for(column: str) -> bool:
    return names_prompt(column) or column in KNOWN_COLUMNS or column in (SIZE, SLO)


def has_size(values: dict[str, Any]) -> bool:
    """Whether a row says how large, in part at least."""
    return any(values.get(name) is not None for name in ("height", "width", SIZE))


def _num_words(values: dict[str, Any], column: str) -> int | None:
    value = values.get(column)
    return None if value is None else to_integer(value, low=0, high=MAX_PROMPT_WORDS)


def with_prompt(values: dict[str, Any], draws: Draws) -> dict[str, Any]:
    """``values`` with a drawn prompt where no column names one."""
    body = values.get("body")
    inner = body if isinstance(body, dict) else {}
    if any(names_prompt(name) for name in (*values, *inner)):
        return values
    if isinstance(body, dict):
        return {**values, "body": {**inner, "prompt": draws.prompt()}}
    return {**values, "prompt": draws.prompt()}


def to_seconds(value: Any) -> float:
    """A time: seconds from whenever on, or a date with a time (UTC where it names no zone).

    Raises:
        ValueFault: It is none.
    """
    if isinstance(value, pa.TimestampScalar):
        return float(value.value) / _UNITS[value.type.unit]
    if isinstance(value, str) and (instant := _instant(value.strip())) is not None:
        value = instant
    if isinstance(value, dt.datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=dt.UTC)
        return (aware - _EPOCH).total_seconds()
    try:
        return to_float(value)
    except ValueFault:
        raise ValueFault("must be seconds or a date with a time, such as 2024-11-15 16:57:50") from None


def is_date(value: Any) -> bool:
    """Whether a time is a date; else it is seconds from a zero that nobody knows."""
    if isinstance(value, str):
        return _instant(value.strip()) is not None
    return isinstance(value, pa.TimestampScalar | dt.datetime)


_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_DATE = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d", re.ASCII)


def _instant(text: str) -> dt.datetime | None:
    if not _DATE.match(text):
        return None
    try:
        return dt.datetime.fromisoformat(text)
    except ValueError:
        return None


to_slo: Callable[[Any], float] = lambda value: to_float(value, low=0.0)  # noqa: E731
"""A limit of a request's latency in milliseconds."""
