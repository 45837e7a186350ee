"""What the driver of `ray` needs of the library: the outcomes of tasks, and the board."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offline_diffusion.errors import JobInterrupted
from offline_diffusion.launch.outcome import WorkerError, error_from
from offline_diffusion.launch.ray_task import POLL_S, PREPARATION, Life, Place
from offline_diffusion.progress import Observer, Progress, Say, StopFlag


@dataclass(kw_only=True)
class Cluster:
    """What the driver needs of Ray: what became of tasks, and the board.

    Args:
        ray: The library.
        read_board: `Board.read` on the actor.
        observer, say, stop: As of `job.run_task`, for all workers together.
    """

    ray: Any
    read_board: Callable[[list[str], float | None], Any]
    observer: Observer
    say: Say
    stop: StopFlag

    def talk(self, seconds_left: float | None) -> tuple[dict[Life, Place], dict[Life, dict[str, Any]]] | None:
        """Tells workers of stops by way of the board, and the user what they say.

        Returns:
            Where lives have begun and their progress; None while the board is lost.
        """
        try:
            stops = [self.stop.why] * self.stop.requests
            places, progress, lines = self.read_board(stops, seconds_left)
        except self.ray.exceptions.RayError:  # it is being started again
            return None
        for line in lines:
            self.say(line)
        return places, progress

    def outcome_of(self, reference: Any) -> dict[str, Any]:
        """What a task that has ended returned; empty when it was cancelled, an error when it has a fault.

        Raises:
            RayError: Its process or node was lost.
        """
        errors = self.ray.exceptions
        try:
            outcome: dict[str, Any] = self.ray.get(reference)
        except errors.TaskCancelledError:
            return {}
        except errors.RayTaskError as error:  # a fault of the program
            return {"error": WorkerError(kind="", exit_code=1, message=line_of(error, -1), hint=None)}
        return outcome

    def prepare(self, reference: Any) -> dict[str, Any]:
        """Waits for the task that prepares the job; returns what it found.

        Raises:
            JobInterrupted: Asked to stop first.
            OffdiffError: As of `job.prepare_job`.
        """
        done: list[Any] = []
        is_cancelled = False
        while not done:
            done, _ = self.ray.wait([reference], timeout=POLL_S)
            if (news := self.talk(None)) is None:
                continue
            places, progress = news
            if PREPARATION in progress:
                self.observer(Progress(**progress[PREPARATION]))
            if self.stop.requests and PREPARATION not in places and not is_cancelled:
                is_cancelled = True
                self.ray.cancel(reference)
        try:
            found = self.outcome_of(reference)
        except self.ray.exceptions.RayError as error:
            raise JobInterrupted(
                f"the task that prepares the job was lost: {line_of(error, 0)}",
                hint="the same command starts again",
            ) from None
        if "error" in found:
            raise error_from(found["error"])
        if not found:
            raise JobInterrupted(
                f"{self.stop.why}: stopped before the job began", hint="the same command starts again"
            )
        return found


def line_of(error: Exception, number: int) -> str:
    """One line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[number]
