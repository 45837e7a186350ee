"""What a replay leaves behind: a record of each request, and of the steps in their order. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DEFAULT_SLO_SCALE = 3.0
DEFAULT_NUM_WARM_UPS = 3

SLO_AREA = 256.0
"""Pixels of the unit in which vLLM-Omni's rule counts an image."""


@dataclass(slots=True)
class RequestRecord:
    """One request of a trace. Times are in seconds since the replay began.

    Args:
        id: As the trace has it.
        width, height, num_inference_steps: Of its images.
        num_images: Of which the latest counts.
        arrival: When it came.
        slo_ms: Latency that was promised, from its arrival on.
        started: When the first step of its first image began; None if none did.
        finished: When its last image was there, or had failed.
        error: Why an image of it failed; None when all are there.
        encode_s, denoise_s, decode_s: The longest of its images.
        peak_memory_bytes: Likewise.
    """

    id: str
    width: int
    height: int
    num_inference_steps: int
    num_images: int
    arrival: float
    slo_ms: float | None = None
    started: float | None = None
    finished: float | None = None
    error: str | None = None
    encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0
    peak_memory_bytes: int = 0

    @property
    def size_class(self) -> str:
        """``WIDTHxHEIGHT``."""
        return f"{self.width}x{self.height}"

    @property
    def is_ok(self) -> bool:
        """Whether all of its images are there."""
        return self.finished is not None and self.error is None

    @property
    def latency(self) -> float:
        """Seconds from its arrival to its last image."""
        assert self.finished is not None
        return self.finished - self.arrival

    @property
    def queue(self) -> float:
        """Seconds from its arrival to its first step; its latency if it never had one."""
        return self.latency if self.started is None else max(0.0, self.started - self.arrival)

    @property
    def met_slo(self) -> bool:
        """Whether it kept what was promised; a failed one did not."""
        return self.slo_ms is not None and self.is_ok and self.latency * 1000 <= self.slo_ms

    @property
    def work_units(self) -> float:
        """What a request's time grows with by vLLM-Omni's rule: pixels by 256, at least 1, times steps."""
        return max(self.width * self.height / SLO_AREA, 1.0) * self.num_inference_steps


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One step, or several alike that followed each other.

    Args:
        start, end: Seconds since the replay began.
        num_steps: How many.
        num_images, num_tokens, budget_tokens: Summed over them.
        num_waiting: Images that waited at the end.
    """

    start: float
    end: float
    num_steps: int
    num_images: int
    num_tokens: int
    budget_tokens: int
    num_waiting: int


@dataclass(slots=True)
class Replayed:
    """All of a replay.

    Args:
        records: In order of arrival.
        spans: Of all steps.
        duration: Seconds from the start to the last image.
        device_s: Of these the device was in denoise steps.
        energy_j: What the device took, in joules; None where it does not tell.
        num_unfinished: Requests that an early end left over; they are not in ``records``.
        num_devices: That shared the work; ``device_s`` is of all of them.
    """

    records: Sequence[RequestRecord]
    spans: Sequence[StepSpan] = field(default_factory=list)
    duration: float = 0.0
    device_s: float = 0.0
    energy_j: float | None = None
    num_unfinished: int = 0
    num_devices: int = 1

    @property
    def stopped(self) -> bool:
        """Whether it was ended early."""
        return self.num_unfinished > 0
