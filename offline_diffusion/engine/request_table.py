"""The requests at hand, and the outputs that nobody has taken yet."""

from __future__ import annotations

from collections.abc import Callable

from offline_diffusion.engine.model_runner import DecodedImage, ModelRunner
from offline_diffusion.engine.request_state import RequestState
from offline_diffusion.engine.stats import EngineStats
from offline_diffusion.request import FinishReason, Request, RequestMetrics, RequestOutput


class RequestTable:
    """What lies between ``add_request`` and the caller's hands.

    Args:
        runner: Tells the peak of memory.
        stats: Counts what is finished.
        clock: Seconds.
    """

    def __init__(self, runner: ModelRunner, stats: EngineStats, clock: Callable[[], float]) -> None:
        self.states: dict[str, RequestState] = {}
        self._outputs: list[RequestOutput] = []
        self._runner, self._stats, self._clock = runner, stats, clock

    @property
    def num_outputs(self) -> int:
        """Outputs that nobody has taken."""
        return len(self._outputs)

    def state_of(self, request: Request) -> RequestState | None:
        """None when it is not at hand any more, also where another one has its id by now."""
        state = self.states.get(request.request_id)
        return state if state is not None and state.request is request else None

    def refuse(self, request: Request, error_type: str, error: str) -> None:
        """An output for a request that the model cannot take."""
        self._stats.num_failed += 1
        self._outputs.append(RequestOutput(request, "failed", None, RequestMetrics(), error_type, error))

    def show(self, image: DecodedImage) -> None:
        """An output for a preview, if its request is still unfinished and the picture is one."""
        state = self.state_of(image.request)
        if state is None or not bool(image.is_finite):
            return
        output = RequestOutput(image.request, "running", image.to_numpy())
        output.metrics = state.metrics_so_far(self._clock())
        output.step_index = image.step_index or 0
        self._outputs.append(output)

    def finish(
        self,
        state: RequestState,
        status: FinishReason,
        error_type: str | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        """Takes a request out; its output, to which an image may be added."""
        metrics = state.metrics
        metrics.total_s += self._clock() - state.arrival
        metrics.peak_memory_bytes = max(metrics.peak_memory_bytes, self._runner.peak_memory_bytes())
        if metrics.steps_run:
            metrics.mean_batch_seqs = state.sum_batch_seqs / metrics.steps_run
        self._stats.num_finished += status == "ok"
        self._stats.num_failed += status == "failed"
        del self.states[state.request.request_id]
        output = RequestOutput(state.request, status, None, metrics, error_type, error)
        output.step_index = state.step_index
        self._outputs.append(output)
        return output

    def take(self) -> list[RequestOutput]:
        """The outputs that nobody has taken, in the order in which they came."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def clear(self) -> None:
        """Forgets everything."""
        self.states.clear()
        self._outputs.clear()
