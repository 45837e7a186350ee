"""What ``offdiff replay`` says: the facts of a trace, progress, tables, the page."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offline_diffusion.bench.report import SIZE_HEADER, Report, size_rows, summary_rows
from offline_diffusion.cli.text import duration, table
from offline_diffusion.errors import ConfigError
from offline_diffusion.progress import plural

if TYPE_CHECKING:
    from offline_diffusion.bench.replay import ReplayRequest
    from offline_diffusion.bench.trace import Trace
    from offline_diffusion.data.rows import RowFault


def make_room(page: Path) -> None:
    """The folder of a file that is written at the end, made now: hours of runs must not be lost to it."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--html {page}: its folder cannot be made: {error.strerror}") from None
    if page.is_dir() or not os.access(page if page.exists() else page.parent, os.W_OK):
        raise ConfigError(f"--html {page}: cannot be written")


def facts_of(
    given: Mapping[str, Any], trace: Trace, requests: list[ReplayRequest], faults: list[RowFault]
) -> dict[str, str]:
    """What one must know of the trace, for the report."""
    num_images = sum(len(request.images) for request in requests)
    facts = {
        "requests": f"{plural(len(requests), 'request')}, {plural(num_images, 'image')}",
        "arrivals": given["arrivals"],
    }
    if given["request_rate"] is not None:
        facts["request rate"] = f"{given['request_rate']:g}/s"
    if given["arrivals"] != "closed":
        facts["last arrival"] = duration(requests[-1].arrival)
    if given["speed"] != 1:
        facts["speed"] = f"{given['speed']:g}"
    if given["window"] is not None:
        facts["window"] = "{:g} s to {:g} s".format(*given["window"])
    if given["max_concurrency"] is not None:
        facts["most requests in flight"] = str(given["max_concurrency"])
    if faults:
        facts["faulty lines"] = f"{len(faults):,}"
    return facts | {f"note {number}": note for number, note in enumerate(trace.notes, start=1)}


def describe(done: Mapping[str, int], total: int) -> str:
    """How far the newest run is."""
    if not done:
        return "replay: getting ready"
    name = list(done)[-1]
    return f"replay: {name}: {done[name]:,}/{plural(total, 'request')}"


def show(report: Report, given: Mapping[str, Any]) -> None:
    """Prints first: the page may fail."""
    _print(report, given)
    if given["html"] is not None:
        from offline_diffusion.bench.page import page

        given["html"].write_text(page(report), encoding="utf-8")
        click.echo(f"page: {given['html']}", err=True)


def _print(report: Report, given: Mapping[str, Any]) -> None:
    if given["as_json"]:
        click.echo(json.dumps(report.to_dict()))
        return
    click.echo("\n".join(f"{name:<14} {text}" for name, text in report.facts.items()))
    click.echo(f"\n{table(['', *(run.title for run in report.runs)], summary_rows(report.runs))}")
    for run in report.runs:
        title = f"{run.title}, by size" if len(report.runs) > 1 else "by size"
        click.echo(f"\n{title}\n{table(SIZE_HEADER, size_rows(run))}")
