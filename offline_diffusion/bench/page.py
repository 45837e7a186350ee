"""A report as one HTML page that needs nothing but a browser. Free of torch."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from html import escape

from offline_diffusion.bench.records import RequestRecord
from offline_diffusion.bench.report import SIZE_HEADER, Report, Run, seconds, size_rows, summary_rows
from offline_diffusion.bench.svg import BOTTOM, ROW_HEIGHT, TOP, Chart, colour

MAX_DOTS = 1500
"""Of a run; of more requests, every so many is drawn."""
MAX_CURVE_POINTS = 200
NUM_BARS = 48
"""Requests in the timeline: those around the one that came when most were at hand."""
MANY_SECONDS = 20_000
"""From here on time is told in hours."""
MAX_CLASSES = 8
"""Size classes with a colour of their own; of more, the rarest are ``others``."""
OTHERS = "others"

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --line: #e3e6ec; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ee; --soft: #9aa3b2; --line: #323846; --paper: #171a21; }
}
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem auto; max-width: 1180px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.facts { color: var(--soft); margin: .1rem 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; }
.wide { overflow-x: auto; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
svg { max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
figure { margin: 0; max-width: 100%; } figcaption { padding-left: 58px; font-size: 12.5px; max-width: 500px; }
.key { color: var(--soft); margin-left: .7em; white-space: nowrap; }
.key i { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .3em; }
svg .tick { fill: var(--soft); } svg .end { text-anchor: end; } svg .mid { text-anchor: middle; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--soft); }
"""


def page(report: Report) -> str:
    """The whole page."""
    runs = report.runs
    title = f"Replay of {report.trace}"
    facts = "".join(
        f'<p class="facts">{escape(name)}: {escape(text)}</p>' for name, text in report.facts.items()
    )
    summary = _table(["", *(run.title for run in runs)], summary_rows(runs))
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="facts">model: {escape(report.model)}</p>{facts}',
        f"<h2>Summary</h2>{summary}",
        f'<div class="charts">{_curves(runs)}{_against_load(runs)}</div>',
        *map(_run_section, runs),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>{''.join(parts)}</body></html>\n"
    )


