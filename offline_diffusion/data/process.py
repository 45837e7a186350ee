"""Which process this is, and whether another one of this machine still runs."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STOPPED = ("T",)
_ENDED = ("Z", "X")  # a zombie has ended: only its parent has not asked yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process, told apart from every other one; fields are empty where the system does not say.

    Args:
        host: Name of the machine, for people.
        boot_id: Of this boot of the machine.
        pid_namespace: Which numbering of processes ``pid`` belongs to: a container has its own.
        pid: Its number there.
        started: When it began, in the kernel's ticks since boot: numbers are used again.
    """

    host: str = ""
    boot_id: str = ""
    pid_namespace: str = ""
    pid: int = 0
    started: str = ""


def this_process() -> ProcessId:
    """The calling process."""
    pid = os.getpid()
    return ProcessId(
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
        pid=pid,
        started=_state_and_start(pid)[1],
    )


def new_worker_name() -> str:
    """``<host>:<pid>:<random>``, unlike that of every other worker."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def is_known_dead(process: ProcessId) -> bool:
    """Whether a process of this boot and process numbering has ended; False where that cannot be told."""
    here = (_boot_id(), _pid_namespace())
    if not all(here) or not process.started or (process.boot_id, process.pid_namespace) != here:
        return False
    if not is_running(process.pid):
        return True
    state, started = _state_and_start(process.pid)
    return bool(started) and (state in _ENDED or started != process.started)


def is_running(pid: int) -> bool:
    """Whether ``pid`` is there in this numbering of processes; so is one whose end nobody has asked about."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True


def is_stopped(pid: int) -> bool:
    """Whether a process of this numbering was stopped, by SIGSTOP for one; False where nobody can tell."""
    return _state_and_start(pid)[0] in _STOPPED


@functools.cache
def pid_space() -> str:
    """A short name for the numbering of processes that a pid belongs to; empty where it is not known."""
    here = (_boot_id(), _pid_namespace())
    return hashlib.sha256(" ".join(here).encode()).hexdigest()[:8] if all(here) else ""


def _boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; empty where they cannot be read."""
    try:
        # The name stands in brackets and may hold anything, brackets and blanks too.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
