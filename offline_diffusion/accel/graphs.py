"""A step recorded once as a CUDA graph and replayed: for packs so small that the host cannot keep up.

A step of Qwen-Image is about 1,500 launches, 50 to 100 ms of Python; the device does a small pack in less.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

MAX_GRAPH_TOKENS = 8_192
"""Image and text tokens of a pack up to which a graph was faster, see benchmarks/LOG.md."""

MIN_REPLAYS = 4
"""Recording takes about as long as a step takes the host."""


class StepRecorder:
    """Records work on one device.

    Args:
        device: A CUDA device; on any other nothing is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def record(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """What replays ``work`` on the current stream, or None where that is not possible.

        Nothing runs now. ``work`` must have run before, must not touch the host, and must change tensors
        in place that outlive the recording.
        """
        if self._stream is None:
            return None
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self._stream = None
            logger.warning("small packs run without CUDA graphs: %s", error)
            return None
        return graph.replay
