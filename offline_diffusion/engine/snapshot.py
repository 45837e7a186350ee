"""How far the requests of an engine have come, copied to the host while it goes on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from offline_diffusion.engine.model_runner import LatentsCopy, ModelRunner
from offline_diffusion.engine.request_state import RequestState
from offline_diffusion.request import Request, RequestMetrics, StepState


@dataclass(slots=True)
class Snapshot:
    """Every unfinished request that has done a step, as of one moment.

    Any thread may ask for ``states``; the engine may go on meanwhile.
    """

    _requests: list[tuple[Request, int, RequestMetrics]]
    _latents: LatentsCopy | None
    _waiting: dict[str, StepState]

    @classmethod
    def of(cls, states: Iterable[RequestState], runner: ModelRunner, now: float) -> Snapshot:
        """Begins to copy; ``now`` in seconds on the engine's clock.

        Those past their last step are left out: their images come anyhow.
        """
        begun = [own for own in states if 0 < own.step_index < own.request.num_inference_steps]
        prepared = [own.prepared for own in begun if own.prepared is not None]
        return cls(
            [
                (own.request, own.step_index, own.metrics_so_far(now))
                for own in begun
                if own.prepared is not None
            ],
            runner.copy_latents(prepared) if prepared else None,
            {own.request.request_id: own.resume for own in begun if own.resume is not None},
        )

    def states(self) -> dict[str, StepState]:
        """By request id; waits for the copy."""
        latents = [] if self._latents is None else self._latents.to_numpy()
        copied = {
            request.request_id: StepState(step_index, own, metrics)
            for (request, step_index, metrics), own in zip(self._requests, latents, strict=True)
        }
        return self._waiting | copied
