"""A Slurm cluster of one node on this machine: munged, slurmctld and slurmd in a folder of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

# cred_expire is also how long a requeued job waits before it starts again (two minutes by default).
# More processors than there are: the tasks of an array shall run side by side on a small machine.
_CONFIG = """
ClusterName=offdiff
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldDebug=debug
SlurmdDebug=debug
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=2
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=30
MinJobAge=3600
NodeName=node NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=8000 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=node Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=node MaxTime=INFINITE State=UP PriorityTier=2
"""


def missing_programs() -> list[str]:
    """Programs that a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


class Task(NamedTuple):
    """An array's task as Slurm knows it."""

    state: str  # in Slurm's words
    restarts: int
    exit_code: int


class Cluster:
    """The cluster, running; ``folder`` should have a short name, since sockets lie in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": PATH,
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Raises AssertionError, with the daemons' logs, when the node does not come up."""
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir(mode=0o755, parents=True)
        config = _CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            folder=self.folder,
            ctld_port=_free_port(),
            slurmd_port=_free_port(),
        )
        (self.folder / "slurm.conf").write_text(config)
        self._start_munged()
        self._start("slurmctld", "-D", "-f", self.folder / "slurm.conf")
        self._start("slurmd", "-D", "-f", self.folder / "slurm.conf", "-N", "node")
        self._wait(
            lambda: self._asked("sinfo", "--noheader", "--format=%T") == "idle", "the node is not idle"
        )

    def _start_munged(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        paths = [f"--{flag}={folder / name}" for flag, name in files.items()]
        self._start("munged", "--foreground", "--force", *paths)
        self._wait((folder / "socket").exists, "munged has no socket")

    def _start(self, program: str, *args: str | Path) -> None:
        with (self.folder / f"{program}.out").open("wb") as out:
            command = [program, *map(str, args)]
            self._daemons.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=self.environ,
                    cwd=self.folder,
                )
            )

    def stop(self) -> None:
        """Ends every job, then the daemons."""
        if self._daemons[1:]:
            self._asked("scancel", "--user=root")
            self._asked("scancel", "--user=root", "--signal=KILL", "--full")
            end = time.monotonic() + 20
            while self._asked("squeue", "--noheader") and time.monotonic() < end:
                time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *args: str | Path) -> str:
        """One of Slurm's commands: what it prints."""
        done = self._call(*args)
        assert done.returncode == 0, f"{args}: {done.stderr}"
        return done.stdout.strip()

    def task(self, array: str, index: int) -> Task:
        shown = self.run("scontrol", "--oneliner", "show", "job", f"{array}_{index}")
        words = dict(re.findall(r"(JobState|Restarts|ExitCode)=(\S+)", shown))
        return Task(words["JobState"], int(words["Restarts"]), int(words["ExitCode"].partition(":")[0]))

    def wait_for_end(self, array: str, seconds: float) -> None:
        """Waits until no task of an array is queued or running."""

        def queue() -> str:
            return self.run("squeue", "--noheader", "--array", "--format=%i %T %r %S", f"--jobs={array}")

        wait_until(lambda: not queue(), seconds, queue)

    def _asked(self, *args: str) -> str:
        return self._call(*args).stdout.strip()

    def _call(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        command = list(map(str, args))
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )

    def _wait(self, condition: Callable[[], object], otherwise: str) -> None:
        def logs() -> str:
            return otherwise + "\n" + "\n".join(path.read_text() for path in self.folder.glob("*.out"))

        def check() -> object:
            assert all(daemon.poll() is None for daemon in self._daemons), f"a daemon has ended: {logs()}"
            return condition()

        wait_until(check, 30, logs)


def wait_until(condition: Callable[[], object], seconds: float, say: Callable[[], str]) -> None:
    """Waits until ``condition()`` holds; AssertionError with ``say()`` after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds:.0f} s: {say()}"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
