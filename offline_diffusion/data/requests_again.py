"""Requests to what is not on a file system: made again where their failure may pass."""

from __future__ import annotations

import errno
import math
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from offline_diffusion.errors import DiskFullError, JobInterrupted, OffdiffError

GIVE_UP_AFTER_S = 300.0
"""So long is a request tried again that fails for a reason that may pass."""

STOPPING_S = 10.0
"""Likewise once the job was asked to stop."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between two tries; each pause is about twice the one before."""

LONGEST_STOPPING_PAUSE_S = 0.5
"""Likewise once the job was asked to stop."""

T = TypeVar("T")


class RequestsAgain:
    """Makes requests, again with growing pauses where their failure may pass. Any thread may use it.

    Args:
        say: Told once when a wait begins.
        stopped: Whether the job was asked to stop: then it waits for seconds, not for minutes.
        give_up_after_s: Seconds after which waiting ends.
        hint: What to do after that.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        give_up_after_s: float = GIVE_UP_AFTER_S,
        hint: str = "the same command goes on",
    ) -> None:
        self._say, self._stopped, self._hint = say, stopped, hint
        self.give_up_after_s = give_up_after_s
        self._has_given_up = threading.Event()

    def do(
        self,
        where: str,
        request: Callable[[], T],
        *,
        refused: Callable[[Exception], OffdiffError | None],
        patience_s: Callable[[Exception], float] | None = None,
    ) -> T:
        """Makes a request; that a file is not there, or is there already, is an answer.

        Args:
            where: What it is about, for users.
            request: Makes it.
            refused: The error to raise where trying again is of no use, None where a failure may pass.
            patience_s: Seconds after which waiting for an error to pass ends, if not the usual ones.

        Raises:
            JobInterrupted: It failed for too long.
            DiskFullError: What it brings has no space here.
            OffdiffError: What ``refused`` gave.
        """
        began, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                answer = request()
            except (FileNotFoundError, FileExistsError, OffdiffError):
                raise
            except Exception as error:  # each library has errors of its own
                if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
                    raise DiskFullError(f"{where} has no space here: {describe(error)}") from error
                if (final := refused(error)) is not None:
                    raise final from error
                limit = self.give_up_after_s if patience_s is None else patience_s(error)
                limit = min(limit, STOPPING_S if self._stopped() else math.inf)
                if pause == FIRST_PAUSE_S and limit > 0:
                    self._say(f"{where}: {describe(error)}: trying again, for at most {limit:.0f} s")
                if time.monotonic() - began > limit or self._has_given_up.is_set():
                    self._has_given_up.set()
                    message = f"{where} cannot be reached: {describe(error)}"
                    raise JobInterrupted(message, hint=self._hint) from error
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


def describe(error: Exception) -> str:
    """An error in a line, for users."""
    if isinstance(error, NotImplementedError):
        return "this storage cannot be written to, or cannot create a file that must not be there yet"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:299]}…"
