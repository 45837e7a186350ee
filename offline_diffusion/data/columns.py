"""From a file's columns to a row: names, aliases, type rules, identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

from offline_diffusion.data.readers.base import BrokenRecord, Record
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.schemas import IMAGE_COLUMNS
from offline_diffusion.data.values import (
    PARAM_CONVERTERS,
    SURROGATE_REASON,
    Convert,
    ValueFault,
    json_text,
    plain,
    show,
    to_filled_text,
    to_id,
    to_size,
)
from offline_diffusion.errors import ManifestError, did_you_mean
from offline_diffusion.request import SamplingParams

PROMPT_ALIASES = ("prompt", "prompts", "text", "caption", "p")
"""Taken whatever their case."""
ALIASES = {
    "id": ("custom_id",),
    "num_inference_steps": ("steps", "step", "st"),
    "true_cfg_scale": ("cfg", "cfg_scale", "c"),
    "seed": ("se",),
    "num_images_per_prompt": ("n",),
}
KNOWN_COLUMNS = ("id", "prompt", *PARAM_CONVERTERS)
SIZE = "size"
"""Text WIDTHxHEIGHT: stands for ``height`` and ``width``, or for the one that a row lacks."""
_BOTH_SIDES = "height and width"

OUTPUT_COLUMNS = frozenset(IMAGE_COLUMNS)
"""A carried column of such a name gets ``_carried`` appended."""

MAX_CARRIED_COLUMNS = 4096
MAX_NOTES = 100
MAX_PLANNED_COLUMNS = 65_536
"""Over all plans that are kept: rows may have thousands of columns, and never the same."""


def names_prompt(column: str) -> bool:
    """Whether ``column`` is a name or an alias of the prompt."""
    return column.lower() in PROMPT_ALIASES


@dataclass(frozen=True)
class ColumnPlan:
    """What each column of a row, or of a whole file, is read as.

    Args:
        prompt, id, size: Their columns in the file, None where there is none. Where there are both
            ``height`` and ``width``, ``size`` is carried.
        params: Column, field of ``SamplingParams`` and conversion, for each that is there.
        carried: Column and the name under which it is carried, for all others.
        notes: One line for each thing that a user would want to know.
    """

    prompt: str | None
    id: str | None
    size: str | None
    params: tuple[tuple[str, str, Convert], ...]
    carried: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def make_plan(columns: Sequence[str], column_map: Mapping[str, str]) -> ColumnPlan:
    """Decides what each of ``columns`` is read as.

    A column's own name wins over ``column_map``, which wins over aliases; of several aliases the one
    listed first in ``PROMPT_ALIASES`` or ``ALIASES`` wins. What loses is carried.

    Args:
        columns: Names in the file.
        column_map: Name in the file to ours; an empty string of ours only carries the column.
    """
    claims: dict[str, str] = {}
    losers: dict[str, str] = {}
    for ours in (*KNOWN_COLUMNS, SIZE):
        candidates = _candidates(ours, columns, column_map)
        if ours == SIZE and "height" in claims and "width" in claims:
            losers.update(dict.fromkeys(candidates, _BOTH_SIDES))
        elif candidates:
            claims[ours] = candidates[0]
            losers.update(dict.fromkeys(candidates[1:], ours))
    taken = set(claims.values())
    carried = _carried_names([column for column in columns if column not in taken])
    params = ((claims[name], name, convert) for name, convert in PARAM_CONVERTERS.items() if name in claims)
    return ColumnPlan(
        prompt=claims.get("prompt"),
        id=claims.get("id"),
        size=claims.get(SIZE),
        params=tuple(params),
        carried=tuple(carried.items()),
        notes=tuple(_notes(claims, losers, carried, column_map)),
    )


def _candidates(ours: str, columns: Sequence[str], column_map: Mapping[str, str]) -> list[str]:
    """The columns that could be read as ``ours``, best first."""
    free = [column for column in columns if column not in column_map]
    exact = [ours] if ours in free else []
    mapped = [theirs for theirs, target in column_map.items() if target == ours and theirs in columns]
    if ours == "prompt":
        aliases = [name for alias in PROMPT_ALIASES for name in free if name.lower() == alias]
    else:
        aliases = [alias for alias in ALIASES.get(ours, ()) if alias in free]
    return list(dict.fromkeys([*exact, *mapped, *aliases]))


def _carried_names(columns: Sequence[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for column in columns:
        name = column
        while name in OUTPUT_COLUMNS or (name != column and name in columns):
            name += "_carried"
        names[column] = name
    return names


def _notes(
    claims: Mapping[str, str],
    losers: Mapping[str, str],
    carried: Mapping[str, str],
    column_map: Mapping[str, str],
) -> list[str]:
    notes = [
        f"column {show(theirs)!r} is read as {_BOTH_SIDES if ours == SIZE else ours}"
        for ours, theirs in claims.items()
        if ours != theirs or ours == SIZE
    ]
    absent = [name for name in KNOWN_COLUMNS if name not in claims]
    for column, name in islice(carried.items(), MAX_NOTES):
        shown = f"column {show(column)!r} is carried"
        if name != column:
            notes.append(f"{shown} as {show(name)!r}: the output has a column {show(column)!r} of its own")
        elif losers.get(column) == _BOTH_SIDES:
            notes.append(f"{shown} in rows with columns for {_BOTH_SIDES}")
        elif column in losers:
            notes.append(f"{shown}: {losers[column]} comes from another column")
        elif column not in column_map and (close := did_you_mean(column, absent)) is not None:
            notes.append(f"{shown}; did you mean {close}?")
    return notes


def check_column_map(column_map: Mapping[str, str]) -> None:
    """Checks that every column is mapped to one of ours.

    Raises:
        ManifestError: One is not.
    """
    known = (*KNOWN_COLUMNS, SIZE)
    for theirs, ours in column_map.items():
        if ours and ours not in known:
            close = did_you_mean(ours, known)
            raise ManifestError(
                f"--map {theirs}={ours}: {ours!r} is no column of a manifest",
                hint=f"did you mean {theirs}={close}?" if close else f"known: {', '.join(known)}",
            )


def is_openai_line(columns: Sequence[str] | Mapping[str, Any]) -> bool:
    """Whether a row is a line of an OpenAI batch: its parameters lie one level down, in ``body``."""
    return "custom_id" in columns and "body" in columns


def flatten_openai_line(values: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the fields of its ``body`` beside its own; a name used twice gets a prefix in ``body``."""
    flat = {name: value for name, value in values.items() if name != "body"}
    return flat | {f"body.{name}" if name in flat else name: value for name, value in body.items()}


