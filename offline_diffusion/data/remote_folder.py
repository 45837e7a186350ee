"""A folder that is not on a file system: what an output asks of it, and how requests are made again."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from offline_diffusion.data.requests_again import GIVE_UP_AFTER_S, RequestsAgain, T, describe
from offline_diffusion.errors import JobError

LIST_INTERVAL_S = 5.0
"""Between two looks at what others have written: each is a request."""


class RemoteFolder(abc.ABC):
    """A folder that is not on a file system. Paths are relative to it; any thread may use it.

    Every request that fails for a reason that may pass is made again, with growing pauses.

    Args:
        url: Names the folder.
        say, stopped, give_up_after_s: See `RequestsAgain`.

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
        self._requests = RequestsAgain(
            say=say,
            stopped=stopped,
            give_up_after_s=give_up_after_s,
            hint="what is finished is kept on this machine: the same command goes on",
        )

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
        where = f"{self.url}/{path}".rstrip("/")

        def refused(error: Exception) -> JobError | None:
            if not self._is_final(error):
                return None
            return JobError(f"{where}: {describe(error)}", hint=self._hint(error))

        return self._requests.do(where, request, refused=refused, patience_s=self._patience_s)

    @abc.abstractmethod
    def _is_final(self, error: Exception) -> bool:
        """Whether trying again is of no use."""

    @abc.abstractmethod
    def _hint(self, error: Exception) -> str | None:
        """What to do about a final error."""

    def _patience_s(self, _: Exception) -> float:
        """Seconds after which waiting for an error to pass ends."""
        return self._requests.give_up_after_s
