"""Processes forked from one that has loaded the libraries, which takes most of the life of a small job.

Each is a process of its own, to be signalled, frozen and killed, that runs a whole command. Commands that are
started as a user does it, whose memory is measured, or that stop while they load, are not for here.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

PRELOADED = "preloaded"


class ForkedPopen:
    """As far as tests need it a ``subprocess.Popen`` whose standard error is read.

    Args:
        module: Has a function ``main``, which finds its arguments in ``sys.argv``.
        arguments: These.
    """

    def __init__(self, module: str, arguments: list[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_live, args=(theirs, dict(os.environ), module, arguments))
        with _search_path():
            self._process.start()
        theirs.close()
        self.stderr: IO[str] = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        ours.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a forked command", timeout)
        return code


class _search_path:
    """Before Python 3.13 the process that others are forked from does not look where this one does."""

    def __enter__(self) -> None:
        self._before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = self._before


def _live(stderr: Connection, environment: dict[str, str], module: str, arguments: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
