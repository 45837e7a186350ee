"""``offdiff`` as a user starts it: in a process of its own, which can be signalled and killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from forked import ForkedPopen

PATIENCE_S = 120.0


def offdiff(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(_command(*args), capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def _command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "offline_diffusion.cli.main", *map(str, args)]


class Process:
    """A command at work; ``lines`` are what it has said on standard error so far.

    With ``script`` that stands in for ``offdiff``.
    """

    def __init__(self, *args: str | Path, script: Path | None = None) -> None:
        command = _command(*args) if script is None else [sys.executable, str(script), *map(str, args)]
        popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._watch(popen)

    def _watch(self, popen: subprocess.Popen[str] | ForkedPopen) -> None:
        self.lines: list[str] = []
        self._popen = popen
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def memory(self) -> tuple[int, int]:
        """Bytes that it has in memory now, while it runs, and that it has had at most."""
        lines = Path(f"/proc/{self._popen.pid}/status").read_text(encoding="utf-8").splitlines()
        kib = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
        return int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024

    @property
    def stderr(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, start: str) -> bool:
        """Waits until a line begins so; False when the process ends before."""
        return self.wait_until(lambda: any(line.startswith(start) for line in self.lines))

    def wait_until(self, condition: object, pause_s: float = 0.002) -> bool:
        """Waits until ``condition()`` holds; False when the process ends before."""
        assert callable(condition)
        end = time.monotonic() + PATIENCE_S
        while self.is_running:
            if condition():
                return True
            assert time.monotonic() < end, f"nothing happened in {PATIENCE_S} s:\n{self.stderr}"
            time.sleep(pause_s)
        return False

    def send(self, signal: int) -> None:
        if self.is_running:
            self._popen.send_signal(signal)

    def wait(self) -> int:
        """The exit code, negative when a signal killed it."""
        code = self._popen.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self._popen.stderr is not None
        self._popen.stderr.close()
        return code


class Forked(Process):
    """Likewise, with the libraries loaded before it begins; see ``forked.py``.

    With ``program`` the function ``main`` of that module stands in for ``offdiff``.
    """

    def __init__(self, *args: str | Path, program: str = "offline_diffusion.cli.main") -> None:
        self._watch(ForkedPopen(program, list(map(str, args))))


class Cost(NamedTuple):
    """What a command took."""

    code: int
    seconds: float
    peak_bytes: int


_MEASURE = """
import json, os, resource, subprocess, sys, time
started = time.monotonic()
with open(sys.argv[1], "wb") as stream:
    code = subprocess.run(sys.argv[2:], stdout=stream, stderr=stream).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, time.monotonic() - started, usage.ru_maxrss * 1024]))
"""
"""Run by a process of its own: a child's peak counts the memory of the process that started it."""


def measure(*args: str | Path, stdout: Path) -> Cost:
    """Runs a command to its end with its output in a file; seconds and peak memory of it alone."""
    command = [sys.executable, "-c", _MEASURE, str(stdout), *_command(*args)]
    return Cost(*json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
