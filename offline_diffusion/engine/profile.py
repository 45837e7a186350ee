"""A job's profile: where its time goes over the whole run, and a trace of a few steps in Chrome's format.

Stages are timed on the host by a clock and on a GPU by events, which nobody waits for. The trace is
torch's own, of some steps after the first; a whole night's would fill the disk.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function
from torch.profiler import profile as TorchProfiler
from torch.profiler import schedule as torch_schedule

from offline_diffusion.engine.stats import EngineStats
from offline_diffusion.stages import StageClock, StageName, StageTime

if TYPE_CHECKING:
    from offline_diffusion.engine.engine import Engine

WARM_UP_STEPS, TRACED_STEPS = 10, 20
"""Denoise steps before the trace, while kernels compile and the pack fills up, and in it."""

DEVICE_STAGES: frozenset[StageName] = frozenset(
    ("prompt_encode", "pack", "denoise", "solver", "decode", "copy")
)
"""Stages that give the device work. Of a step replayed as a CUDA graph ``denoise`` holds the solver too."""

THREAD_STAGES: tuple[StageName, ...] = ("image_encode", "write", "publish")
"""Stages of threads beside the one that drives the engine."""

DRAWING_STAGES: tuple[StageName, ...] = (
    "read", "prompt_encode", "pack", "denoise", "solver", "decode", "copy",
    "engine", "wait_device", "wait_sink",
)  # fmt: skip
"""Stages between the loading of the model and the last image's file, in the driving thread."""

MAIN_STAGES: tuple[StageName, ...] = ("scan", "load", *DRAWING_STAGES, "other")

_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
_TRACING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


