"""What a running job tells, and how it is told to stop. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from offline_diffusion.errors import TooManyFailuresError

MIN_SHARE_SAMPLE = 100
"""Images that must be done before a share of failures (``--max-failures 5%``) can stop a job."""

Phase = Literal["scanning", "loading", "running", "finishing"]


@dataclass
class StopFlag:
    """Set by signal handlers, read between steps. ``requests`` 0: go on, 1: save and stop, 2: stop now."""

    requests: int = 0
    why: str = ""
    clock: Callable[[], float] = time.monotonic
    _counted_at: float = 0.0

    def request(self, why: str, *, echo_s: float = 0.0) -> bool:
        """One more request to stop.

        Args:
            why: The first one's is kept.
            echo_s: So long after the last one this one is the same, delivered twice.

        Returns:
            Whether it counts.
        """
        now = self.clock()
        if self.requests and now - self._counted_at < echo_s:
            return False
        self.why, self._counted_at = self.why or why, now
        self.requests += 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A snapshot for displays.

    Images count earlier runs of unfinished shards in; ``work`` is FLOPs of this run.
    ``num_images`` and ``work_total`` are estimates until the last shard is opened.
    """

    phase: Phase
    num_images: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_resumed: int = 0
    num_set_aside: int = 0
    work_done: float = 0.0
    work_total: float = 0.0
    images_per_s: float = 0.0
    eta_s: float | None = None
    step_fill: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_rows_scanned: int = 0

    @property
    def has_drawn(self) -> bool:
        """Whether this run has handed out an image that it had to draw."""
        return self.num_done > self.num_resumed + self.num_set_aside


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of images, and how many rows are quarantined."""

    num_ok: int = 0
    num_failed: int = 0
    num_faults: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.num_ok + other.num_ok,
            self.num_failed + other.num_failed,
            self.num_faults + other.num_faults,
        )


Observer = Callable[[Progress], None]
Say = Callable[[str], None]


@dataclass
class Tally:
    """Counts of one run, and the estimates made from them.

    Args:
        num_rows: Rows of the shards this run is to do.
        num_ok, num_failed: Images finished in this run.
        num_set_aside: Of the failed those that were not tried, since they kill the process.
        num_faults: Quarantined rows met in this run.
        num_resumed: Images of opened shards that were there already.
        num_failed_before: Of these those that had failed.
        num_truncated, num_guidance_off: Images to warn of, once, with their number.
        num_rows_opened, num_images_opened: Of the shards opened so far.
        work_opened, work_done: FLOPs.
    """

    num_rows: int = 0
    num_ok: int = 0
    num_failed: int = 0
    num_set_aside: int = 0
    num_faults: int = 0
    num_resumed: int = 0
    num_failed_before: int = 0
    num_truncated: int = 0
    num_guidance_off: int = 0
    num_guidance_scale_unused: int = 0
    num_rows_opened: int = 0
    num_images_opened: int = 0
    work_opened: float = 0.0
    work_done: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def num_finished(self) -> int:
        return self.num_ok + self.num_failed

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def images_per_s(self) -> float:
        return self.num_finished / self.seconds if self.seconds > 0 else 0.0

    def progress(self, phase: Phase, *, step_fill: float, num_running: int, num_waiting: int) -> Progress:
        """A snapshot; what is not opened yet is taken to be like what is."""
        scale = self.num_rows / self.num_rows_opened if self.num_rows_opened else 1.0
        work_total = self.work_opened * scale
        left = max(0.0, work_total - self.work_done)
        return Progress(
            phase=phase,
            num_images=round(self.num_images_opened * scale),
            num_done=self.num_finished + self.num_resumed,
            num_failed=self.num_failed,
            num_resumed=self.num_resumed,
            num_set_aside=self.num_set_aside,
            work_done=self.work_done,
            work_total=work_total,
            images_per_s=self.images_per_s,
            eta_s=self.seconds * left / self.work_done if self.work_done else None,
            step_fill=step_fill,
            num_running=num_running,
            num_waiting=num_waiting,
        )

    @property
    def counts(self) -> Counts:
        """Of all images of the opened shards, whoever made them."""
        num_ok_before = self.num_resumed - self.num_failed_before
        return Counts(self.num_ok + num_ok_before, self.num_failed + self.num_failed_before, self.num_faults)

    def check_failures(self, limit: str, elsewhere: Counts) -> None:
        """Raises `TooManyFailuresError` when ``--max-failures`` says so.

        Args:
            limit: A count or a share (``5%``).
            elsewhere: Of all other shards of the job.
        """
        whole = self.counts + elsewhere
        failures = whole.num_failed + whole.num_faults
        attempted = whole.num_ok + failures
        if _too_many(failures, attempted, limit) and (attempted >= MIN_SHARE_SAMPLE or "%" not in limit):
            others = elsewhere.num_ok + elsewhere.num_failed + elsewhere.num_faults
            begun = self.num_images_opened + self.num_faults + others
            raise TooManyFailuresError(
                f"{plural(whole.num_failed, 'image')} failed and {plural(whole.num_faults, 'row')} cannot be "
                f"drawn, of {begun:,} begun; --max-failures is {limit}",
                hint="what is finished is kept: mend the cause and add --retry-failed, or raise the limit",
            )

    def warnings(self) -> list[str]:
        """What happened to many images, said once with a count."""
        lines = []
        if self.num_truncated:
            lines.append(
                f"{plural(self.num_truncated, 'image')}: the prompt is longer than a text encoder reads and "
                "was cut for it; see truncated_tokens in metrics"
            )
        if self.num_guidance_off:
            lines.append(
                f"{plural(self.num_guidance_off, 'image')}: true_cfg_scale > 1 without a negative_prompt, so "
                'guidance is off; give negative_prompt (" " will do); see cfg_active in metrics'
            )
        if self.num_guidance_scale_unused:
            lines.append(
                f"{plural(self.num_guidance_scale_unused, 'image')}: guidance_scale is without effect, this "
                "model is not guidance-distilled; give true_cfg_scale and negative_prompt"
            )
        return lines


def check_faults(num_faults: int, num_rows: int, limit: str) -> None:
    """Raises `TooManyFailuresError` when a manifest alone has more faulty rows than ``--max-failures``.

    Args:
        num_faults, num_rows: Of the whole manifest.
        limit: A count or a share (``5%``).
    """
    if _too_many(num_faults, num_rows, limit):
        raise TooManyFailuresError(
            f"{num_faults:,} of the manifest's {plural(num_rows, 'row')} are faulty, "
            f"--max-failures is {limit}",
            hint="`offdiff validate` lists them: mend them, or raise the limit",
        )


def _too_many(failures: int, attempted: int, limit: str) -> bool:
    if limit.endswith("%"):
        return failures > attempted * float(limit.removesuffix("%")) / 100
    return failures > int(limit)


def plural(count: int, noun: str) -> str:
    """``1 row``, ``2 rows``, ``1,000 rows``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
