"""Object storage as an output needs it: small files whole, tables up and down, one winner for a name.

Anything that fsspec has a file system for (``s3://``, ``gs://``, …). Credentials come from where that file
system takes them by itself, the environment; none goes through our hands.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import fsspec

from offline_diffusion.data.remote_folder import RemoteFolder
from offline_diffusion.data.requests_again import describe
from offline_diffusion.errors import ConfigError, JobError

PRECONDITION_FAILED, NOT_IMPLEMENTED = 412, 501

_S3 = ("s3", "s3a")
_EXTRAS = {**dict.fromkeys(_S3, "s3"), "gs": "gs", "gcs": "gs"}
_PASSING = {408, 409, 425, 429}
"""Of the HTTP statuses from 400 to 499 those that may pass."""
_S3_OPTIONS = {
    "config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 1}}
}
"""Ours is the patience: with that of the libraries one try could take 25 minutes."""

_DATES = ("LastModified", "uploaded_at", "last_modified", "mtime", "modified", "created")
"""Where the file systems say when an object was written, as a time or in seconds since the epoch."""

_BATCH = 256
_CREDENTIALS_HINT = (
    "credentials come from the environment, as the storage's own tools take them (AWS_PROFILE or "
    "AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...)"
)


class Storage(RemoteFolder):
    """A folder on object storage, see `RemoteFolder`.

    Raises:
        ConfigError: There is no file system for such URLs here.
    """

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._fs, self._root = _file_system(self.url)
        # In one piece: for several, its size would have to be asked for first.
        protocol = self.url.split("://", maxsplit=1)[0]
        self._is_s3 = protocol in _S3
        self._in_one = {"max_concurrency": 1} if self._is_s3 else {}
        self._has_folders = protocol not in _EXTRAS

    def names(self, folder: str) -> dict[str, int]:
        return {name: entry["size"] or 0 for name, entry in self._list(folder) if entry["type"] == "file"}

    def ages(self, folder: str) -> dict[str, float]:
        """The files directly in a folder, each with the seconds since it was written.

        By S3's own clock; the dates of other storage are compared with this machine's. What has none is
        infinitely old.
        """
        entries = [(name, entry) for name, entry in self._list(folder) if entry["type"] == "file"]
        now = self._do(folder, self._now) if entries else 0.0
        return {name: now - _written_at(entry) for name, entry in entries}

    def folders(self, folder: str) -> list[str]:
        return sorted(name for name, entry in self._list(folder) if entry["type"] == "directory")

    def read(self, path: str) -> bytes:
        return self._do(path, lambda: self._cat(path))

    def exists(self, path: str) -> bool:
        return self._do(path, lambda: bool(self._fs.isfile(self._full(path))))

    def read_all(self, paths: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for start in range(0, len(paths), _BATCH):
            part = paths[start : start + _BATCH]
            full = {self._full(path): path for path in part}
            answers = self._do(
                part[0], functools.partial(self._fs.cat, list(full), on_error="return", **self._in_one)
            )
            for name, answer in answers.items():
                with contextlib.suppress(FileNotFoundError):
                    is_bad = isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError)
                    found[full[name]] = self.read(full[name]) if is_bad else _content(answer)
        return found

    def create(self, path: str, content: bytes) -> bool:
        def attempt() -> bool:
            if self._create(path, content):
                return True
            try:
                return self._cat(path) == content
            except FileNotFoundError:  # it was another one's, and is not needed any more
                return False

        return self._do(path, attempt)

    def is_exclusive(self, path: str) -> bool:
        """Whether the storage keeps a second one from creating ``path``, which is there already."""
        content = self.read(path)
        return not self._do(path, lambda: self._create(path, content))

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
        """Deletes the files of a folder, one by one: of many at once some may be left without a word."""
        for name in self.names(path):
            self.remove(f"{path}/{name}")
        if self._has_folders:
            with contextlib.suppress(Exception):  # each file system has errors of its own
                self._fs.rmdir(self._full(path))

    def upload(self, source: Path, path: str) -> None:
        """Writes a local file, in parts where it is large.

        Raises:
            FileNotFoundError: ``source`` is gone.
        """

        def attempt() -> None:
            try:
                self._fs.put_file(str(source), self._full(path))
            except FileNotFoundError as error:  # also of an upload in parts whose last answer was lost
                if not source.exists():
                    raise
                raise ConnectionError(describe(error)) from error

        self._do(path, attempt)

    def download(self, path: str, target: Path) -> None:
        self._do(path, lambda: self._fs.get_file(self._full(path), str(target)))

    def copy(self, source: str, target: str) -> None:
        """Copies a file within the storage, which does it by itself where it can.

        Raises:
            FileNotFoundError: ``source`` is gone.
        """
        self._do(target, lambda: self._fs.cp_file(self._full(source), self._full(target)))

    def _now(self) -> float:
        """Seconds since the epoch."""
        if not self._is_s3:
            return time.time()
        bucket, prefix, _ = self._fs.split_path(self._root)
        answer = self._fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=f"{prefix}/", MaxKeys=1)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return parsedate_to_datetime(date).timestamp() if date else time.time()

    def _cat(self, path: str) -> bytes:
        return bytes(self._fs.cat_file(self._full(path), **self._in_one))

    def _create(self, path: str, content: bytes) -> bool:
        """One try; False where something is there."""
        try:
            self._fs.pipe_file(self._full(path), content, mode="create")
        except FileExistsError:
            return False
        except FileNotFoundError as error:  # of a bucket; nothing else must be there for a new file
            hint = "the bucket must be there before the job"
            raise JobError(f"{self.url}: {describe(error)}", hint=hint) from None
        except Exception as error:
            status = _status(error)
            if status == PRECONDITION_FAILED:
                return False
            if status == NOT_IMPLEMENTED:
                raise NotImplementedError from error
            raise
        return True

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

    def _is_final(self, error: Exception) -> bool:
        return is_final(error)

    def _hint(self, error: Exception) -> str | None:
        return hint_about(error)


def is_final(error: Exception) -> bool:
    """Whether it is of no use to make a request again that failed with this error."""
    if isinstance(error, NotImplementedError | TypeError | AttributeError):
        return True
    status = _status(error)
    if status is not None and not isinstance(error, TimeoutError):
        return 400 <= status < 500 and status not in _PASSING
    # A bucket's name that botocore refuses is one of its validation errors.
    return _is_access(error) or "validation" in type(error).__name__.lower()


def hint_about(error: Exception) -> str | None:
    """What to do about a final error."""
    if "request time" in str(error):
        return "is this machine's clock right?"
    return _CREDENTIALS_HINT if _is_access(error) else None


def file_system_of(url: str) -> tuple[Any, str]:
    """A URL's file system, without a cache of what it listed or patience of its own, and the path there.

    Raises:
        ImportError: Its library is not installed.
        ValueError: There is none, or the URL is not one of its.
    """
    protocol = url.split("://", maxsplit=1)[0].lower()
    options: dict[str, Any] = {"use_listings_cache": False} if "::" not in protocol else {}
    fs, root = fsspec.core.url_to_fs(url, **options, **(_S3_OPTIONS if protocol in _S3 else {}))
    if protocol in _S3:
        fs.retries = 1
    return fs, str(root)


def _file_system(url: str) -> tuple[Any, str]:
    protocol = url.split("://", maxsplit=1)[0].lower()
    try:
        fs, root = file_system_of(url)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = f"pip install 'offline-diffusion[{extra}]'" if extra else str(error)
        raise ConfigError(f"{url}: the file system of {protocol}:// is not installed", hint=hint) from None
    except ValueError as error:
        raise ConfigError(f"{url}: {error}", hint="s3:// and gs:// are known, among others") from None
    return fs, root.rstrip("/")


def _written_at(entry: dict[str, Any]) -> float:
    found = next((entry[key] for key in _DATES if entry.get(key) is not None), -math.inf)
    return found.timestamp() if isinstance(found, datetime) else float(found)


def _content(answer: bytes | FileNotFoundError) -> bytes:
    if isinstance(answer, FileNotFoundError):
        raise answer
    return bytes(answer)


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error of whatever library, if one is told."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # botocore
        return status if isinstance(status, int) else None
    for holder, name in ((response, "status_code"), (error, "status"), (error, "code")):
        status = getattr(holder, name, None)
        if isinstance(status, int) or (isinstance(status, str) and status.isdecimal()):
            return int(status)
    return None if error.__cause__ is None else _status(error.__cause__)


def _is_access(error: Exception) -> bool:
    # botocore has classes of its own; those that fetch credentials may fail and pass.
    names = {"NoCredentialsError", "PartialCredentialsError"}
    return isinstance(error, PermissionError) or type(error).__name__ in names or _status(error) in {401, 403}
