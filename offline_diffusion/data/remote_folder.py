"""A folder that is not on a file system: what an output asks of it, and how requests are made again."""

from __future__ import annotations

import abc
import errno
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from offline_diffusion.errors import DiskFullError, JobError, JobInterrupted

GIVE_UP_AFTER_S = 300.0
"""So long is a request tried again that fails for a reason that may pass."""

STOPPING_S = 10.0
"""Likewise once the job was asked to stop."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between two tries; each pause is about twice the one before."""

LONGEST_STOPPING_PAUSE_S = 0.5
"""Likewise once the job was asked to stop."""

LIST_INTERVAL_S = 5.0
"""Between two looks at what others have written: each is a request."""

T = TypeVar("T")


class RemoteFolder(abc.ABC):
    """A folder that is not on a file system. Paths are relative to it; any thread may use it.

    Every request that fails for a reason that may pass is made again, with growing pauses.

    Args:
        url: Names the folder.
        say: Told once when a wait begins.
        stopped: Whether the job was asked to stop: then it waits for seconds, not for minutes.
        give_up_after_s: Seconds after which waiting ends.

    Raises:
        ConfigError: There can be no such folder.
    """

    list_interval_s: ClassVar[float] = LIST_INTERVAL_S

    def __init__(
        self,
        url: str,
        *,
        say: Callable[[str], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        give_up_after_s: float = GIVE_UP_AFTER_S,
    ) -> None:
        self.url = url.rstrip("/")
        self._say, self._stopped, self._give_up_after_s = say, stopped, give_up_after_s
        self._has_given_up = threading.Event()

    def __str__(self) -> str:
        return self.url

    @abc.abstractmethod
    def names(self, folder: str) -> dict[str, int]:
        """The files directly in a folder, each with its size in bytes; empty when there is none."""

    @abc.abstractmethod
    def folders(self, folder: str) -> list[str]:
        """The folders directly in a folder."""

    @abc.abstractmethod
    def read(self, path: str) -> bytes:
        """A small file.

        Raises:
            FileNotFoundError: There is none.
        """

    @abc.abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file."""

    @abc.abstractmethod
    def read_all(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Many small files, some at once; those that are gone are left out."""

    @abc.abstractmethod
    def create(self, path: str, content: bytes) -> bool:
        """Writes a small file unless it is there; of several callers one wins.

        Args:
            path: Its place.
            content: Unlike what anybody else would write there: by it a try whose answer was lost is told.

        Returns:
            Whether this call won.
        """

    @abc.abstractmethod
    def replace(self, path: str, content: bytes) -> None:
        """Writes a small file, whatever was there."""

    @abc.abstractmethod
    def download(self, path: str, target: Path) -> None:
        """Reads a file into a local one.

        Raises:
            FileNotFoundError: There is none.
        """

    def _do(self, path: str, request: Callable[[], T]) -> T:
        """Makes a request, again where its failure may pass.

        Raises:
            JobInterrupted: It failed for too long.
            JobError: It cannot be made.
        """
        began, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                answer = request()
            except (FileNotFoundError, FileExistsError, JobError):
                raise
            except Exception as error:  # each library has errors of its own
                where = f"{self.url}/{path}".rstrip("/")
                if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
                    raise DiskFullError(f"{where} has no space here: {describe(error)}") from error
                if self._is_final(error):
                    raise JobError(f"{where}: {describe(error)}", hint=self._hint(error)) from error
                limit = min(self._patience_s(error), STOPPING_S if self._stopped() else math.inf)
                if pause == FIRST_PAUSE_S and limit > 0:
                    self._say(f"{where}: {describe(error)}: trying again, for at most {limit:.0f} s")
                if time.monotonic() - began > limit or self._has_given_up.is_set():
                    self._has_given_up.set()
                    raise JobInterrupted(
                        f"{where} cannot be reached: {describe(error)}",
                        hint="what is finished is kept on this machine: the same command goes on",
                    ) from error
                self._wait(pause * random.uniform(0.5, 1.0))
                pause = min(LONGEST_PAUSE_S, 2 * pause)
            else:
                self._has_given_up.clear()
                return answer

    def _wait(self, seconds: float) -> None:
        """Less, once the job is asked to stop."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LONGEST_STOPPING_PAUSE_S))
            if self._stopped():
                return

    @abc.abstractmethod
    def _is_final(self, error: Exception) -> bool:
        """Whether trying again is of no use."""

    @abc.abstractmethod
    def _hint(self, error: Exception) -> str | None:
        """What to do about a final error."""

    def _patience_s(self, _: Exception) -> float:
        """Seconds after which waiting for an error to pass ends."""
        return self._give_up_after_s


def describe(error: Exception) -> str:
    """An error in a line, for users."""
    if isinstance(error, NotImplementedError):
        return "this storage cannot be written to, or cannot create a file that must not be there yet"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:299]}…"
