"""Numbers of a replay, under vLLM-Omni's names where it has one. Free of torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from offline_diffusion.bench.records import DEFAULT_SLO_SCALE, Replayed, RequestRecord, StepSpan

PERCENTILES = (50, 95, 99)
STAGES = ("queue", "encode", "denoise", "decode")
MAX_BINS = 240
"""Of what is told over time."""

Numbers = dict[str, Any]


def summarize(replayed: Replayed, *, slo_scale: float = DEFAULT_SLO_SCALE) -> Numbers:
    """Everything about a replay that fits into JSON.

    Latencies are in seconds and of requests that came through; percentiles interpolate linearly. A number
    over nothing is None. ``goodput_qps`` counts requests that kept their SLO, ``step_fill`` is the mean share
    of the token budget in use, ``device_busy_share`` that of the duration in denoise steps.

    After an early end there are counts and rates, but no latencies and no SLO attainment: those that were
    done by then are the quick ones.
    """
    records, duration = replayed.records, replayed.duration
    done = [record for record in records if record.is_ok]
    told = [] if replayed.stopped else done
    num_images = sum(record.num_images for record in done)
    spans = replayed.spans
    num_steps = sum(span.num_steps for span in spans)
    last_arrival = max((record.arrival for record in records), default=0.0)
    energy = replayed.energy_j
    return {
        "duration": duration,
        "completed_requests": len(done),
        "failed_requests": len(records) - len(done),
        "unfinished_requests": replayed.num_unfinished,
        "throughput_qps": _ratio(len(done), duration),
        "offered_qps": None if replayed.stopped else _ratio(len(records), last_arrival),
        "images_per_s": _ratio(num_images, duration),
        "num_images": num_images,
        **_spread("latency", [record.latency for record in told]),
        "latency_median": _percentile([record.latency for record in told], 50),
        **_spread("queue", [record.queue for record in told]),
        **_slo(records, duration, slo_scale, stopped=replayed.stopped),
        **_memory(done),
        **_stages(told),
        "size_classes": size_classes(records, stopped=replayed.stopped),
        "num_steps": num_steps,
        "mean_batch_images": _ratio(sum(span.num_images for span in spans), num_steps),
        "step_fill": _ratio(sum(s.num_tokens for s in spans), sum(s.budget_tokens for s in spans)),
        "device_busy_share": _ratio(replayed.device_s, duration * replayed.num_devices),
        "energy_j": energy,
        "energy_j_per_image": None if energy is None else _ratio(energy, num_images),
        "stopped": replayed.stopped,
        "over_time": over_time(spans, duration, replayed.num_devices),
    }


def size_classes(records: Iterable[RequestRecord], *, stopped: bool = False) -> dict[str, Numbers]:
    """Latency, queue time and SLO of each ``WIDTHxHEIGHT``, the smallest first; ``stopped``: counts only."""
    groups: dict[tuple[int, str], list[RequestRecord]] = {}
    for record in records:
        groups.setdefault((record.width * record.height, record.size_class), []).append(record)
    classes = {}
    for (_, name), members in sorted(groups.items()):
        done = [record for record in members if record.is_ok]
        told = [] if stopped else done
        classes[name] = {
            "completed_requests": len(done),
            "failed_requests": len(members) - len(done),
            **_spread("latency", [record.latency for record in told]),
            "queue_mean": _mean([record.queue for record in told]),
            "slo_attainment_rate": None if stopped else slo_attainment(members),
        }
    return classes


def slo_attainment(records: Iterable[RequestRecord]) -> float | None:
    """Share of the requests with an SLO that kept it; None where none has one."""
    promised = [record for record in records if record.slo_ms is not None]
    return _ratio(sum(record.met_slo for record in promised), len(promised))


def slo_unit_ms(warm_ups: Iterable[RequestRecord]) -> float | None:
    """Milliseconds of a unit of work, the median over requests that ran alone: vLLM-Omni's base time."""
    units = [r.latency * 1000 / r.work_units for r in warm_ups if r.is_ok and r.latency > 0]
    return statistics.median(units) if units else None


def over_time(
    spans: Sequence[StepSpan], duration: float, num_devices: int = 1, max_bins: int = MAX_BINS
) -> list[Numbers]:
    """Steps by their time, in equal bins: images of a step, fill, images waiting, share of busy time.

    All but the last are means over the steps of a bin, by time; None in a bin without one.
    """
    if not spans or duration <= 0:
        return []
    num_bins = min(max_bins, max(1, len(spans)))
    width = duration / num_bins
    sums = np.zeros((4, num_bins))  # seconds, images·s, fill·s, waiting·s
    for span in spans:
        images, fill = span.num_images / span.num_steps, span.num_tokens / max(1, span.budget_tokens)
        first, last = int(span.start / width), int(span.end / width)
        for index in range(first, min(last, num_bins - 1) + 1):
            seconds = min(span.end, (index + 1) * width) - max(span.start, index * width)
            sums[:, index] += seconds * np.array((1, images, fill, span.num_waiting))
    return [
        {
            "start": index * width,
            "end": (index + 1) * width,
            "batch_images": _ratio(images, seconds),
            "step_fill": _ratio(fill, seconds),
            "waiting_images": _ratio(waiting, seconds),
            "busy_share": min(1.0, seconds / (width * num_devices)),
        }
        for index, (seconds, images, fill, waiting) in enumerate(sums.T.tolist())
    ]


def _slo(records: Sequence[RequestRecord], duration: float, scale: float, *, stopped: bool) -> Numbers:
    num_met = sum(record.met_slo for record in records)
    rate = None if stopped else slo_attainment(records)
    return {
        "slo_attainment_rate": rate,
        "slo_met_success": num_met,
        "slo_scale": scale,
        "goodput_qps": None if rate is None else _ratio(num_met, duration),
    }


def _memory(done: Sequence[RequestRecord]) -> Numbers:
    peaks = [record.peak_memory_bytes / 2**20 for record in done if record.peak_memory_bytes]
    return {
        "peak_memory_mb_max": max(peaks, default=None),
        "peak_memory_mb_mean": _mean(peaks),
        "peak_memory_mb_median": _percentile(peaks, 50),
    }


def _stages(done: Sequence[RequestRecord]) -> Numbers:
    seconds = {
        stage: [getattr(record, "queue" if stage == "queue" else f"{stage}_s") for record in done]
        for stage in STAGES
    }
    return {
        "stage_durations_mean": {stage: _mean(values) for stage, values in seconds.items()},
        "stage_durations_p50": {stage: _percentile(values, 50) for stage, values in seconds.items()},
        "stage_durations_p99": {stage: _percentile(values, 99) for stage, values in seconds.items()},
    }


def _spread(name: str, values: Sequence[float]) -> Numbers:
    percentiles = {f"{name}_p{percent}": _percentile(values, percent) for percent in PERCENTILES}
    return {f"{name}_mean": _mean(values), **percentiles}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
