"""Previews of unfinished images: what the model expects of them by now, decoded beside the steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from torch import Tensor

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.faults import row_fault
from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.engine.packed_batch import PreparedRequest
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.modes import preview_fault

logger = logging.getLogger(__name__)

MAX_DECODING_BESIDE = 16
"""Images in decode with which no further preview begins. Half of those for which a step waits (see `engine`):
no step waits for a preview, and none takes a finished image's place."""


def preview_interval(config: EngineConfig, capabilities: Capabilities) -> int | None:
    """In steps; None where there are no previews, which a warning tells if they are wanted."""
    if not config.diffusion_streaming_output:
        return None
    if (fault := preview_fault(capabilities.batch_kind)) is None:
        return config.preview_interval
    logger.warning("model family %r has no previews: %s", capabilities.family, fault)
    return None


class Previews:
    """Starts a preview of every request after each ``interval`` of its steps, but for the last.

    Where the decoder does not keep up, some come later or not at all: whoever was not shown for the longest
    goes first. The pack is only read. A preview that fails is left out: its request goes on.

    Args:
        runner: Has the latents and decodes them.
        interval: In steps of a request; None is no previews.
    """

    def __init__(self, runner: ModelRunner, interval: int | None) -> None:
        self._runner, self._interval = runner, interval
        self._due: list[tuple[PreparedRequest, Tensor]] = []  # with the latents before the step
        self._has_warned = False

    def before_step(self, running: Sequence[PreparedRequest]) -> None:
        """Keeps the latents of those that get a preview after this step."""
        self._due = []
        room = max(0, MAX_DECODING_BESIDE - self._runner.num_decoding)
        longest_first = sorted(filter(self._is_due, running), key=lambda own: own.shown_step - own.step_index)
        if due := longest_first[:room]:
            for own in due:
                own.shown_step = own.step_index + 1
            with self._sparing_the_request():
                self._due = list(zip(due, self._runner.latents_now(due), strict=True))

    def after_step(self) -> None:
        """Starts their decode; the step has been launched."""
        due, self._due = self._due, []
        latents: list[Tensor] = []
        if due:
            with self._sparing_the_request():
                latents = self._runner.latents_now([prepared for prepared, _ in due])
        for (prepared, before), after in zip(due, latents, strict=False):
            with self._sparing_the_request():
                self._runner.preview(prepared, clean_estimate(prepared, before, after))

    def _is_due(self, prepared: PreparedRequest) -> bool:
        if self._interval is None:
            return False
        num_steps = prepared.step_index + 1
        has_come = num_steps // self._interval > prepared.shown_step // self._interval
        return has_come and num_steps < prepared.request.num_inference_steps

    @contextlib.contextmanager
    def _sparing_the_request(self) -> Iterator[None]:
        """Leaves a preview out that fails.

        Raises:
            torch.AcceleratorError: The device is lost.
        """
        try:
            yield
        except Exception as error:
            error_type, message = row_fault(error, self._runner.model.device)
            if not self._has_warned:
                logger.warning("a preview is left out: %s: %s", error_type, message)
            self._has_warned = True


def clean_estimate(prepared: PreparedRequest, before: Tensor, after: Tensor) -> Tensor:
    """Where the last step was heading: its straight line, drawn on until no noise is left.

    For an Euler step that is the model's own estimate of the image, with guidance: ``x₀ = x − σ·v`` and
    ``x' = x + (σ' − σ)·v`` give ``x₀ = x' + (x' − x)·σ' / (σ − σ')``.

    Args:
        prepared: After the step.
        before, after: Its latents around the step, ``[S, C]``.
    """
    last, now = map(float, prepared.sigmas[prepared.step_index - 1 : prepared.step_index + 1])
    return after + (after - before) * (now / (last - now))