def _run_section(run: Run) -> str:
    options = ", ".join(f"{name}={value}" for name, value in run.options.items()) or "all by default"
    charts = "".join(map(str, [*_over_time(run), _timeline(run)]))
    return (
        f"<h2>{escape(run.title)}</h2>"
        f'<p class="facts">engine options: {escape(options)}</p>'
        f"{_table(SIZE_HEADER, size_rows(run))}"
        f'<div class="charts">{charts}</div>'
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# --- all runs -------------------------------------------------------------------------------------


def _done(run: Run) -> list[RequestRecord]:
    return [record for record in run.replayed.records if record.is_ok]


def _series(runs: Sequence[Run]) -> list[tuple[str, list[RequestRecord]]]:
    """Of several runs each, of a single one each size class."""
    if len(runs) > 1:
        return [(run.title, _done(run)) for run in runs]
    groups: dict[str, list[RequestRecord]] = {name: [] for name in _classes(runs[0])}
    for record in _done(runs[0]):
        groups[record.size_class if record.size_class in groups else OTHERS].append(record)
    return list(groups.items())


def _classes(run: Run) -> list[str]:
    """The size classes that have a colour, the smallest first."""
    classes = run.numbers["size_classes"]
    if len(classes) <= MAX_CLASSES:
        return list(classes)
    by_count = sorted(classes, key=lambda name: classes[name]["completed_requests"], reverse=True)
    kept = set(by_count[: MAX_CLASSES - 1])
    return [*(name for name in classes if name in kept), OTHERS]


def _curves(runs: Sequence[Run]) -> str:
    """The share of requests that were done within a time; a run that was ended early has no such shares."""
    is_whole = [not run.replayed.stopped for run in runs]
    series = [
        (index, name, sorted(r.latency for r in records))
        for index, (name, records) in enumerate(_series(runs))
        if records and is_whole[index if len(runs) > 1 else 0]
    ]
    longest = max((latencies[-1] for *_, latencies in series), default=0.0)
    chart = Chart("Done within", "latency, s", "share of requests", longest, 1.0, percent=True)
    for index, name, latencies in series:
        last = len(latencies) - 1
        count = min(MAX_CURVE_POINTS, len(latencies))
        places = [round(step * last / max(1, count - 1)) for step in range(count)]
        points = [(latencies[place], (place + 1) / len(latencies)) for place in places]
        chart.line([(latencies[0], 0.0), *points, (longest, 1.0)], colour(index))
        chart.name(name, colour(index))
    return str(chart)


def _against_load(runs: Sequence[Run]) -> str:
    """Each request's latency against how many were at hand when it came."""
    loads = [
        dict(zip(map(id, run.replayed.records), at_hand(run.replayed.records), strict=True)) for run in runs
    ]
    load = {key: count for counts in loads for key, count in counts.items()}
    series = _series(runs)
    everyone = [record for _, records in series for record in records]
    chart = Chart(
        "Latency against load",
        "requests at hand when it came",
        "latency, s",
        max((load[id(record)] for record in everyone), default=0),
        max((record.latency for record in everyone), default=0.0),
    )
    every = -(-len(everyone) // (MAX_DOTS * len(runs))) or 1
    for index, (name, records) in enumerate(series):
        dots = [(load[id(r)], r.latency, f"{r.id}: {seconds(r.latency)}") for r in records[::every]]
        chart.dots(dots, colour(index))
        chart.name(name, colour(index))
    return str(chart)


def at_hand(records: Sequence[RequestRecord]) -> list[int]:
    """For each request, how many had come and were not done when it came, itself included."""
    arrivals = sorted(record.arrival for record in records)
    ends = sorted(record.finished for record in records if record.finished is not None)
    return [
        bisect.bisect_right(arrivals, record.arrival) - bisect.bisect_right(ends, record.arrival)
        for record in records
    ]


# --- one run --------------------------------------------------------------------------------------


def _over_time(run: Run) -> list[Chart]:
    bins, duration = run.numbers["over_time"], run.numbers["duration"]
    unit, unit_s = ("h", 3600.0) if duration >= MANY_SECONDS else ("s", 1.0)
    charts = []
    for index, (title, key, label) in enumerate(
        [
            ("Token budget in use", "step_fill", "share of the budget"),
            ("Images in a step", "batch_images", "images"),
            ("Images waiting", "waiting_images", "images"),
        ]
    ):
        filled = [
            (own["start"] / unit_s, own["end"] / unit_s, own[key]) for own in bins if own[key] is not None
        ]
        is_share = key == "step_fill"
        highest = 1.0 if is_share else max((value for *_, value in filled), default=0.0)
        end = duration / unit_s
        chart = Chart(title, f"time, {unit}", label, end, highest, percent=is_share, height=190)
        chart.steps(filled, colour(index))
        charts.append(chart)
    return charts


def _timeline(run: Run) -> Chart:
    """Requests of a busy window: pale while they wait, then from their first step to their last image."""
    records = busiest(run.replayed.records)
    classes = _classes(run)
    start = min((record.arrival for record in records), default=0.0)
    end = max((record.finished or 0.0 for record in records), default=1.0)
    chart = Chart(
        f"{len(records)} requests at the busiest time",
        f"s after {seconds(start)}",
        "a row a request, pale while it waits",
        end - start,
        1.0,
        width=1134,
        height=TOP + BOTTOM + ROW_HEIGHT * max(1, len(records)),
        ticks=False,
    )
    for row, record in enumerate(records):
        fill = colour(classes.index(record.size_class if record.size_class in classes else OTHERS))
        assert record.finished is not None
        began = record.finished if record.started is None else record.started
        text = f"{record.id}, {record.size_class}, {record.num_inference_steps} steps"
        came, began, done = record.arrival - start, began - start, record.finished - start
        chart.bar(row, came, began, fill, f"{text}: waits {seconds(record.queue)}", pale=True)
        chart.bar(row, began, done, fill, f"{text}: done after {seconds(record.latency)}")
    for index, name in enumerate(classes):
        chart.name(name, colour(index))
    return chart


def busiest(records: Sequence[RequestRecord], count: int = NUM_BARS) -> list[RequestRecord]:
    """The ``count`` requests around the one that came when most were at hand, in order of arrival."""
    finished = sorted((r for r in records if r.finished is not None), key=lambda record: record.arrival)
    if not finished:
        return []
    counts = at_hand(finished)
    peak = counts.index(max(counts))
    first = max(0, min(peak - count // 2, len(finished) - count))
    return finished[first : first + count]
