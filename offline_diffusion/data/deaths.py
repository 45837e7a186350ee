"""What workers had in flight when they died, so that an image that kills them is found and set aside.

While it lives, a worker appends to a log which images are at its engine: a write to an open file, which the
kernel keeps when the process is gone. A fatal signal leaves its traceback in a file beside the log. When
the worker's claim is taken over, whoever does so turns both into a record of the death. An image that was in
flight at one crash is drawn alone from then on, so the next crash is nobody's but its own.

A SIGKILL leaves no traceback: it may be a preemption as well as a want of memory, so it counts for little.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline_diffusion.data.files import create_file, read_json, to_json
from offline_diffusion.data.layout import DEATHS, FLIGHTS, SCRATCH
from offline_diffusion.data.partial import ImageKey
from offline_diffusion.errors import JobError

MAX_CRASHES = 2
"""Crashes with an image in flight after which it is not drawn again; in the second it was alone."""

MAX_KILLS = 10
"""Deaths without a known cause with the same image alone in flight after which it is not drawn again."""

KILLS_TO_ISOLATE = 3
"""Deaths without a known cause after which an image is drawn alone: nobody is that unlucky often."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """How often workers died with an image in flight.

    Args:
        num_crashes: Of a fatal signal that left its traceback.
        num_kills: Of an unknown cause, in any company.
        num_lone_kills: Likewise with no other image in flight.
        cause: First line that the latest crash left.
    """

    num_crashes: int = 0
    num_kills: int = 0
    num_lone_kills: int = 0
    cause: str = ""

    @property
    def num_deaths(self) -> int:
        return self.num_crashes + self.num_kills

    @property
    def isolate(self) -> bool:
        """Whether the image is to be drawn alone."""
        return self.num_crashes > 0 or self.num_kills >= KILLS_TO_ISOLATE

    @property
    def verdict(self) -> str | None:
        """Why the image is not to be drawn again, None where it may be."""
        if self.num_crashes >= MAX_CRASHES:
            return f"the process crashed {self.num_crashes} times while it drew this image: {self.cause}"
        if self.num_lone_kills >= MAX_KILLS:
            return f"the process was killed {self.num_lone_kills} times while it drew nothing but this image"
        return None


class FlightLog:
    """Tells whoever comes after a crash which images were in flight. Not thread-safe.

    Args:
        out: The output folder.
        worker: Whose; unique.
    """

    def __init__(self, out: Path, worker: str) -> None:
        folder = out / FLIGHTS
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self.crash_file = _paths(out, worker)
        self._fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def begin(self, image: ImageKey) -> None:
        """Before the engine gets an image."""
        self._write("+", image)

    def end(self, image: ImageKey) -> None:
        """Once the engine has handed it out."""
        self._write("-", image)

    @contextmanager
    def during(self, image: ImageKey) -> Iterator[None]:
        """Inside, an image is in flight."""
        self.begin(image)
        yield
        self.end(image)

    def _write(self, what: str, image: ImageKey) -> None:
        with contextlib.suppress(OSError):  # a full disk: the job itself will tell
            os.write(self._fd, f"{what}{image[0]}:{image[1]}\n".encode())

    @contextmanager
    def catching_crashes(self) -> Iterator[None]:
        """Inside, a fatal signal leaves its traceback. Only for a process that has no other use for them."""
        with open(self.crash_file, "w", encoding="utf-8") as file:
            faulthandler.enable(file)
            try:
                yield
            finally:
                faulthandler.disable()

    def close(self) -> None:
        """The worker ends alive: there is nothing to tell."""
        os.close(self._fd)
        self._log.unlink(missing_ok=True)
        self.crash_file.unlink(missing_ok=True)


def record_death(out: Path, worker: str) -> bool:
    """Keeps what a dead worker's log tells; of several callers one does.

    Args:
        out: The output folder.
        worker: Who is dead for certain, or has been silent for so long that its work is taken over.

    Returns:
        Whether there was something to tell.
    """
    log, crash_file = _paths(out, worker)
    in_flight = _in_flight(log)
    if in_flight:
        (out / DEATHS).mkdir(exist_ok=True)
        crash = _first_line(crash_file)
        content = {"worker": worker, "crash": crash, "in_flight": [list(image) for image in in_flight]}
        create_file(out / DEATHS / f"{_slug(worker)}.json", to_json(content), out / SCRATCH)
    log.unlink(missing_ok=True)
    crash_file.unlink(missing_ok=True)
    return bool(in_flight)


def suspicions_of(out: Path, rows: range) -> dict[ImageKey, Suspicion]:
    """The images of ``rows`` that were in flight when a worker died."""
    crashes: Counter[ImageKey] = Counter()
    kills: Counter[ImageKey] = Counter()
    lone_kills: Counter[ImageKey] = Counter()
    causes: dict[ImageKey, str] = {}
    for _, crash, in_flight in _deaths(out):
        for image in in_flight:
            if image[0] not in rows:
                continue
            if crash:
                crashes[image] += 1
                causes[image] = crash
            else:
                kills[image] += 1
                lone_kills[image] += len(in_flight) == 1
    return {
        image: Suspicion(crashes[image], kills[image], lone_kills[image], causes.get(image, ""))
        for image in sorted(crashes.keys() | kills.keys())
    }


def forget_deaths(out: Path, published: Collection[int], shard_size: int) -> None:
    """Drops the records that speak of nothing but rows of published shards, which are given by index."""
    for path, _, in_flight in list(_deaths(out)):
        if all(row // shard_size in published for row, _ in in_flight):
            path.unlink(missing_ok=True)


def _deaths(out: Path) -> Iterator[tuple[Path, str, list[ImageKey]]]:
    """Of each death its file, the crash if it was one, and what was in flight; damaged files are left out."""
    for path in sorted((out / DEATHS).glob("*.json")):
        try:
            values: dict[str, Any] = read_json(path)
            yield path, str(values["crash"]), [(int(row), int(index)) for row, index in values["in_flight"]]
        except (OSError, KeyError, TypeError, ValueError, JobError):
            continue


def _in_flight(log: Path) -> list[ImageKey]:
    """What a log leaves open, in order; a torn last line is left out."""
    try:
        lines = log.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    open_images: dict[ImageKey, None] = {}
    for what, image in _entries(lines):
        if what == "+":
            open_images[image] = None
        else:
            open_images.pop(image, None)
    return list(open_images)


def _entries(lines: Iterable[bytes]) -> Iterator[tuple[str, ImageKey]]:
    for line in lines:
        if match := re.fullmatch(rb"([+-])(\d+):(\d+)", line):
            yield match[1].decode(), (int(match[2]), int(match[3]))


def _first_line(crash_file: Path) -> str:
    try:
        text = crash_file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return next((line for line in text.splitlines() if line.strip()), "")[:200]


def _paths(out: Path, worker: str) -> tuple[Path, Path]:
    folder = out / FLIGHTS
    return folder / f"{_slug(worker)}.log", folder / f"{_slug(worker)}.crash"


def _slug(worker: str) -> str:
    return re.sub(r"[^\w.-]", "_", worker)
