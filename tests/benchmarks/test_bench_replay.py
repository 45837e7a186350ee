"""The trace of the replay benchmark: whose arrivals, scaled how, and what is asked for."""

from __future__ import annotations

from pathlib import Path

import bench_replay
import pytest
from bench_replay import SIZES, at_span, busy_stretch, make_trace, parse_arguments

from offline_diffusion.bench.trace import Trace, TraceRequest
from offline_diffusion.data.rows import ManifestRow
from offline_diffusion.request import SamplingParams


def trace_at(times: list[float]) -> Trace:
    rows = (ManifestRow(n, str(n), "", n + 1, "", "-", SamplingParams(), {}) for n in range(len(times)))
    requests = [TraceRequest(row, time) for row, time in zip(rows, times, strict=True)]
    return Trace("t", requests, (), True, ())


def test_it_begins_where_most_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_replay, "BUSY_REQUESTS", 3)
    times = [0, 100, 200, 300, 301, 302, 303, 400, 500.0]
    assert [request.arrival for request in busy_stretch(trace_at(times), 4)] == [300, 301, 302, 303]
    assert len(busy_stretch(trace_at(times), 100)) == len(times)
    assert len(busy_stretch(trace_at([5.0]), 3)) == 1


def test_times_are_scaled_in_proportion() -> None:
    requests = at_span(trace_at([10, 11, 14]).requests, 8.0)
    assert [request.arrival for request in requests] == [0, 2, 8]
    assert [request.arrival for request in at_span(trace_at([3, 3]).requests, 8.0)] == [0, 0]


def test_every_request_is_one_guided_image_of_a_known_size(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {index}\n" for index in range(40)))
    args = parse_arguments(["--images", "32", "--span", "9", "--steps", "7", "--prompts", str(prompts)])
    requests = make_trace(args)
    assert len(requests) == 32
    assert requests[-1].arrival == pytest.approx(9)
    assert len({request.row.prompt for request in requests}) == 32
    for request in requests:
        params = request.row.params
        assert params.height == params.width
        assert params.height in {side for side, _ in SIZES}
        assert (params.num_inference_steps, params.num_images_per_prompt) == (7, 1)
        assert params.negative_prompt is not None
    assert make_trace(args) == requests
