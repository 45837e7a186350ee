"""How long the GPU has nothing to do while the engine is in full swing, from a profiler's trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

import torch

from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.profile import chrome_trace, device_idle_share
from offline_diffusion.request import Request

MIN_WINDOW_S = 1.0


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
                return device_idle_share(chrome_trace(profile)["traceEvents"])
    if profile is not None:
        profile.stop()
    return None