def device_idle_share(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Share of the time in which the device did nothing, 0 … 1; None if it never did anything.

    The time runs from the first device event's start to the last one's end, so that the profiler's own
    start and stop do not count. Streams overlap: what any of them does is work.

    Args:
        events: A trace's ``traceEvents``, of one device.
    """
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_CATEGORIES
    )
    if not spans:
        return None
    begin = reached = spans[0][0]
    idle = 0.0
    for start, end in spans:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return float(idle / (reached - begin)) if reached > begin else 0.0


def chrome_trace(profiler: TorchProfiler) -> dict[str, Any]:
    """What a torch profiler recorded, as a dict in Chrome's trace format.

    Raises:
        OSError: The folder for temporary files is full or cannot be written to.
        ValueError: What torch wrote is no JSON, as when the disk is full.
    """
    with tempfile.TemporaryDirectory(prefix="offdiff-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_bytes())
    trace.pop("traceName", None)  # the temporary file
    return trace


class Profiler(StageClock):
    """`Stages` that times them and traces some steps. Not to be shared by jobs.

    Nothing here raises what a full disk or the profiling libraries raise: ``warnings`` tells of it.

    Args:
        folder: Where the files go; made when needed.
        task: Names the files.
    """

    def __init__(self, folder: Path, task: int) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self._folder, self._stem, self._task = folder, f"task-{task:05d}", task
        self._device = torch.device("cpu")
        self._stats: EngineStats | None = None
        self._num_steps_seen = 0
        self._device_clock: _DeviceClock | None = None
        self._torch: TorchProfiler | None = None
        self._tracing = False
        self._num_traced = 0
        self._spans: list[dict[str, Any]] = []
        self._idle_share: float | None = None
        self._trace_path: Path | None = None
        self._epoch = time.time() - self._clock()

    # --- while the job runs ------------------------------------------------------------------

    @contextmanager
    def stage(self, name: StageName, /) -> Iterator[None]:
        """Times a stage, on the device too; a range in the trace while there is one."""
        with ExitStack() as stack:
            if self._tracing and name not in THREAD_STAGES:
                stack.enter_context(record_function(name))
            stack.enter_context(super().stage(name))
            if self._device_clock is not None and name in DEVICE_STAGES:
                stack.enter_context(self._device_clock.timed(name))
            yield

    def attach(self, engine: Engine) -> None:
        """Times this engine's stages from now on; the trace begins after ``WARM_UP_STEPS`` steps."""
        self._device, self._stats = engine.model.device, engine.stats
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            self._device_clock = _DeviceClock()
            activities.append(ProfilerActivity.CUDA)
        engine.runner.stages = self
        steps = torch_schedule(wait=WARM_UP_STEPS - 2, warmup=2, active=TRACED_STEPS, repeat=1)
        profiler = TorchProfiler(activities=activities, schedule=steps, on_trace_ready=self._take_trace)
        # torch 2.11 says so of every cycle; there is one.
        warnings.filterwarnings("ignore", ".*Profiler clears events at the end of each cycle")
        if self._guarded(profiler.start):
            self._torch = profiler

    def next_step(self) -> None:
        """Between two iterations of the engine: moves the trace on."""
        if self._device_clock is not None:
            self._device_clock.settle_finished()
        profiler = self._torch
        if profiler is None or self._stats is None or self._stats.num_steps == self._num_steps_seen:
            return
        self._num_steps_seen = self._stats.num_steps
        self._num_traced += self._tracing
        with super().stage("profiler"):
            self._tracing = self._guarded(profiler.step) and profiler.current_action in _TRACING

    def _on_end(self, name: StageName, start: float, seconds: float) -> None:
        if self._tracing and name in THREAD_STAGES:  # torch does not see these threads
            thread = threading.current_thread().name
            place = {"ph": "X", "cat": "user_annotation", "pid": "offdiff", "tid": thread}
            self._spans.append(place | {"name": name, "ts": start, "dur": seconds * 1e6})

    def _guarded(self, work: Callable[[], object]) -> bool:
        """Whether ``work`` went well; a profile never costs a job."""
        try:
            work()
        except Exception as error:
            self._tracing, self._torch = False, None
            self.warnings.append(f"profile: {type(error).__name__}: {error}")
            return False
        return True

    def _take_trace(self, profiler: TorchProfiler) -> None:
        """Writes the trace with the other threads' stages in it."""
        self._tracing, self._torch = False, None
        trace = chrome_trace(profiler)
        events = trace["traceEvents"]
        self._idle_share = device_idle_share(events)
        if self._device_clock is not None and self._idle_share is None:
            self.warnings.append("profile: the trace holds no kernels, so the GPU's idle share is not known")
        base = trace.get("baseTimeNanoseconds", 0) / 1e9
        spans, self._spans = self._spans, []
        events += [span | {"ts": (span["ts"] + self._epoch - base) * 1e6} for span in spans]
        _replace(self._trace_file, gzip.compress(json.dumps(trace).encode(), compresslevel=6))
        self._trace_path = self._trace_file

    @property
    def _trace_file(self) -> Path:
        return self._folder / f"{self._stem}.trace.json.gz"

    # --- afterwards --------------------------------------------------------------------------

    def finish(self, *, interrupted: bool) -> dict[str, Any] | None:
        """Ends the trace and writes the summary; None when drawing had not begun.

        Args:
            interrupted: Whether the job stopped before its end.
        """
        if self._stats is None:
            return None
        if self._torch is not None:
            self._guarded(self._torch.stop)
        if self._device_clock is not None:
            self._guarded(self._device_clock.settle)
        if self._trace_path is None and self._trace_file.exists():  # an earlier run's, not this one's
            self._guarded(self._trace_file.unlink)
        summary = self._summary(self._stats, interrupted)
        text = json.dumps(summary, indent=1) + "\n"
        self._guarded(lambda: _replace(self._folder / f"{self._stem}.json", text.encode()))
        return summary

    def _summary(self, stats: EngineStats, interrupted: bool) -> dict[str, Any]:
        on_gpu = self._device_clock is not None
        wall_s = sum(self._host(name).seconds for name in MAIN_STAGES)  # without the profiler's own
        drawing_s = sum(self._host(name).seconds for name in DRAWING_STAGES)
        transformer_s = self._device_s("denoise") or self._host("denoise").seconds
        return {
            "task": self._task,
            "device": torch.cuda.get_device_name(self._device) if on_gpu else "CPU",
            "interrupted": interrupted,
            "wall_s": wall_s,
            "drawing_s": drawing_s,
            "profiler_s": self._host("profiler").seconds,
            "num_images": stats.num_finished,
            "num_steps": stats.num_steps,
            "step_fill": stats.step_fill,
            "outside_transformer_share": 1 - transformer_s / drawing_s if drawing_s else None,
            "device_idle_share": self._idle_share,
            "num_traced_steps": self._num_traced,
            "trace": None if self._trace_path is None else str(self._trace_path),
            "stages": [self._stage(name, stats, wall_s) for name in (*MAIN_STAGES, *THREAD_STAGES)],
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }

    def _stage(self, name: StageName, stats: EngineStats, wall_s: float) -> dict[str, Any]:
        host, device_s = self._host(name), self._device_s(name)
        seconds = host.seconds if device_s is None else device_s
        return {
            "stage": name,
            "in_threads": name in THREAD_STAGES,
            "count": host.count,
            "host_s": host.seconds,
            "host_share": host.seconds / wall_s,
            "device_s": device_s,
            "device_share": None if device_s is None else device_s / wall_s,
            "s_per_image": seconds / stats.num_finished if stats.num_finished else None,
        }

    def _host(self, name: StageName) -> StageTime:
        return self.times.get(name, StageTime())

    def _device_s(self, name: StageName) -> float | None:
        """Seconds on the device; None on a CPU and for stages of the host alone."""
        if self._device_clock is None or name not in DEVICE_STAGES:
            return None
        return self._device_clock.seconds.get(name, 0.0)


class _DeviceClock:
    """Seconds that stages take on a GPU, between events on the stream in use. Waits for nothing."""

    def __init__(self) -> None:
        self.seconds: dict[StageName, float] = {}
        self._pending: deque[tuple[StageName, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def timed(self, name: StageName) -> Iterator[None]:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        try:
            yield
        finally:
            end.record()
            self._pending.append((name, start, end))

    def settle_finished(self) -> None:
        while self._pending and self._pending[0][2].query():
            self._settle_first()

    def settle(self) -> None:
        """Waits for the device and books what is left."""
        while self._pending:
            self._pending[0][2].synchronize()
            self._settle_first()

    def _settle_first(self) -> None:
        name, start, end = self._pending.popleft()
        self.seconds[name] = self.seconds.get(name, 0.0) + start.elapsed_time(end) / 1000


def _replace(path: Path, content: bytes) -> None:
    """Makes ``path`` hold ``content``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
