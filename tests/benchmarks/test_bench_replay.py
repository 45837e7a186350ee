"""The trace of the replay benchmark: whose arrivals, scaled how, and what is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import bench_replay
import pytest
from bench_replay import SIZES, Benchmark, at_span, busy_stretch, chosen, make_trace, merged, parse_arguments

from offline_diffusion.bench.trace import Trace, TraceRequest
from offline_diffusion.config import EngineConfig
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


def test_uniform_traffic_is_of_one_size() -> None:
    requests = make_trace(parse_arguments(["--sizes", "512", "--images", "9"]))
    assert {request.row.params.height for request in requests} == {512}
    weighted = make_trace(parse_arguments(["--sizes", "512:1", "1024:0", "--images", "9"]))
    assert {request.row.params.width for request in weighted} == {512}


def test_an_unknown_mode_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(SystemExit, match="no mode 'pakced'; there are 'packed'"):
        Benchmark(parse_arguments(["--only", "packed", "pakced"]), "")


def test_the_order_of_modes_is_that_of_the_file() -> None:
    modes = {name: EngineConfig() for name in "abc"}
    assert list(chosen(modes, ["c", "a"])) == ["a", "c"]
    assert list(chosen(modes, None)) == ["a", "b", "c"]


def test_a_later_call_adds_its_modes_to_those_of_the_same_trace(tmp_path: Path) -> None:
    out = tmp_path / "new" / "replay.json"
    common = ["--device", "cpu", "--model", "tiny", "--images", "3", "--span", "0.2", "--steps", "8"]
    common += ["--out", str(out)]
    for mode in ("packed", "serial"):
        Benchmark(parse_arguments([*common, "--only", mode]), f"run {mode}").run()
    result = json.loads(out.read_text())
    assert {name: own["command"] for name, own in result["runs"].items()} == {
        "packed": "run packed",
        "serial": "run serial",
    }
    assert {own["completed_requests"] for own in result["runs"].values()} == {3}
    assert set(result["simulated_minus_real"]) == {"packed", "serial"}
    assert set(result["simulated_minus_real"]["packed"]["own"]) == {"throughput_qps", "latency_p95"}
    other = {**result, "arguments": {**result["arguments"], "steps": 3}, "runs": {"single_step": {}}}
    assert list(merged(result, other)["runs"]) == ["single_step"]
    for stopped in (False, True):
        newer = {**result, "runs": {"serial": {"stopped": stopped}}}
        expected = result["runs"]["serial"] if stopped else {"stopped": False}
        assert merged(result, newer)["runs"] == {**result["runs"], "serial": expected}


def test_a_run_that_was_ended_early_is_written_and_not_simulated(tmp_path: Path) -> None:
    out = tmp_path / "replay.json"
    common = ["--device", "cpu", "--model", "tiny", "--images", "3", "--span", "0.2", "--steps", "2"]
    Benchmark(parse_arguments([*common, "--out", str(out), "--stop-after", "0"]), "").run()
    result = json.loads(out.read_text())
    assert list(result["runs"]) == ["packed"]
    assert result["runs"]["packed"]["unfinished_requests"] == 3
    assert result["simulated_minus_real"] == {"packed": {}}
