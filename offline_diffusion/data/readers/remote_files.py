"""Files on a file system elsewhere: what reading manifests asks of it, again where a failure may pass."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import fsspec

from offline_diffusion.data.readers.base import Stamp
from offline_diffusion.data.requests_again import RequestsAgain, T, describe
from offline_diffusion.data.storage import hint_about, is_final
from offline_diffusion.errors import ManifestError

_VERSION_KEYS = (
    "ETag", "etag", "blob_id", "Last-Modified", "LastModified", "last_modified", "updated", "mtime",
)  # fmt: skip
"""What file systems call that which is another one after a change, the surest first."""

_SKIP_BYTES = 2**20


class RemoteFiles:
    """Reads from a file system, with the patience of `RequestsAgain`.

    All of it raises ``FileNotFoundError`` for what is not there, `JobInterrupted` where a request failed for
    too long, and `ManifestError` where it is of no use to make it again.

    Args:
        fs: Of ``storage.file_system_of``.
        requests: Makes its requests.
    """

    def __init__(self, fs: fsspec.AbstractFileSystem, requests: RequestsAgain) -> None:
        self._fs, self._requests = fs, requests

    def url(self, path: str) -> str:
        """The URL of a path."""
        return str(self._fs.unstrip_protocol(path))

    def info(self, path: str) -> dict[str, Any]:
        """What is known of a file or a folder; its ``type`` is ``file`` or ``directory``."""
        return self.ask(path, lambda: dict(self._fs.info(path)))

    def isfile(self, path: str) -> bool:
        """Whether there is a file."""
        return self._is(path, "file")

    def isdir(self, path: str) -> bool:
        """Whether there is a folder."""
        return self._is(path, "directory")

    def glob(self, pattern: str) -> list[str]:
        """The paths that fit, sorted."""
        return self.ask(pattern, lambda: sorted(self._fs.glob(pattern)))

    def find(self, folder: str) -> dict[str, dict[str, Any]]:
        """All files below a folder, each with what ``info`` says of it: a request for many files."""
        return self.ask(folder, lambda: dict(self._fs.find(folder, detail=True)))

    def open(self, path: str) -> io.RawIOBase:
        """The bytes of a file, which may be read from any place if the file system can."""
        return _RemoteFile(self, path)

    def open_once(self, path: str) -> Any:
        """As ``open``, without any patience."""
        return self._fs.open(path, "rb")

    def stamp(self, path: str, info: Mapping[str, Any]) -> Stamp:
        """Of a file with this ``info``."""
        found = next((info[key] for key in _VERSION_KEYS if info.get(key)), None)
        if found is None:
            found = self.ask(path, lambda: self._modified(path))
        return Stamp(info.get("size"), None if found is None else str(found))

    def _modified(self, path: str) -> Any:
        try:
            return self._fs.modified(path)
        except NotImplementedError:
            return None

    def _is(self, path: str, kind: str) -> bool:
        try:
            return bool(self.info(path)["type"] == kind)
        except FileNotFoundError:
            return False

    def ask(self, path: str, request: Callable[[], T]) -> T:
        """Makes a request about a path."""

        def attempt() -> T:
            try:
                return request()
            except FileNotFoundError as error:
                if _is_gone(error):
                    raise
                raise ConnectionError(_reason(error)) from error.__cause__

        def refused(error: Exception) -> ManifestError | None:
            if not (is_final(error) or isinstance(error, ValueError)):
                return None
            return ManifestError(f"{where}: cannot be read: {describe(error)}", hint=hint_about(error))

        where = self.url(path)
        return self._requests.do(where, attempt, refused=refused)


def _is_gone(error: FileNotFoundError) -> bool:
    """Whether a file is not there: over HTTP, fsspec says so of whatever has failed."""
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, LookupError | FileNotFoundError | ValueError):
        return True
    return is_final(cause)


def _reason(error: FileNotFoundError) -> str:
    return describe(error.__cause__) if isinstance(error.__cause__, Exception) else describe(error)


class _RemoteFile(io.RawIOBase):
    """An open file; a read that fails is made again, of a file opened anew, from the same place."""

    def __init__(self, files: RemoteFiles, path: str) -> None:
        self._files, self._path = files, path
        self._position = 0
        self._stream: Any = files.ask(path, lambda: files.open_once(path))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As `io.RawIOBase.seek`.

        Raises:
            ValueError: This file can only be read from its beginning.
        """
        if whence == io.SEEK_CUR:
            offset += self._position
        if self._stream is None:
            self._stream = self._files.ask(self._path, lambda: self._files.open_once(self._path))
        if whence == io.SEEK_END or offset != self._stream.tell():
            self._stream.seek(offset, whence if whence == io.SEEK_END else io.SEEK_SET)
        self._position = int(self._stream.tell())
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._files.ask(self._path, lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._drop()
        super().close()

    def _read(self, size: int) -> bytes:
        if self._stream is None:
            self._stream = self._files.open_once(self._path)
            self._skip_to(self._position)
        try:
            return bytes(self._stream.read(size))
        except BaseException:
            self._drop()  # what it holds may be torn
            raise

    def _skip_to(self, position: int) -> None:
        try:
            self._stream.seek(position)
        except ValueError:  # some can only be read from the beginning
            while (left := position - self._stream.tell()) and self._stream.read(min(left, _SKIP_BYTES)):
                pass

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
