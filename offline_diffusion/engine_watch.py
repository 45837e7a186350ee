"""What breaks the engine counts as a crash of the process, so that no row can break it again and again.

The engine hands out every fault of a row as a failed output. So what escapes from its own work has broken
the engine itself: an illegal access on a GPU, which takes the device away from the whole process, or a fault
of this program that some images bring out. Which of those in flight it was is not known: that is left to the
rules of `data.deaths`. What comes from elsewhere, a thread that writes or the manifest's reader, says nothing
of the images in flight and stays what it is; only a lost device is told to whoever asks it next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from offline_diffusion.data.deaths import FlightLog
from offline_diffusion.errors import CrashError, OffdiffError
from offline_diffusion.progress import plural
from offline_diffusion.pulse import Pulse

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineWatch:
    """Watches the engine of one worker.

    Args:
        flights: Knows what is in flight, and keeps the record.
        pulse: Is told when the engine is at work.
    """

    def __init__(self, flights: FlightLog, pulse: Pulse) -> None:
        self._flights, self._pulse = flights, pulse

    def call(self, work: Callable[[], T]) -> T:
        """Does the engine's own work.

        Raises:
            CrashError: It went wrong, and not by an error that a user is told anyway.
        """
        with self._pulse.at_work():
            try:
                return work()
            except (OffdiffError, OSError):
                raise
            except Exception as error:
                raise self._crash(error) from error

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, a lost device is a `CrashError`, whoever meets it first."""
        try:
            yield
        except (OffdiffError, OSError):
            raise
        except Exception as error:
            from offline_diffusion.engine.faults import is_device_error

            if is_device_error(error):
                raise self._crash(error) from error
            raise

    def _crash(self, error: Exception) -> CrashError:
        logger.error("the engine is broken", exc_info=error)
        first_line = next(iter(str(error).splitlines()), "")
        cause = f"{type(error).__name__}: {first_line}"
        count = self._flights.num_in_flight
        is_recorded = self._flights.record_crash(cause)
        return CrashError(
            f"the engine broke with {plural(count, 'image')} in flight: {cause}",
            hint="what is finished is kept, and the same command goes on"
            + (
                ": it draws these images one at a time, and sets one aside as a failure that does it twice"
                if is_recorded
                else ""
            ),
        )
