"""Seconds on the device: CUDA events on a GPU, the host's clock elsewhere, where work is synchronous."""

from __future__ import annotations

import time

import torch

Mark = torch.cuda.Event | float


class Clock:
    """Marks points in the device's work and tells the seconds between two.

    Args:
        device: Whose current stream is marked.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"

    def mark(self) -> Mark:
        """A point in the work that has been handed to the device so far; waits for nothing."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """From one mark to another; waits until the device has passed ``end``."""
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float)
            assert isinstance(end, float)
            return end - start
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def synchronize(self) -> None:
        """Waits until the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def forget_peak_memory(self) -> None:
        """`peak_memory_gib` counts from here."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory_gib(self) -> float | None:
        """Most memory allocated at once; None where the device does not tell."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if self.on_gpu else None
