"""A profile on a GPU: device times by events, kernels in the trace, the same pixels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.profile import Profiler
from offline_diffusion.request import Request

pytestmark = pytest.mark.gpu

NUM_STEPS = 16


def draw(model: Any, profiler: Profiler | None = None) -> dict[str, np.ndarray]:
    engine = Engine(model, EngineConfig(max_num_seqs=2))
    if profiler is not None:
        profiler.attach(engine)
    for seed in range(4):
        engine.add_request(
            Request(
                request_id=str(seed), prompt="a storm over a lamp", negative_prompt=" ", seed=seed,
                height=512, width=512, num_inference_steps=NUM_STEPS, true_cfg_scale=4.0,
            )
        )  # fmt: skip
    engine.close_source()
    pixels = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.pixels is not None
            pixels[output.request_id] = output.pixels
        if profiler is not None:
            profiler.next_step()
    return pixels


def test_times_idle_share_and_kernels(gpu_model: Any, tmp_path: Path) -> None:
    plain = draw(gpu_model)
    profiler = Profiler(tmp_path, task=0)
    with profiler.stage("engine"):
        profiled = draw(gpu_model, profiler)
    summary = profiler.finish(interrupted=False)
    assert all(np.array_equal(plain[name], profiled[name]) for name in plain)
    assert summary is not None
    assert profiler.warnings == []
    stages = {stage["stage"]: stage for stage in summary["stages"]}
    for name in ("prompt_encode", "pack", "denoise", "solver", "decode", "copy"):
        assert stages[name]["device_s"] > 0, name
    busy = stages["denoise"]["device_s"] + stages["solver"]["device_s"]
    assert busy <= summary["drawing_s"] + summary["profiler_s"]
    assert 0 <= summary["device_idle_share"] < 1
    trace = json.loads(gzip.decompress((tmp_path / "task-00000.trace.json.gz").read_bytes()))
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    ranges = [
        event
        for event in trace["traceEvents"]
        if event.get("cat") == "gpu_user_annotation" and event["name"] == "denoise"
    ]
    assert len(kernels) > 100
    assert ranges
    assert summary["num_traced_steps"] == 20
