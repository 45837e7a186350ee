"""Outputs elsewhere: what is asked of every such place, and object storage.

Object storage is anything that fsspec has a file system for (``s3://``, ``gs://``, …): small files whole,
tables up and down, one winner for a name. Credentials come from where that file system takes them by
itself, the environment; none goes through our hands.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import fsspec

from offline_diffusion.errors import ConfigError, JobError, JobInterrupted

GIVE_UP_AFTER_S = 300.0
"""So long is a request tried again that fails for a reason that may pass."""

STOPPING_S = 10.0
"""Likewise once the job was asked to stop."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between two tries; each pause is about twice the one before."""

LIST_INTERVAL_S = 5.0
"""Between two looks at what others have written: each is a request."""

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
_BATCH = 256
_CREDENTIALS_HINT = (
    "credentials come from the environment, as the storage's own tools take them (AWS_PROFILE or "
    "AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...)"
)

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
            except Exception as error:  # each file system has errors of its own
                where = f"{self.url}/{path}".rstrip("/")
                if self._is_final(error):
                    raise JobError(f"{where}: {_describe(error)}", hint=self._hint(error)) from error
                limit = min(self._patience_s(error), STOPPING_S if self._stopped() else math.inf)
                if time.monotonic() - began > limit or self._has_given_up.is_set():
                    self._has_given_up.set()
                    raise JobInterrupted(
                        f"{where} cannot be reached: {_describe(error)}",
                        hint="what is finished is kept on this machine: the same command goes on",
                    ) from error
                if pause == FIRST_PAUSE_S:
                    self._say(f"{where}: {_describe(error)}: trying again, for at most {limit:.0f} s")
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(LONGEST_PAUSE_S, 2 * pause)
            else:
                self._has_given_up.clear()
                return answer

    def _is_final(self, error: Exception) -> bool:
        """Whether trying again is of no use."""
        is_ours = isinstance(error, NotImplementedError | TypeError | AttributeError | ValueError)
        return is_ours or _is_access(error)

    def _hint(self, error: Exception) -> str | None:
        """What to do about a final error."""
        return _CREDENTIALS_HINT if _is_access(error) else None

    def _patience_s(self, _: Exception) -> float:
        """Seconds after which waiting for an error to pass ends."""
        return self._give_up_after_s


class Storage(RemoteFolder):
    """A folder on object storage, see `RemoteFolder`.

    Raises:
        ConfigError: There is no file system for such URLs here.
    """

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._fs, self._root = _file_system(self.url)

    def names(self, folder: str) -> dict[str, int]:
        return {name: entry["size"] or 0 for name, entry in self._list(folder) if entry["type"] == "file"}

    def folders(self, folder: str) -> list[str]:
        return sorted(name for name, entry in self._list(folder) if entry["type"] == "directory")

    def read(self, path: str) -> bytes:
        return self._do(path, lambda: bytes(self._fs.cat_file(self._full(path))))

    def read_all(self, paths: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for start in range(0, len(paths), _BATCH):
            part = paths[start : start + _BATCH]
            full = {self._full(path): path for path in part}
            answers = self._do(part[0], functools.partial(self._fs.cat, list(full), on_error="return"))
            for name, answer in answers.items():
                with contextlib.suppress(FileNotFoundError):
                    is_bad = isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError)
                    found[full[name]] = self.read(full[name]) if is_bad else _content(answer)
        return found

    def create(self, path: str, content: bytes) -> bool:
        def attempt() -> bool:
            try:
                self._fs.pipe_file(self._full(path), content, mode="create")
            except FileExistsError:
                return bytes(self._fs.cat_file(self._full(path))) == content
            except FileNotFoundError as error:  # of a bucket; nothing else must be there for a new file
                raise JobError(
                    f"{self.url}: {_describe(error)}", hint="the bucket must be there before the job"
                ) from None
            return True

        return self._do(path, attempt)

    def is_exclusive(self, path: str) -> bool:
        """Whether the storage keeps a second one from creating ``path``, which is there already."""
        content = self.read(path)
        try:
            self._do(path, lambda: self._fs.pipe_file(self._full(path), content, mode="create"))
        except FileExistsError:
            return True
        return False

    def replace(self, path: str, content: bytes) -> None:
        self._do(path, lambda: self._fs.pipe_file(self._full(path), content))

    def try_replace(self, path: str, content: bytes) -> None:
        """As ``replace``, once, for what will soon be written again."""
        with contextlib.suppress(Exception):  # each file system has errors of its own
            self._fs.pipe_file(self._full(path), content)

    def remove(self, path: str) -> None:
        """Deletes a file; one that is not there is no error."""
        with contextlib.suppress(FileNotFoundError):
            self._do(path, lambda: self._fs.rm_file(self._full(path)))

    def remove_folder(self, path: str) -> None:
        """Deletes a folder with its files."""
        with contextlib.suppress(FileNotFoundError):
            self._do(path, lambda: self._fs.rm(self._full(path), recursive=True))

    def upload(self, source: Path, path: str) -> None:
        """Writes a local file, in parts where it is large."""
        self._do(path, lambda: self._fs.put_file(str(source), self._full(path)))

    def download(self, path: str, target: Path) -> None:
        self._do(path, lambda: self._fs.get_file(self._full(path), str(target)))

    def copy(self, source: str, target: str) -> None:
        """Copies a file within the storage, which does it by itself where it can.

        Raises:
            FileNotFoundError: ``source`` is gone.
        """
        self._do(target, lambda: self._fs.cp_file(self._full(source), self._full(target)))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _list(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        full = self._full(folder)

        def attempt() -> list[dict[str, Any]]:
            self._fs.invalidate_cache(full)
            try:
                return list(self._fs.ls(full, detail=True))
            except FileNotFoundError:
                return []

        entries = self._do(folder, attempt)
        named = ((entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries)
        # Some stores keep an empty object that stands for the folder itself.
        return [(name, entry) for name, entry in named if entry["name"].rstrip("/") != full]


def _file_system(url: str) -> tuple[Any, str]:
    protocol = url.split("://", maxsplit=1)[0].lower()
    try:
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = f"pip install 'offline-diffusion[{extra}]'" if extra else str(error)
        raise ConfigError(f"{url}: the file system of {protocol}:// is not installed", hint=hint) from None
    except ValueError as error:
        raise ConfigError(f"{url}: {error}", hint="s3:// and gs:// are known, among others") from None
    return fs, str(root).rstrip("/")


def _content(answer: bytes | FileNotFoundError) -> bytes:
    if isinstance(answer, FileNotFoundError):
        raise answer
    return bytes(answer)


def _is_access(error: Exception) -> bool:
    return isinstance(error, PermissionError) or "credential" in type(error).__name__.lower()


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:299]}…"
