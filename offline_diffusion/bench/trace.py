"""Traces of traffic: who asked for what, and when. Free of torch.

A trace is a manifest, in any format that ``offdiff run`` reads, with two columns more: ``timestamp`` and
``slo_ms``. Read besides are vLLM-Omni's ``Request(name=value, …)`` lines, its weighted kinds of requests
(a JSON list of objects with a ``weight``), and GenTD26's ``lora_request_trace.csv``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offline_diffusion.bench.arrivals import ArrivalKind, arrival_times
from offline_diffusion.bench.draws import Draws, Mixture
from offline_diffusion.bench.trace_formats import (
    GENTD26_TIME,
    REQUEST_LINE,
    SLO,
    gentd26_values,
    has_size,
    is_date,
    parse_request_line,
    to_seconds,
    to_slo,
    with_prompt,
)
from offline_diffusion.data.columns import RowBuilder
from offline_diffusion.data.readers.base import BrokenRecord, Reader, Record, RowCursor
from offline_diffusion.data.readers.files import DAMAGED_HINT, READ_ERRORS, DataFile
from offline_diffusion.data.readers.lines import PromptLinesReader
from offline_diffusion.data.requests_again import RequestsAgain
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.sources import SourceExpander
from offline_diffusion.data.values import ValueFault, show, to_float
from offline_diffusion.errors import TraceError

TIMESTAMP, WEIGHT = "timestamp", "weight"
HEADERS = (TIMESTAMP, GENTD26_TIME)
"""Columns that tell a header from a line of text, beside that of the prompt."""

DEFAULT_NUM_DRAWN = 100
"""Requests of a trace that is only a mixture."""

NO_VIDEO = "num_frames"
COLUMN_MAP = {"request_id": "id"}

DRAWN_SIZES_NOTE = (
    "the trace has no sizes: squares of 512 (15 %), 768 (25 %), 1024 (45 %) and 1536 px (15 %) are drawn; "
    "--sizes takes others"
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; it may ask for several images.

    Args:
        row: What is asked for.
        arrival: Seconds since the first arrival; 0 where the trace has no times.
        slo_ms: The latency that was promised.
    """

    row: ManifestRow
    arrival: float
    slo_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was read.

    Args:
        source: As the user named it.
        requests: By arrival; where there are no times, in the order of the file.
        faults: Of the lines that are no request.
        has_times: Whether its requests have arrival times.
        notes: Lines worth showing once.
    """

    source: str
    requests: Sequence[TraceRequest]
    faults: Sequence[RowFault]
    has_times: bool
    notes: Sequence[str]

    def at(self, kind: ArrivalKind, rate: float, **options: Any) -> Trace:
        """The same requests in the same order at made-up times; see `arrival_times`."""
        times = arrival_times(kind, len(self.requests), rate, **options)
        requests = [replace(r, arrival=time) for r, time in zip(self.requests, times, strict=True)]
        return replace(self, requests=requests, has_times=True)

    def window(self, start: float, end: float) -> Trace:
        """What arrives from ``start`` up to ``end``, in seconds, counted from ``start`` on."""
        kept = [r for r in self.requests if start <= r.arrival < end]
        return replace(self, requests=[replace(r, arrival=r.arrival - start) for r in kept])

    def first(self, count: int) -> Trace:
        """The ``count`` requests that arrive first."""
        return replace(self, requests=self.requests[:count])

    def sped_up(self, factor: float) -> Trace:
        """All arrivals ``factor`` times as fast."""
        return replace(self, requests=[replace(r, arrival=r.arrival / factor) for r in self.requests])


def read_trace(
    source: str,
    draws: Draws | None = None,
    *,
    limit: int | None = None,
    num_drawn: int = DEFAULT_NUM_DRAWN,
    seed: int = 0,
) -> Trace:
    """Reads a trace of any known format.

    Args:
        source: A file, or whatever else ``offdiff run`` takes for a manifest.
        draws: Fills in what the trace does not say.
        limit: Take only so many requests; of a mixture, draw so many.
        num_drawn: Of a mixture without a limit.
        seed: Of the draw from a mixture.

    Raises:
        TraceError: It holds no request at all, or is a mixture with a fault.
        ManifestError: It is not there, or cannot be read.
    """
    draws = draws or Draws()
    notes: list[str] = []
    reading = _Reading(source, draws, notes)
    for reader in _readers(source, notes):
        for record in _records(reader, source):
            if limit is not None and not reading.weights and len(reading.found) >= limit:
                break
            reading.take(reader.name, record)
    if reading.weights:
        return _drawn(reading, draws, num_drawn if limit is None else limit, seed)
    return reading.finish()


def read_mixture(source: str) -> Mixture:
    """Reads a list of weighted kinds of requests, each without a prompt.

    Raises:
        TraceError: It is none, or has a fault.
        ManifestError: It is not there, or cannot be read.
    """
    reading = _Reading(source, Draws(), [])
    for reader in _readers(source, []):
        for record in _records(reader, source):
            reading.take(reader.name, record)
    if not reading.weights:
        raise TraceError(
            f"{source}: holds no weighted kinds of requests",
            hint='such as [{"width": 512, "height": 512, "num_inference_steps": 20, "weight": 1}]',
        )
    return reading.mixture()


def _readers(source: str, notes: list[str]) -> Iterator[Reader]:
    path = os.path.expanduser(source)
    if os.path.isfile(path):
        file = DataFile(source, None, path)
        if file.head().lstrip(b"\xef\xbb\xbf \t\r\n").startswith(REQUEST_LINE.encode()):
            yield PromptLinesReader(file)
            return
    yield from SourceExpander(HEADERS, notes, RequestsAgain()).readers(source)


def _records(reader: Reader, source: str) -> Iterator[Record]:
    records = reader.records(0, RowCursor([range(2**63 - 1)]))
    try:
        yield from records
    except READ_ERRORS as error:
        raise TraceError(f"{source}: cannot be read to its end: {error}", hint=DAMAGED_HINT) from None
    finally:
        records.close()


@dataclass(slots=True)
class _Found:
    """A request whose time counts from whenever the trace counts."""

    row: ManifestRow
    time: float | None
    slo_ms: float | None


class _Reading:
    """Requests and faults so far."""

    def __init__(self, source: str, draws: Draws, notes: list[str]) -> None:
        self.source = source
        self.found: list[_Found] = []
        self.faults: list[RowFault] = []
        self.weights: list[float] = []
        self.notes, self._draws = notes, draws
        self._builder = RowBuilder(COLUMN_MAP, [])  # its notes are of columns that are carried, none is here
        self._has_request_lines: bool | None = None
        self._has_dates: bool | None = None
        self._has_prompt = False  # the row that is being built
        self._num_rows = 0

    def take(self, file: str, record: Record) -> None:
        """One line more."""
        record = record._replace(row=self._num_rows, values=self._adapted(record.values))
        self._num_rows += 1
        built = self._builder.build(file, record)
        if isinstance(built, tuple):
            self.faults += built
            return
        try:
            self._add(built)
        except _Fault as fault:
            self.faults.append(
                RowFault(built.row, built.id, built.file, built.line, fault.column, fault.value, fault.reason)
            )

    def _adapted(self, values: dict[str, Any] | BrokenRecord) -> dict[str, Any] | BrokenRecord:
        if isinstance(values, BrokenRecord):
            return values
        text = values.get("prompt") if len(values) == 1 else None
        if self._has_request_lines is None:
            self._has_request_lines = isinstance(text, str) and text.strip().startswith(REQUEST_LINE)
        if self._has_request_lines:
            parsed = parse_request_line(str(text))
            if isinstance(parsed, BrokenRecord):
                return parsed
            values = parsed
        if GENTD26_TIME in values:
            if self._draws.sizes is None and not has_size(values):
                self._draws.sizes = Mixture.default()
                self.notes.append(DRAWN_SIZES_NOTE)
            return gentd26_values(values, self._draws)
        filled = with_prompt(values, self._draws)
        self._has_prompt = filled is values
        return filled

    def _add(self, row: ManifestRow) -> None:
        carried = row.carried
        frames = _converted(carried, NO_VIDEO, to_float)
        if frames is not None and frames > 1:
            raise _Fault(NO_VIDEO, show(carried[NO_VIDEO]), "is a video: only images are drawn")
        found = _Found(
            self._draws.with_size(replace(row, carried={})),
            self._time(carried),
            _converted(carried, SLO, to_slo),
        )
        if WEIGHT in carried and found.time is None and not self._has_prompt:
            self.weights.append(_converted(carried, WEIGHT, to_slo) or 0.0)
        self.found.append(found)

    def _time(self, carried: Any) -> float | None:
        """Of a row; the kind of the first one decides, for numbers and dates have no zero in common."""
        column = GENTD26_TIME if GENTD26_TIME in carried else TIMESTAMP
        time = _converted(carried, column, to_seconds)
        if time is None:
            return None
        value = carried[column]
        has_date = is_date(value)
        if self._has_dates is None:
            self._has_dates = has_date
        if has_date is not self._has_dates:
            kinds = ("a date", "seconds") if has_date else ("seconds", "a date")
            raise _Fault(column, show(value), "is {}, but the first time of the trace is {}".format(*kinds))
        return time

    def mixture(self) -> Mixture:
        """Of all that has weights.

        Raises:
            TraceError: A line is faulty or has none, or none is above 0.
        """
        if self.faults:
            raise TraceError(str(self.faults[0]))
        if len(self.weights) != len(self.found):
            raise TraceError(f"{self.source}: some of its kinds of requests have a weight and some have none")
        if not sum(self.weights) > 0:
            raise TraceError(f"{self.source}: no weight is above 0")
        return Mixture([found.row.params for found in self.found], self.weights)

    def finish(self) -> Trace:
        """The trace; where some requests have times, those without are faults.

        Raises:
            TraceError: There is no request.
        """
        has_times = any(found.time is not None for found in self.found)
        timed = [found for found in self.found if not has_times or found.time is not None]
        for found in self.found:
            if has_times and found.time is None:
                row = found.row
                fault = RowFault(row.row, row.id, row.file, row.line, TIMESTAMP, "", "there is no time")
                self.faults.append(fault)
        if not timed:
            first = f"; the first fault: {self.faults[0]}" if self.faults else ""
            raise TraceError(f"{self.source}: holds no request{first}")
        start = min(found.time or 0.0 for found in timed)
        requests = [
            TraceRequest(f.row, (f.time or 0.0) - start if has_times else 0.0, f.slo_ms) for f in timed
        ]
        requests.sort(key=lambda request: request.arrival)
        self.faults.sort(key=lambda fault: fault.row)
        return Trace(self.source, requests, self.faults, has_times, self.notes)


def _drawn(reading: _Reading, draws: Draws, count: int, seed: int) -> Trace:
    """Requests drawn from a mixture; no times."""
    mixture = reading.mixture()
    requests = []
    for number, index in enumerate(mixture.draw(count, seed)):
        kind = reading.found[index]
        row = replace(kind.row, row=number, id=f"{number:08d}", prompt=draws.prompt())
        requests.append(TraceRequest(row, 0.0, kind.slo_ms))
    return Trace(reading.source, requests, (), False, reading.notes)


class _Fault(Exception):
    def __init__(self, column: str, value: str, reason: str) -> None:
        super().__init__(reason)
        self.column, self.value, self.reason = column, value, reason


def _converted(carried: Any, column: str, convert: Any) -> float | None:
    value = carried.get(column)
    if value is None:
        return None
    try:
        return float(convert(value))
    except ValueFault as fault:
        raise _Fault(column, show(value), str(fault)) from None
