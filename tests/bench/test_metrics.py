"""The numbers of a replay against values worked out by hand."""

from __future__ import annotations

import pytest

from offline_diffusion.bench.metrics import (
    over_time,
    slo_attainment,
    slo_unit_ms,
    summarize,
)
from offline_diffusion.bench.records import Replayed, RequestRecord, StepSpan


def record(
    arrival: float, latency: float, *, queue: float = 0.0, side: int = 512, steps: int = 10, **more: object
) -> RequestRecord:
    return RequestRecord(
        id=f"{arrival}",
        width=side,
        height=side,
        num_inference_steps=steps,
        num_images=1,
        arrival=arrival,
        started=arrival + queue,
        finished=arrival + latency,
        **more,  # type: ignore[arg-type]
    )


def test_percentiles_interpolate_as_numpy_and_vllm_do() -> None:
    # 1 … 101: the p-th percentile is p + 1, by hand.
    numbers = summarize(Replayed([record(0, float(n)) for n in range(1, 102)], duration=202.0))
    assert numbers["latency_p50"] == numbers["latency_median"] == numbers["latency_mean"] == 51
    assert numbers["latency_p95"] == pytest.approx(96)
    assert numbers["latency_p99"] == pytest.approx(100)
    assert numbers["throughput_qps"] == 0.5
    two = summarize(Replayed([record(0, 1.0), record(0, 3.0)], duration=3.0))
    assert two["latency_p95"] == pytest.approx(2.9)  # 1 + 0.95 · 2


def test_requests_images_and_failures_are_counted_apart() -> None:
    records = [record(0, 2, queue=1), record(1, 4, queue=2), record(2, 3, error="nan")]
    records[0].num_images, records[2].num_images = 4, 8
    numbers = summarize(Replayed(records, duration=5.0, device_s=4.0, energy_j=500.0))
    assert (numbers["completed_requests"], numbers["failed_requests"]) == (2, 1)
    assert numbers["throughput_qps"] == 2 / 5
    assert numbers["images_per_s"] == 5 / 5
    assert numbers["offered_qps"] == 3 / 2
    assert numbers["queue_mean"] == 1.5
    assert numbers["device_busy_share"] == 0.8
    assert numbers["energy_j_per_image"] == 100.0
    assert numbers["stage_durations_mean"]["queue"] == 1.5


def test_after_an_early_end_the_quick_ones_do_not_speak_for_all() -> None:
    records = [record(0, 1.0, slo_ms=2000), record(1, 1.0, slo_ms=2000)]
    numbers = summarize(Replayed(records, duration=4.0, num_unfinished=98))
    assert numbers["stopped"] is True
    assert (numbers["completed_requests"], numbers["unfinished_requests"]) == (2, 98)
    assert numbers["throughput_qps"] == 0.5
    [of_size] = numbers["size_classes"].values()
    assert of_size["completed_requests"] == 2
    empty = ("latency_mean", "latency_p50", "latency_p95", "latency_p99", "slo_attainment_rate", "queue_mean")
    assert {name: (numbers[name], of_size[name]) for name in empty} == dict.fromkeys(empty, (None, None))
    assert numbers["goodput_qps"] is None
    whole = summarize(Replayed(records, duration=4.0))
    assert (whole["stopped"], whole["unfinished_requests"], whole["latency_p95"]) == (False, 0, 1.0)


def test_goodput_counts_what_kept_its_promise() -> None:
    records = [
        record(0, 1.0, slo_ms=1000),  # just kept
        record(0, 1.001, slo_ms=1000),
        record(0, 0.1, slo_ms=1000, error="nan"),
        record(0, 9.0),  # nothing was promised
    ]
    numbers = summarize(Replayed(records, duration=2.0))
    assert numbers["slo_attainment_rate"] == 1 / 3
    assert numbers["slo_met_success"] == 1
    assert numbers["goodput_qps"] == 0.5
    assert slo_attainment([record(0, 1)]) is None


def test_the_unit_of_the_scaled_slo_is_the_median_of_pixels_and_steps() -> None:
    # 512² px are 1024 units of 256 px; 2 steps in 4.096 s: 2 ms a unit and step.
    warm_up = record(0, 4.096, side=512, steps=2)
    assert slo_unit_ms([warm_up]) == pytest.approx(2.0)
    assert slo_unit_ms([warm_up, record(0, 40.96, steps=2), record(0, 0.0)]) == pytest.approx(11.0)
    assert slo_unit_ms([record(0, 1, error="nan")]) is None


def test_sizes_are_told_apart_the_smallest_first() -> None:
    records = [record(0, 4, side=1024), record(0, 1, side=64), record(0, 3, side=64, slo_ms=2000)]
    classes = summarize(Replayed(records, duration=4.0))["size_classes"]
    assert list(classes) == ["64x64", "1024x1024"]
    assert classes["64x64"]["latency_mean"] == 2
    assert classes["64x64"]["slo_attainment_rate"] == 0.0
    assert classes["1024x1024"]["slo_attainment_rate"] is None


def test_fill_and_batch_over_time() -> None:
    # 0-4 s: two steps of 3 images, 60 of 100 tokens; 4-6 s idle; 6-8 s: one step of 1 image, 20 of 100.
    spans = [StepSpan(0, 4, 2, 6, 120, 200, 5), StepSpan(6, 8, 1, 1, 20, 100, 0)]
    bins = over_time(spans, 8.0, max_bins=2)
    assert [(b["start"], b["end"]) for b in bins] == [(0, 4), (4, 8)]
    assert bins[0]["batch_images"] == 3
    assert bins[0]["step_fill"] == pytest.approx(0.6)
    assert bins[0]["waiting_images"] == 5
    assert bins[0]["busy_share"] == 1
    assert bins[1]["batch_images"] == 1
    assert bins[1]["step_fill"] == pytest.approx(0.2)
    assert bins[1]["busy_share"] == 0.5
    numbers = summarize(Replayed([], spans, duration=8.0))
    assert numbers["mean_batch_images"] == 7 / 3
    assert numbers["step_fill"] == pytest.approx(140 / 300)
    assert numbers["num_steps"] == 3


def test_nothing_gives_no_numbers_and_no_error() -> None:
    numbers = summarize(Replayed([]))
    assert numbers["latency_p99"] is None
    assert numbers["throughput_qps"] is None
    assert numbers["over_time"] == []
