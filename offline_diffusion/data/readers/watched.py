"""Files that must not change while a job reads them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from offline_diffusion.data.readers.base import Stamp
from offline_diffusion.data.readers.files import DataFile, digest_of, gone


class WatchedFiles:
    """Remembers how files looked, 8 bytes for each.

    Args:
        files: All on one file system.
        folder: Where they were found, if their names count; elsewhere it is listed: a request for many files.
    """

    def __init__(self, files: Sequence[DataFile], folder: str | None = None) -> None:
        self._files, self._folder = files, folder
        self._seen: array[int] | None = None

    def stamp(self) -> Stamp:
        """How they look now, all of them as one; remembered.

        Raises:
            ManifestError: One is gone.
        """
        stamps = list(self._look(self._files))
        self._seen = array("q", map(hash, stamps))
        if self._folder is None and len(stamps) == 1:
            return stamps[0]
        size = sum(stamp.size or 0 for stamp in stamps)
        if any(stamp.version is None for stamp in stamps):
            return Stamp(size, None)
        named = zip(self._files, stamps, strict=True)
        lines = (f"{file.path}\0{stamp.size}\0{stamp.version}\0" for file, stamp in named)
        return Stamp(size, digest_of(line.encode("utf-8", "surrogateescape") for line in lines))

    def changed(self, part: slice = slice(None)) -> str | None:
        """The first of some of them that looks otherwise than it was remembered, if it was.

        Raises:
            ManifestError: One is gone.
        """
        if self._seen is None:
            return None
        files = self._files[part]
        for file, stamp, seen in zip(files, self._look(files), self._seen[part], strict=True):
            if hash(stamp) != seen:
                return file.name
        return None

    def _look(self, files: Sequence[DataFile]) -> Iterable[Stamp]:
        elsewhere = files[0].elsewhere if files else None
        if elsewhere is None or self._folder is None:
            yield from (file.stamp() for file in files)
            return
        found = elsewhere.find(self._folder)
        for file in files:
            if (info := found.get(file.path)) is None:
                raise gone(file.name)
            yield elsewhere.stamp(file.path, info)
