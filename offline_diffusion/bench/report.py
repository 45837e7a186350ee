"""A report of one or more replays of a trace: rows for a table, JSON. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offline_diffusion.bench.records import Replayed

if TYPE_CHECKING:
    from offline_diffusion.bench.metrics import Numbers

MISSING = "-"


@dataclass(frozen=True, slots=True)
class Run:
    """One replay of the trace.

    Args:
        name: Of its mode.
        options: Of the engine, those that are not as by default.
        replayed: What happened.
        numbers: `metrics.summarize` of it.
    """

    name: str
    options: Mapping[str, Any]
    replayed: Replayed
    numbers: Numbers

    @property
    def title(self) -> str:
        """Its name, marked where it was ended early: ``packed (stopped early, 5 of 100)``."""
        if not self.replayed.stopped:
            return self.name
        num_finished = len(self.replayed.records)
        num_asked = num_finished + self.replayed.num_unfinished
        return f"{self.name} (stopped early, {num_finished:,} of {num_asked:,})"


@dataclass(frozen=True, slots=True)
class Report:
    """Replays of one trace, in turn.

    Args:
        trace: As the user named it.
        model: Likewise.
        facts: What else to know: how the trace was changed, where it ran. Name → text.
        runs: At least one.
    """

    trace: str
    model: str
    facts: Mapping[str, str]
    runs: Sequence[Run]

    def to_dict(self) -> dict[str, Any]:
        """JSON: of a single run its numbers, of several ``runs``, name → numbers.

        Beside the numbers stand ``backend``, ``model``, ``dataset`` and ``task``, as in vLLM-Omni's output.
        """
        head = {
            "backend": "offdiff",
            "model": self.model,
            "dataset": self.trace,
            "task": "t2i",
            "facts": dict(self.facts),
        }
        if len(self.runs) == 1:
            [run] = self.runs
            return {**head, "mode": run.name, "options": dict(run.options), **run.numbers}
        return {
            **head,
            "runs": {run.name: {"options": dict(run.options), **run.numbers} for run in self.runs},
        }


def seconds(value: float | None) -> str:
    """Three digits, in ms below a second, in hours above 10,000: ``184 ms``, ``2.05 s``, ``1,234 s``."""
    if value is None:
        return MISSING
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value >= 10_000:
        return f"{value / 3600:,.1f} h"
    return f"{value:,.0f} s" if value >= 1000 else f"{value:.3g} s"


def number(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def share(value: float | None) -> str:
    """In percent."""
    return MISSING if value is None else f"{value:.1%}"


Show = Callable[[float | None], str]

ROWS: Sequence[tuple[str, str, Show]] = (
    ("requests done", "completed_requests", number),
    ("requests failed", "failed_requests", number),
    ("requests unfinished", "unfinished_requests", number),
    ("duration", "duration", seconds),
    ("offered, requests/s", "offered_qps", number),
    ("throughput, requests/s", "throughput_qps", number),
    ("throughput, images/s", "images_per_s", number),
    ("goodput, requests/s", "goodput_qps", number),
    ("SLO kept", "slo_attainment_rate", share),
    ("latency, mean", "latency_mean", seconds),
    ("latency, p50", "latency_p50", seconds),
    ("latency, p95", "latency_p95", seconds),
    ("latency, p99", "latency_p99", seconds),
    ("queue time, mean", "queue_mean", seconds),
    ("queue time, p95", "queue_p95", seconds),
    ("images in a step", "mean_batch_images", number),
    ("token budget in use", "step_fill", share),
    ("device in steps", "device_busy_share", share),
    ("energy an image, J", "energy_j_per_image", number),
    ("peak memory, MB", "peak_memory_mb_max", number),
)
"""Of the summary: label, name of the number, how it is written."""

OPTIONAL = {
    *("requests failed", "requests unfinished", "goodput, requests/s", "SLO kept"),
    *("energy an image, J", "peak memory, MB"),
}
"""Left out where no run has any of them."""


def summary_rows(runs: Sequence[Run]) -> list[list[str]]:
    """A row a number: its label, then a cell for each run."""
    rows = []
    for label, name, show in ROWS:
        values = [run.numbers[name] for run in runs]
        if any(values) or label not in OPTIONAL:
            rows.append([label, *map(show, values)])
    return rows


SIZE_HEADER = ("size", "requests", "mean", "p50", "p95", "p99", "queue", "SLO kept")


def size_rows(run: Run) -> list[list[str]]:
    """A row a size class: latencies, mean queue time, SLO attainment; under `SIZE_HEADER`."""
    rows = []
    for name, own in run.numbers["size_classes"].items():
        latencies = [seconds(own[f"latency_{what}"]) for what in ("mean", "p50", "p95", "p99")]
        count = number(own["completed_requests"])
        queue, kept = seconds(own["queue_mean"]), share(own["slo_attainment_rate"])
        rows.append([name, count, *latencies, queue, kept])
    return rows