def flatten_openai_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of the rows that ``flatten_openai_line`` makes of rows of ``schema``."""
    if not is_openai_line(schema.names) or not pa.types.is_struct(schema.field("body").type):
        return schema
    fields = {field.name: field for field in schema}
    body = fields.pop("body").type
    return pa.schema(list(flatten_openai_line(fields, {field.name: field for field in body}).values()))


OPENAI_NOTE = "lines with custom_id and body are read as OpenAI batch requests: body's fields are columns"

_ENCODER = json.JSONEncoder(
    sort_keys=True, ensure_ascii=False, separators=(",", ":"), check_circular=False, default=plain
)


def content_hash(prompt: Any, params: Mapping[str, Any], carried: Mapping[str, Any]) -> str:
    """16 hex digits of BLAKE2b over the canonical JSON of a row's values.

    Raises:
        UnicodeEncodeError: A text cannot be written as UTF-8.
        RecursionError: A value is nested too deep.
    """
    text = _ENCODER.encode([prompt, params, carried])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class RowBuilder:
    """Makes rows, or their faults, of records.

    Args:
        column_map: Name in the file to ours.
        notes: Gets a line for each thing worth telling, once.
    """

    def __init__(self, column_map: Mapping[str, str], notes: list[str]) -> None:
        self._column_map = dict(column_map)
        self._notes = notes
        self._plans: dict[tuple[str, ...], ColumnPlan] = {}
        self._num_planned = 0
        self._carried: set[str] = set()

    def plan(self, columns: tuple[str, ...]) -> ColumnPlan:
        """What ``columns`` are read as.

        Raises:
            ManifestError: The manifest has more columns than an output table should.
        """
        if (known := self._plans.get(columns)) is not None:
            return known
        plan = make_plan(columns, self._column_map)
        self._num_planned += len(columns)
        if self._num_planned > MAX_PLANNED_COLUMNS:
            self._plans.clear()
            self._num_planned = len(columns)
        self._plans[columns] = plan
        for note in plan.notes:
            self.note(note)
        self._carried.update(name for _, name in plan.carried)
        if len(self._carried) > MAX_CARRIED_COLUMNS:
            raise ManifestError(
                f"the manifest has over {MAX_CARRIED_COLUMNS} different columns to carry",
                hint="put values of varying names into one column that holds an object",
            )
        return plan

    def note(self, text: str) -> None:
        """Keeps ``text`` for the user, once."""
        if text not in self._notes and len(self._notes) < MAX_NOTES:
            self._notes.append(text)

    def build(self, file: str, record: Record) -> ManifestRow | tuple[RowFault, ...]:
        """The row, or every fault of it.

        Args:
            file: Name for the user, unless the record has its own.
            record: What the reader found.

        Raises:
            ManifestError: See ``plan``.
        """
        values = record.values
        file = record.file or file
        if isinstance(values, BrokenRecord):
            return (_broken_fault(file, record, values),)
        if is_openai_line(values):
            self.note(OPENAI_NOTE)
            body = values["body"]
            if not isinstance(body, dict):
                row = _RowInMaking(file, record, self.plan(tuple(values)))
                return row.only_fault("body", body, "must be an object that holds the prompt")
            values = flatten_openai_line(values, body)
        return _RowInMaking(file, record, self.plan(tuple(values))).make(values)


def _broken_fault(file: str, record: Record, found: BrokenRecord) -> RowFault:
    row, line = record.row, record.line
    return RowFault(
        row, f"{row:08d}", file, line, found.column, found.value, found.reason, found.content_hash
    )


class _RowInMaking:
    """One record on its way to a row; collects every fault it meets."""

    __slots__ = ("_faults", "_file", "_id", "_line", "_plan", "_row")

    def __init__(self, file: str, record: Record, plan: ColumnPlan) -> None:
        self._file = file
        self._row, self._line = record.row, record.line
        self._plan = plan
        self._id = f"{self._row:08d}"
        self._faults: list[tuple[str, Any, str]] = []

    def make(self, values: Mapping[str, Any]) -> ManifestRow | tuple[RowFault, ...]:
        plan = self._plan
        prompt = self._prompt(values)
        if plan.id is not None and values[plan.id] is not None:
            self._id = self._converted(plan.id, values[plan.id], to_id) or self._id
        params = {}
        for column, name, convert in plan.params:
            if (value := values[column]) is not None:
                params[name] = self._converted(column, value, convert)
        if plan.size is not None and values[plan.size] is not None:
            self._fill_size(params, plan.size, values[plan.size])
        carried = {name: values[column] for column, name in plan.carried}
        digest = self._hash(prompt, params, carried)
        if self._faults:
            digest = _hash_of_faulty(values)
            return tuple(self._fault(*fault, digest) for fault in self._faults)
        made = SamplingParams(**params) if params else _NO_PARAMS
        return ManifestRow(self._row, self._id, self._file, self._line, digest, prompt, made, carried)

    def only_fault(self, column: str, value: Any, reason: str) -> tuple[RowFault, ...]:
        return (self._fault(column, value, reason, ""),)

    def _prompt(self, values: Mapping[str, Any]) -> Any:
        column = self._plan.prompt
        value = None if column is None else values[column]
        if value is None:
            self._faults.append((column or "prompt", "", "there is no prompt"))
            return None
        return self._converted(column or "prompt", value, to_filled_text)

    def _fill_size(self, params: dict[str, Any], column: str, value: Any) -> None:
        """Takes from ``size`` what the row does not give otherwise; what it gives must be the same."""
        size = self._converted(column, value, to_size)
        if size is None:
            return
        for name, side in zip(("width", "height"), size, strict=True):
            given = params.setdefault(name, side)
            if given is not None and given != side:
                self._faults.append((column, value, f"disagrees with {name}={given}"))

    def _converted(self, column: str, value: Any, convert: Convert) -> Any:
        try:
            return convert(value)
        except ValueFault as fault:
            self._faults.append((column, value, str(fault)))
            return None

    def _hash(self, prompt: Any, params: Mapping[str, Any], carried: Mapping[str, Any]) -> str:
        if self._faults:
            return ""
        try:
            return content_hash(prompt, params, carried)
        except (UnicodeEncodeError, RecursionError):
            self._faults += _unwritable(self._plan, carried)
            return ""

    def _fault(self, column: str, value: Any, reason: str, digest: str) -> RowFault:
        return RowFault(self._row, self._id, self._file, self._line, column, show(value), reason, digest)


_NO_PARAMS = SamplingParams()


def _unwritable(plan: ColumnPlan, carried: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """A fault for each carried value that no file can hold."""
    faults = []
    for column, name in plan.carried:
        try:
            json_text([column, carried[name]]).encode()
        except UnicodeEncodeError:
            faults.append((show(column), carried[name], SURROGATE_REASON))
        except RecursionError:
            faults.append((show(column), "", "is nested too deep"))
    return faults


def _hash_of_faulty(values: Mapping[str, Any]) -> str:
    """As ``content_hash``, of whatever the row holds."""
    try:
        raw = _ENCODER.encode(values).encode("utf-8", "surrogatepass")
    except RecursionError:
        raw = b""
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
