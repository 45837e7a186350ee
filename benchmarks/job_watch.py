"""One sitting of a job, watched from the outside: ``offdiff run`` as a process, its clocks, a worker killed.

Free of torch: who measures others must not hold a GPU.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from records import ROOT

POLL_S = 0.05
SAMPLE_S = 0.25
FLIGHTS = Path("_state") / "flights"
RUNNING = "running:"
"""Begins the line that ``offdiff run`` says when a worker's first step is over."""


@dataclass
class Sitting:
    """What was seen of one run of the command; points in time are seconds since the epoch.

    Args:
        started, ended: Of the process.
        begun: When each worker handed its first image to its engine, by its name in the job's folder.
        first_step_done: When the first step of any worker was over: kernels are compiled by then.
        stopped: When it was asked to stop, if it was.
        killed: When a worker was killed, if one was, and which.
        restarts: What was said of workers that died and were started again.
        exit_code: Of the process.
        cpu_s: Processor seconds of all its processes.
    """

    started: float
    ended: float = 0.0
    begun: dict[str, float] = field(default_factory=dict)
    first_step_done: float | None = None
    stopped: float | None = None
    killed: float | None = None
    victim: str | None = None
    restarts: list[str] = field(default_factory=list)
    exit_code: int = 0
    cpu_s: float = 0.0


class Gpus:
    """Utilisation and clocks as the driver tells them; of no devices where it, or ``pynvml``, is not there.

    Args:
        devices: As ``--devices`` names them.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._handles: dict[str, Any] = {}
        numbers = {name: name.removeprefix("cuda:") for name in devices}
        wanted = {name: int(number) for name, number in numbers.items() if number.isdecimal()}
        if not wanted:
            return
        try:
            import pynvml
        except ImportError:
            print("pynvml is not there: no utilisation of the driver's", flush=True)
            return
        pynvml.nvmlInit()
        self._nvml = pynvml
        self._handles = {name: pynvml.nvmlDeviceGetHandleByIndex(each) for name, each in wanted.items()}

    def sample(self) -> dict[str, tuple[float, float]]:
        """By device: percent of the last moments in which a kernel ran, and the clock in MHz."""
        nvml = self._nvml if self._handles else None
        return {
            name: (
                float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            )
            for name, handle in self._handles.items()
            if nvml is not None
        }


@dataclass
class Samples:
    """A series in time: processor seconds of the job's processes so far, and what its devices did."""

    times: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    gpus: list[dict[str, tuple[float, float]]] = field(default_factory=list)

    def add(self, now: float, cpu_s: float, gpus: dict[str, tuple[float, float]]) -> None:
        self.times.append(now)
        self.cpu_s.append(cpu_s)
        self.gpus.append(gpus)

    def cpu_between(self, start: float, stop: float) -> float:
        """Processor seconds spent from one point in time to another."""
        inside = [cpu for now, cpu in zip(self.times, self.cpu_s, strict=True) if start <= now <= stop]
        return max(inside) - min(inside) if inside else 0.0

    def gpu_between(self, start: float, stop: float, device: str) -> tuple[float, float] | None:
        """Mean utilisation, 0 to 1, and mean clock of a device; None where the driver said nothing."""
        pairs = zip(self.times, self.gpus, strict=True)
        inside = [gpus[device] for now, gpus in pairs if start <= now <= stop and device in gpus]
        if not inside:
            return None
        return statistics.fmean(each[0] for each in inside) / 100, statistics.fmean(e[1] for e in inside)


class JobWatch:
    """Runs the command and looks at it a few times a second.

    Args:
        arguments: Of ``offdiff``.
        out: The job's output folder.
        devices: As ``--devices`` names them.
        stop_at: When to ask it to stop, on the monotonic clock.
        kill_after_s: A worker is killed once all have drawn for so long; None kills nobody.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        out: Path,
        devices: Sequence[str],
        *,
        stop_at: float | None = None,
        kill_after_s: float | None = None,
    ) -> None:
        self._command = [sys.executable, "-m", "offline_diffusion.cli.main", *arguments]
        self._flights, self._devices = out / FLIGHTS, devices
        self._stop_at, self._kill_after_s = stop_at, kill_after_s
        self._old = set(self._flights.glob("*.log"))
        self.sitting = Sitting(started=time.time())
        self.samples = Samples()

    def run(self) -> Sitting:
        """Until it ends."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        gpus, cpu_before = Gpus(self._devices), _cpu_of_children()
        sitting = self.sitting
        sitting.started = time.time()
        process = subprocess.Popen(
            self._command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environ
        )
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        try:
            self._watch(process, gpus)
        finally:
            process.terminate()  # does nothing once it has ended
            sitting.exit_code = process.wait()
            sitting.ended = time.time()
            reader.join()
            assert process.stderr is not None
            process.stderr.close()
        sitting.cpu_s = _cpu_of_children() - cpu_before
        return sitting

    def _watch(self, process: subprocess.Popen[str], gpus: Gpus) -> None:
        next_sample = 0.0
        while process.poll() is None:
            self._look_for_begun()
            if time.monotonic() >= next_sample:
                next_sample = time.monotonic() + SAMPLE_S
                self.samples.add(time.time(), cpu_of_tree(process.pid), gpus.sample())
            self._kill_one()
            if self._stop_at is not None and self.sitting.stopped is None and self._is_late():
                self.sitting.stopped = time.time()
                process.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)

    def _is_late(self) -> bool:
        return self._stop_at is not None and time.monotonic() >= self._stop_at

    def _look_for_begun(self) -> None:
        """A worker's log of images in flight is empty until it hands the first one to its engine."""
        for path in set(self._flights.glob("*.log")) - self._old:
            if path.stem not in self.sitting.begun and _size(path):
                self.sitting.begun[path.stem] = time.time()

    def _kill_one(self) -> None:
        sitting = self.sitting
        is_due = self._kill_after_s is not None and sitting.killed is None
        if not is_due or sitting.stopped is not None or len(sitting.begun) < len(self._devices):
            return
        victim = max(sitting.begun, key=lambda name: sitting.begun[name])
        if time.time() - sitting.begun[victim] >= (self._kill_after_s or 0.0):
            print(f"killing {victim}", flush=True)
            os.kill(pid_of(victim), signal.SIGKILL)
            sitting.killed, sitting.victim = time.time(), victim

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            print(f"  {line}", end="", flush=True)
            if line.startswith(RUNNING) and self.sitting.first_step_done is None:
                self.sitting.first_step_done = time.time()
            if "started again" in line:
                self.sitting.restarts.append(line.strip())


def file_name(worker: str) -> str:
    """How the job's folder writes a worker's name."""
    return re.sub(r"[^\w.-]", "_", worker)


def pid_of(name: str) -> int:
    """The process of a worker, by its name as `file_name` writes it: host, pid, and a random tail."""
    return int(name.split("_")[-2])


def cpu_of_tree(root: int) -> float:
    """Processor seconds of a process and all below it, those included that ended and were waited for."""
    own: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        own[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    total, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        total += own.get(pid, 0.0)
        waiting += children.get(pid, [])
    return total


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the worker has ended
        return 0
