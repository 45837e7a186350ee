"""A full disk: a job waits a while for space, then ends in good order."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from offline_diffusion.errors import DiskFullError, JobInterrupted

PAUSE_S = 60.0
"""So long a job waits for space."""

LOOK_AGAIN_S = 1.0

T = TypeVar("T")


def disk_stayed_full(out: Path, error: DiskFullError) -> JobInterrupted:
    """What ends a job that finds no space in its output folder."""
    return JobInterrupted(
        f"{error.message} ({_free_space(out)})",
        hint=f"free some space for {out} and run the same command: it goes on where it stopped",
    )


def _free_space(folder: Path) -> str:
    while not folder.exists():  # there was no space for the folder itself
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB are free"


class Patience:
    """Waits for space in an output folder; any thread may.

    Args:
        out: The output folder.
        say: Told once when a wait begins.
        stopped: Whether the job was asked to stop: then nobody waits any longer.
    """

    def __init__(
        self, out: Path, say: Callable[[str], None], stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._out, self._say, self._stopped = out.absolute(), say, stopped
        self._ended = threading.Event()

    def end(self) -> None:
        """Nobody waits any longer."""
        self._ended.set()

    def do(self, work: Callable[[], T]) -> T:
        """Does what may be tried again when the disk is full, for at most `PAUSE_S`.

        Raises:
            JobInterrupted: There was no space.
        """
        give_up_at: float | None = None
        while True:
            try:
                return work()
            except DiskFullError as error:
                if give_up_at is None:
                    give_up_at = time.monotonic() + PAUSE_S
                    space = f"{error.message} ({_free_space(self._out)})"
                    self._say(f"{space}: waiting for space, at most {PAUSE_S:.0f} s")
                left = give_up_at - time.monotonic()
                if left <= 0 or self._stopped() or self._ended.wait(min(left, LOOK_AGAIN_S)):
                    raise disk_stayed_full(self._out, error) from error
