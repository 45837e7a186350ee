"""How long the GPU has nothing to do while the engine is in full swing, from a profiler's trace."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from offline_diffusion.engine.engine import Engine
from offline_diffusion.request import Request

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")

MIN_WINDOW_S = 1.0


def device_idle_share(events: Iterable[dict[str, Any]]) -> float | None:
    """Share of the time from the first to the last device event in which none ran, on any stream.

    Args:
        events: ``traceEvents`` of a chrome trace; others than device work are passed over.
    """
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in DEVICE_WORK
    )
    if not spans:
        return None
    start, busy_until = spans[0][0], spans[0][0]
    idle = 0.0
    for begin, end in spans:
        idle += max(0.0, begin - busy_until)
        busy_until = max(busy_until, end)
    return idle / (busy_until - start) if busy_until > start else None


def traced_idle_share(engine: Engine, requests: Sequence[Request]) -> float | None:
    """Idle share from the first finished image to the first one at least `MIN_WINDOW_S` later.

    So the window holds finished requests leaving, newcomers being encoded, decodes and steps. None without
    a GPU, or where everything fits into one pack, which leaves no such window.

    Args:
        engine: Warmed up.
        requests: More than fit into one pack.
    """
    if engine.model.device.type != "cuda":
        return None
    profile: torch.profiler.profile | None = None
    started = 0.0
    with closing(engine.generate(requests)) as outputs:
        for _ in outputs:
            if profile is None:
                profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                profile.start()
                started = time.perf_counter()
            elif time.perf_counter() - started >= MIN_WINDOW_S:
                profile.stop()
                return device_idle_share(_trace_events(profile))
    if profile is not None:
        profile.stop()
    return None


def _trace_events(profile: torch.profiler.profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events
