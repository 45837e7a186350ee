"""A step recorded once as a CUDA graph and replayed: for packs so small that the host cannot keep up.

A step of Qwen-Image is about 1,500 launches, 50 to 100 ms of Python; the device does a small pack in less.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

MAX_GRAPH_TOKENS = 8_192
"""Tokens of a pack, of 16 × 16 pixels, up to which a graph was faster, see benchmarks/LOG.md."""

MIN_REPLAYS = 4
"""Recording takes about as long as a step takes the host."""


class StepRecorder:
    """Records work on one device.

    Args:
        device: A CUDA device; on any other nothing is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool: Any = None
        self._keeper: torch.cuda.CUDAGraph | None = None

    def record(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """What replays ``work`` on the current stream, or None where that is not possible.

        Nothing runs now. ``work`` must have run before, must not touch the host, and must change tensors
        in place that outlive the recording.
        """
        if self._stream is None:
            return None
        try:
            if self._keeper is None:
                # One pool for all recordings: each uses again what the one before, dead by then, has left.
                # It lasts as long as some graph does.
                self._pool = torch.cuda.graph_pool_handle()
                self._keeper = self._capture(lambda: torch.zeros(1, device=self._device))
            return self._capture(work).replay
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None
        except RuntimeError as error:
            self._stream = None
            logger.warning("small packs run without CUDA graphs: %s", error)
            return None

    def _capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph
