"""Small files that workers share, in the output folder or on object storage; paths are relative to it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from offline_diffusion.data.files import create_file, disk_errors, read_json, replace_file
from offline_diffusion.data.layout import SCRATCH
from offline_diffusion.data.storage import Storage
from offline_diffusion.errors import JobError


class StateFiles(Protocol):
    """What workers share."""

    def names(self, folder: str) -> Iterable[str]:
        """The files of a folder; none when there is no such folder."""

    def read(self, path: str) -> dict[str, Any]:
        """A JSON object.

        Raises:
            FileNotFoundError: There is no such file.
            JobError: It holds something else.
        """

    def create(self, path: str, content: bytes) -> bool:
        """Writes a file unless it is there; of several callers one wins.

        Returns:
            Whether this call did.

        Raises:
            JobError: It cannot be written.
        """

    def replace(self, path: str, content: bytes) -> None:
        """Writes a file, whatever was there.

        Raises:
            JobError: It cannot be written.
        """

    def remove(self, path: str) -> None:
        """Deletes a file, as far as that can be done."""


class FolderFiles:
    """Those of an output folder on a file system."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def names(self, folder: str) -> Iterable[str]:
        try:
            return os.listdir(self._out / folder)
        except FileNotFoundError:
            return []

    def read(self, path: str) -> dict[str, Any]:
        return read_json(self._out / path)

    def create(self, path: str, content: bytes) -> bool:
        target = self._out / path
        with disk_errors(target.parent):
            target.parent.mkdir(exist_ok=True)
            try:
                # Not by way of the scratch folder, where a second start of our task may be clearing up.
                return create_file(target, content, target.parent)
            except FileNotFoundError:  # somebody else has cleared up here: it was of no use any more
                return False
            except OSError:  # of the folder's sync perhaps, which comes when the file is there
                with contextlib.suppress(OSError):
                    if target.read_bytes() == content:
                        return True
                raise

    def replace(self, path: str, content: bytes) -> None:
        with disk_errors(self._out / path):
            replace_file(self._out / path, content, self._out / SCRATCH)

    def remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            (self._out / path).unlink()


class StorageFiles:
    """Those on object storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def names(self, folder: str) -> Iterable[str]:
        return self._storage.names(folder)

    def read(self, path: str) -> dict[str, Any]:
        try:
            value = json.loads(self._storage.read(path))
        except ValueError as error:
            raise JobError(f"{self._storage}/{path} is damaged: {error}") from None
        if not isinstance(value, dict):
            raise JobError(f"{self._storage}/{path} is damaged: it must hold a JSON object")
        return value

    def create(self, path: str, content: bytes) -> bool:
        return self._storage.create(path, content)

    def replace(self, path: str, content: bytes) -> None:
        self._storage.replace(path, content)

    def remove(self, path: str) -> None:
        self._storage.remove(path)
