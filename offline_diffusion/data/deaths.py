"""What workers had in flight when they died, so that an image that kills them is found and set aside.

While it lives, a worker appends to a log which images are at its engine: a write to an open file, which the
kernel keeps when the process is gone. A fatal signal leaves its traceback in a file beside the log; what
breaks the engine and is no signal is recorded at once (`engine_watch`), to the same effect. When
the worker's claim is taken over, whoever does so turns both into a record of the death. An image that was in
flight at one crash is drawn alone from then on, so the next crash is nobody's but its own.

A SIGKILL leaves no traceback: it may be a preemption as well as a want of memory, so it counts for little,
and for nothing once the image has come a step further. Who knows that it was a want of memory says so in the
record: then it is a crash.

All of this is a hint, not the books: where it cannot be written, nobody is told and the job goes on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offline_diffusion.data.files import create_file, read_json, replace_file, to_json
from offline_diffusion.data.heartbeat import read_heartbeats
from offline_diffusion.data.layout import DEATHS, FLIGHTS, SCRATCH
from offline_diffusion.data.partial import ImageKey
from offline_diffusion.data.process import is_known_dead
from offline_diffusion.errors import JobError

MAX_CRASHES = 2
"""Crashes with an image in flight after which it is not drawn again; in the second it was alone."""

MAX_KILLS = 10
"""Deaths without a known cause with the same image alone in flight, and no step gained between them, after
which it is not drawn again."""

KILLS_TO_ISOLATE = 3
"""Such deaths in any company after which an image is drawn alone: nobody is that unlucky often."""

MAX_LOG_BYTES = 2**20
"""A log that is longer is begun anew: it must not grow with the images that a worker draws in a long life."""

DRAWN = "-"
"""Begins the line of a flight log that tells of an image drawn, or failed."""

_ENTRY = re.compile(rb"([+~-])(\d+):(\d+)(?: ([0-9a-f]*) (\d+) (\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """An image at work.

    Args:
        row, image_index: Which.
        row_hash: Of its row: the folder may be given to another manifest, where the number is another row's.
        number: Of the publication of its shard that is being made.
        step: Steps that earlier workers had done when this one began with it.
    """

    row: int
    image_index: int
    row_hash: str
    number: int
    step: int = 0

    @property
    def key(self) -> ImageKey:
        return self.row, self.image_index


@dataclass(frozen=True, slots=True)
class Suspicion:
    """How often workers died with an image in flight.

    Args:
        num_crashes: Of a fatal signal that left its traceback, of a broken engine, or of a want of memory.
        num_kills: Of an unknown cause, in any company, since the image last gained a step.
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
        self._out, self._worker = out, worker
        self._log, self.crash_file = _paths(out, worker)
        self._fd: int | None = None  # None where the log cannot be made: then it says nothing
        self._num_bytes = 0
        self._drawn = ""  # the last line that tells of an image drawn
        self._in_flight: dict[ImageKey, str] = {}
        with contextlib.suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def begin(self, flight: Flight) -> None:
        """Before the engine gets an image."""
        image = f"{flight.row}:{flight.image_index}"
        line = self._in_flight[flight.key] = f"+{image} {flight.row_hash} {flight.number} {flight.step}\n"
        self._write(line)

    def end(self, image: ImageKey, *, is_drawn: bool = True) -> None:
        """Once the engine has handed it out, or given it back: then it is not drawn."""
        self._in_flight.pop(image, None)
        line = f"{DRAWN if is_drawn else '~'}{image[0]}:{image[1]}\n"
        self._drawn = line if is_drawn else self._drawn
        self._write(line)
        if self._num_bytes > MAX_LOG_BYTES:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Leaves only what is in flight, and one image that was drawn: `launch.outcome` looks for it."""
        assert self._fd is not None
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        self._num_bytes = 0
        self._write("".join([self._drawn, *self._in_flight.values()]))

    @contextmanager
    def during(self, flight: Flight) -> Iterator[None]:
        """Inside, an image is in flight."""
        self.begin(flight)
        yield
        self.end(flight.key, is_drawn=False)

    def _write(self, lines: str) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._num_bytes += os.write(self._fd, lines.encode())

    @contextmanager
    def catching_crashes(self) -> Iterator[None]:
        """Inside, a fatal signal leaves its traceback. Only for a process that has no other use for them."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                faulthandler.enable(stack.enter_context(open(self.crash_file, "w", encoding="utf-8")))
                stack.callback(faulthandler.disable)
            yield

    def record_crash(self, cause: str) -> bool:
        """The worker ends alive, but for what it had in flight: that counts as a crash of the process.

        Args:
            cause: What a fatal signal's traceback would begin with.

        Returns:
            As `record_death`.
        """
        with contextlib.suppress(OSError):
            self.crash_file.write_text(cause, encoding="utf-8")
        return record_death(self._out, self._worker)

    def close(self) -> None:
        """The worker ends alive: there is nothing to tell, or it is told."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        with contextlib.suppress(OSError):
            self._log.unlink(missing_ok=True)
            self.crash_file.unlink(missing_ok=True)


def record_death(out: Path, worker: str) -> bool:
    """Keeps what a dead worker's log tells; of several callers one does.

    Args:
        out: The output folder.
        worker: Who is dead for certain, or has been silent for so long that its work is taken over.

    Returns:
        Whether there was something to tell, and it is kept.
    """
    log, crash_file = _paths(out, worker)
    try:
        lines = _lines(log)
        in_flight = _in_flight(lines)
        if in_flight:
            (out / DEATHS).mkdir(exist_ok=True)
            content = {
                "worker": worker,
                "crash": _first_line(crash_file),
                "in_flight": [asdict(flight) for flight in in_flight],
                "has_drawn": tells_of_drawn(lines),
            }
            create_file(out / DEATHS / f"{_slug(worker)}.json", to_json(content), out / SCRATCH)
        log.unlink(missing_ok=True)
        crash_file.unlink(missing_ok=True)
    except OSError:  # the log stays for the next who comes by
        return False
    return bool(in_flight)


def give_cause(out: Path, record: Path, cause: str) -> None:
    """Makes the record of a death without a known cause one of a crash; any other one stays as it is."""
    with contextlib.suppress(OSError, KeyError, JobError):
        values = read_json(record)
        if not values["crash"]:
            replace_file(record, to_json(values | {"crash": cause}), out / SCRATCH)


def sweep_flights(out: Path) -> None:
    """Records the deaths of workers that held no shard, and drops the logs of those that ended.

    Whether a worker elsewhere was killed is not known here: its log stays until a shard of it is taken over.
    """
    logs = {path.stem for path in (out / FLIGHTS).glob("*.log")}  # first: a log is younger than its heartbeat
    for beat in read_heartbeats(out) if logs else []:
        if _slug(beat.worker) not in logs:
            continue
        if beat.state == "running" and is_known_dead(beat.process):
            record_death(out, beat.worker)
        elif beat.state != "running":
            with contextlib.suppress(OSError):
                for path in _paths(out, beat.worker):
                    path.unlink(missing_ok=True)


def suspicions_of(
    out: Path, row_hashes: Mapping[int, str], *, number: int, steps: Mapping[ImageKey, int] | None = None
) -> dict[ImageKey, Suspicion]:
    """The images that were in flight when a worker died.

    Args:
        out: The output folder.
        row_hashes: The rows that count, by number; a record that speaks of other content is another row's.
        number: Of the publication that is to be made; failures of an earlier one are being retried.
        steps: How far images have come that are begun.
    """
    deaths = [
        (flight, crash, len(flights) == 1)
        for _, crash, flights in _deaths(out)
        for flight in flights
        if row_hashes.get(flight.row) == flight.row_hash and flight.number == number
    ]
    furthest = dict(steps or {})
    for flight, crash, _ in deaths:
        if not crash:
            furthest[flight.key] = max(flight.step, furthest.get(flight.key, 0))
    crashes: Counter[ImageKey] = Counter()
    kills: Counter[ImageKey] = Counter()
    lone_kills: Counter[ImageKey] = Counter()
    causes: dict[ImageKey, str] = {}
    for flight, crash, is_alone in deaths:
        if crash:
            crashes[flight.key] += 1
            causes[flight.key] = crash
        elif flight.step == furthest[flight.key]:
            kills[flight.key] += 1
            lone_kills[flight.key] += is_alone
    return {
        image: Suspicion(crashes[image], kills[image], lone_kills[image], causes.get(image, ""))
        for image in sorted(crashes.keys() | kills.keys())
    }


def forget_deaths(out: Path, published: Mapping[int, int], shard_size: int) -> None:
    """Drops the records that speak of nothing but what is published.

    Args:
        out: The output folder.
        published: The number of each shard's newest publication, by the shard's index.
        shard_size: Rows of a shard.
    """
    for path, _, flights in list(_deaths(out)):
        if all(published.get(flight.row // shard_size, -1) >= flight.number for flight in flights):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _deaths(out: Path) -> Iterator[tuple[Path, str, list[Flight]]]:
    """Of each death its file, the crash if it was one, and what was in flight; damaged files are left out."""
    for path in sorted((out / DEATHS).glob("*.json")):
        try:
            values: dict[str, Any] = read_json(path)
            yield path, str(values["crash"]), [Flight(**flight) for flight in values["in_flight"]]
        except (OSError, KeyError, TypeError, ValueError, JobError):
            continue


def tells_of_drawn(lines: Iterable[bytes]) -> bool:
    """Whether a flight log tells of an image drawn, or failed."""
    return any(line.startswith(DRAWN.encode()) for line in lines)


def _lines(log: Path) -> list[bytes]:
    """The lines of a flight log, none where there is no log; a torn last one is left out."""
    try:
        return log.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def _in_flight(lines: Iterable[bytes]) -> list[Flight]:
    """What a log leaves open, in order."""
    open_images: dict[ImageKey, Flight] = {}
    for match in filter(None, map(_ENTRY.fullmatch, lines)):
        row, image_index = int(match[2]), int(match[3])
        if match[1] != b"+":
            open_images.pop((row, image_index), None)
        elif match[4] is not None:
            open_images[row, image_index] = Flight(
                row=row,
                image_index=image_index,
                row_hash=match[4].decode(),
                number=int(match[5]),
                step=int(match[6]),
            )
    return list(open_images.values())


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
