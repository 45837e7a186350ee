"""The latest preview of every unfinished image, as a small file to look at while the job runs."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

from offline_diffusion.data.partial import ImageKey
from offline_diffusion.progress import Say
from offline_diffusion.request import RequestOutput

MAX_QUEUED = 16
"""Previews that may wait to be written; those that come then are left out."""

QUALITY = 85
"""Of the JPEG files."""


class PreviewFolder:
    """Writes ``<row>-<image index>.jpg``, anew with each preview, until the image is finished.

    In a thread of its own, which begins with the first preview. Nothing waits for it and nothing fails with
    it: what it cannot keep up with or cannot write is left out.

    Args:
        folder: Made with the first preview.
        say: Told where they are, and once that one cannot be written.
    """

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder, self._say = folder, say
        self._tasks: SimpleQueue[tuple[ImageKey, RequestOutput | None] | None] = SimpleQueue()
        self._shown: set[ImageKey] = set()
        self._thread: threading.Thread | None = None
        self._has_complained = False

    def show(self, key: ImageKey, preview: RequestOutput) -> None:
        """Queues a preview of the image ``(row, image index)``."""
        if self._tasks.qsize() >= MAX_QUEUED:
            return
        if self._thread is None:
            self._say(f"previews of unfinished images: {self._folder}")
            self._thread = threading.Thread(target=self._work, name="previews", daemon=True)
            self._thread.start()
        self._shown.add(key)
        self._tasks.put((key, preview))

    def drop(self, key: ImageKey) -> None:
        """The image is finished."""
        if key in self._shown:
            self._shown.remove(key)
            self._tasks.put((key, None))

    def close(self) -> None:
        """Writes what is queued. Files of images that are unfinished stay."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._write(*task)
            except (OSError, ValueError) as error:  # Pillow's for what is too large for the format
                if not self._has_complained:
                    self._say(f"warning: a preview cannot be written: {error}")
                self._has_complained = True

    def _write(self, key: ImageKey, preview: RequestOutput | None) -> None:
        path = self._folder / "{:08d}-{}.jpg".format(*key)
        if preview is None:
            path.unlink(missing_ok=True)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        preview.image.save(beside, "JPEG", quality=QUALITY)
        beside.replace(path)
