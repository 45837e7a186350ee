"""Runs side by side: warm-ups, SLOs, replicas, modes from a file."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from bench_fakes import CAPABILITIES, asked, engine_of, trace_of

from offline_diffusion.bench.energy import visible_device
from offline_diffusion.bench.report import Report
from offline_diffusion.bench.session import (
    WARM_UP_STEPS,
    Session,
    check_one_cost,
    modes_of,
    options_of,
    warm_ups_of,
    with_slos,
)
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.cost import CostModel
from offline_diffusion.errors import ConfigError
from offline_diffusion.models.capabilities import BatchKind

A_SECOND_A_STEP = CostModel(1.0, 0.0, 0.0)


def test_warm_ups_are_of_different_sizes_and_of_no_other_prompt() -> None:
    trace = [asked(0, 0, side=32, steps=9), asked(1, 0, side=32), asked(2, 0, side=64, count=3)]
    first, second = warm_ups_of(trace, 3)
    assert [(own.record().width, own.record().num_inference_steps) for own in (first, second)] == [
        (32, 2),
        (64, 1),
    ]
    assert len(second.images) == 1
    prompts = {own.images[0].request.prompt for own in (first, second, *trace)}
    assert len(prompts) == 3
    ids = {own.images[0].request.request_id for own in (first, second, *trace)}
    assert len(ids) == 5
    assert [len(warm_ups_of(trace, count)) for count in (0, 1)] == [0, 1]


def test_slos_are_so_many_times_what_warm_ups_say() -> None:
    # A step is a second, whatever its size: 2 steps of 32² px (4 units) take 2 s, a unit 250 ms.
    engine, clock = engine_of(A_SECOND_A_STEP)
    given = asked(1, 0, side=32, steps=5)
    given.slo_ms = 1.0
    session = Session([asked(0, 0, side=32, steps=5), given], slo_scale=2.0)
    run = session.replay("m", {}, engine, clock)
    assert [record.slo_ms for record in run.replayed.records] == [250 * 4 * 5 * 2, 1.0]
    assert run.numbers["slo_attainment_rate"] == 0.5


def test_all_runs_promise_what_the_first_one_measured() -> None:
    session = Session(trace_of([0, 1], steps=4))
    slow, fast = (engine_of(CostModel(step_s, 0, 0)) for step_s in (1.0, 0.1))
    first = session.replay("slow", {}, *slow)
    second = session.replay("fast", {}, *fast)
    assert [r.slo_ms for r in first.replayed.records] == [r.slo_ms for r in second.replayed.records]


def test_a_given_unit_takes_the_place_of_the_warm_ups() -> None:
    session = Session([asked(0, 0, side=32, steps=5)], slo_scale=2.0, slo_unit_ms=7.0)
    run = session.replay("m", {}, *engine_of(A_SECOND_A_STEP))
    assert [record.slo_ms for record in run.replayed.records] == [7 * 4 * 5 * 2]


def test_peaks_of_memory_are_forgotten_between_the_warm_ups_and_the_replay() -> None:
    engine, clock = engine_of(A_SECOND_A_STEP)
    steps_at_reset: list[int] = []
    engine.reset_peak_memory = lambda: steps_at_reset.append(engine.stats.num_steps)  # type: ignore[method-assign]
    Session([asked(0, 0, steps=5)]).replay("m", {}, engine, clock)
    assert steps_at_reset == [WARM_UP_STEPS]
    assert engine.stats.num_steps == WARM_UP_STEPS + 5


def test_without_warm_ups_nothing_is_promised() -> None:
    requests = trace_of([0.0])
    assert with_slos(requests, None, 3.0) == requests


def simulated(num_replicas: int, rate: float = 1.0) -> dict[str, Any]:
    session = Session(trace_of([index / rate for index in range(40)], steps=2), num_warm_ups=1)
    modes = {"one at a time": EngineConfig(max_num_seqs=1)}
    [run] = session.simulated_runs(modes, CAPABILITIES, A_SECOND_A_STEP, 1000, num_replicas)
    return run.numbers


def test_replicas_share_the_requests() -> None:
    # One comes a second and takes two: one engine falls behind by a second each, two just keep up.
    one, two = simulated(1), simulated(2)
    assert one["queue_p99"] > 35
    assert two["queue_mean"] == 0
    assert two["latency_mean"] == 2
    assert one["completed_requests"] == two["completed_requests"] == 40
    assert two["device_busy_share"] == pytest.approx(80 / (2 * 41))
    assert max(own["busy_share"] for own in two["over_time"]) <= 1


def test_modes_take_the_place_of_the_command_lines_options() -> None:
    base = EngineConfig(max_num_seqs=64, scheduling_policy="fifo")
    modes = modes_of(base, {"serial": {"max-num-seqs": 1, "step_execution": False}, "base": None}, "m.yaml")
    assert options_of(modes["serial"]) == {
        "max_num_seqs": 1,
        "step_execution": False,
        "scheduling_policy": "fifo",
    }
    assert modes["base"] == base


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ({"a": {"max_num_seq": 1}}, "m.yaml: a: unknown option 'max_num_seq'"),
        ({"a": {"max_num_seqs": 0}}, "m.yaml: a: "),
        ({"a": {"model": "other"}}, "m.yaml: a: model is the same for all modes"),
        ({"a": {"revision": "v2"}}, "m.yaml: a: revision is the same for all modes"),
        ({"a": [1]}, "a must hold a mapping"),
        ({}, "names no mode"),
    ],
)
def test_a_faulty_mode_is_refused(named: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        modes_of(EngineConfig(), named, "m.yaml")


@pytest.mark.parametrize("option", [{"quantization": "int8"}, {"dtype": "float32"}])
def test_a_mode_whose_steps_cost_otherwise_is_not_simulated(option: dict[str, Any]) -> None:
    base = EngineConfig()
    check_one_cost(modes_of(base, {"serial": {"max_num_seqs": 1}, "packed": None}, "m.yaml"), base)
    [[name, value]] = option.items()
    with pytest.raises(ConfigError, match=f"mode b: {name} {value} cannot be simulated beside"):
        check_one_cost(modes_of(base, {"a": None, "b": option}, "m.yaml"), base)
    same = EngineConfig(**option)
    check_one_cost(modes_of(same, {"a": None, "b": option}, "m.yaml"), same)


def test_no_mode_runs_when_the_family_cannot_do_a_later_one() -> None:
    stacked = replace(CAPABILITIES, batch_kind=BatchKind.STACKED)
    modes = {"alike": EngineConfig(batching="same_shape"), "all": EngineConfig(batching="packed")}
    runs = Session(trace_of([0])).simulated_runs(modes, stacked, A_SECOND_A_STEP, 1000)
    with pytest.raises(ConfigError, match="mode all: batching packed is not supported"):
        next(runs)


VLLM_OMNI_NAMES = (
    *("duration", "completed_requests", "failed_requests", "throughput_qps", "latency_mean"),
    *("latency_median", "latency_p99", "latency_p95", "latency_p50", "peak_memory_mb_max"),
    *("peak_memory_mb_mean", "peak_memory_mb_median", "stage_durations_mean", "stage_durations_p50"),
    *("stage_durations_p99", "slo_attainment_rate", "slo_met_success", "slo_scale"),
    *("backend", "model", "dataset", "task"),
)
"""What its benchmarks/diffusion/diffusion_benchmark_serving.py writes."""


def test_json_has_vllm_omnis_names() -> None:
    session = Session(trace_of([0, 1]))
    run = session.replay("one", {}, *engine_of(A_SECOND_A_STEP))
    values = json.loads(json.dumps(Report("t", "m", {}, [run]).to_dict(), allow_nan=False))
    assert set(VLLM_OMNI_NAMES) <= set(values)
    both = json.loads(json.dumps(Report("t", "m", {}, [run, run]).to_dict()))
    assert list(both["runs"]) == ["one"]
    assert both["runs"]["one"]["throughput_qps"] == values["throughput_qps"]


def test_nvml_counts_devices_as_the_driver_does() -> None:
    assert visible_device(1, {}) == "1"
    assert visible_device(1, {"CUDA_VISIBLE_DEVICES": "3, 5"}) == "5"
    assert visible_device(0, {"CUDA_VISIBLE_DEVICES": "GPU-8f2a"}) == "GPU-8f2a"
    with pytest.raises(IndexError):
        visible_device(2, {"CUDA_VISIBLE_DEVICES": "3"})
