"""The engine: takes requests, steps packs of them, hands out images."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.cost import CostMeter
from offline_diffusion.engine.faults import refusal, row_fault
from offline_diffusion.engine.memory import fit_token_budget, is_out_of_memory, measure_limits
from offline_diffusion.engine.model_runner import DecodedImage, ModelRunner
from offline_diffusion.engine.previews import Previews, preview_interval
from offline_diffusion.engine.request_state import RequestState, check_resume
from offline_diffusion.engine.request_table import RequestTable
from offline_diffusion.engine.scheduler import LOOK_AHEAD, Scheduler
from offline_diffusion.engine.snapshot import Snapshot
from offline_diffusion.engine.stats import EngineStats, StepTimer
from offline_diffusion.engine.token_budget import TokenBudget
from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.models.modes import execution_mode
from offline_diffusion.request import Request, RequestOutput, StepState

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_PREPARED = {"cuda": (64, 8), "cpu": (4, 1)}
"""Waiting requests whose prompts are encoded and noise is drawn while steps run, and how many of them a step,
so that the next step is never far away. On a GPU, where it happens beside the steps before, as many as may
join at once when a pack of equals ends; each takes less than a megabyte for 512 × 512 pixels."""

WAVE_POLL_S = 0.001
"""Pause of an iteration in which a wave waits for company."""

MAX_DECODING = 32
"""Images that may be in decode before the next step waits for one. They are decoded one after the other."""


class Engine:
    """Step-level continuous batching of unlike requests over one model.

    Belongs to one thread; `async_engine.AsyncEngine` lets others in. ``mode`` says what shares a step.

    Args:
        model: A loaded family.
        config: Scheduling options.
        clock: Seconds; replaced in tests.
    """

    def __init__(
        self, model: DiffusionModel, config: EngineConfig, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.model = model
        self.runner = ModelRunner(model, clock)
        self.stats = EngineStats()
        self.limits = measure_limits(model)
        self.mode = execution_mode(config, model.capabilities.batch_kind)
        self._same_shape = config.batching == "same_shape"
        budget = fit_token_budget(model, config.max_num_batched_tokens, self.limits)
        memory_tokens = None if self.limits is None else self.limits.max_tokens
        self.scheduler = Scheduler.of(config, budget, memory_tokens)
        self._budget = TokenBudget(self.scheduler)
        self._timer = StepTimer(model.device, self.stats, self.runner)
        self._table = RequestTable(self.runner, self.stats, clock)
        self._states = self._table.states
        self._previews = Previews(self.runner, preview_interval(config, model.capabilities))
        self.clock, self._generating = clock, False
        self.on_start: Callable[[str], None] = lambda _: None  # gets an id before its request uses the device

    # --- requests in -------------------------------------------------------------------------

    def add_request(
        self, request: Request, resume: StepState | None = None, *, arrival: float | None = None
    ) -> None:
        """Queues a request. A request the model cannot take comes back as a failed output.

        With ``resume``, from an earlier engine's `snapshot`, it goes on at its step, to the same pixels.
        ``arrival`` is when it was asked for, in seconds on ``clock``, if that is not now.

        Raises:
            ValueError: Another request with this id is at hand, or ``resume`` is not of such a request.
        """
        if request.request_id in self._states:
            raise ValueError(f"request id {request.request_id!r} is already at hand")
        if resume is not None:
            check_resume(request, resume, self.model)
        if (fault := refusal(request, self.model)) is not None:
            self._table.refuse(request, *fault)
            return
        try:
            arrival = self.clock() if arrival is None else arrival
            state = RequestState.of(request, self.model, self.limits, arrival, resume)
            entry = state.scheduled(self.model, same_shape=self._same_shape)
        except Exception as error:
            self._table.refuse(request, *row_fault(error, self.model.device))
            return
        self._states[request.request_id] = state
        self.runner.prompts.expect(state.branches)
        self.scheduler.add(entry)

    def abort(self, request_id: str) -> bool:
        """Drops a request between steps; its output has status ``aborted``.

        False when it is unknown, or past its last step: its image then comes all the same.
        """
        if not self.scheduler.remove(request_id):
            return False
        state = self._states[request_id]
        self.runner.prompts.forget_expected(state.branches)
        if state.started is not None:
            self.runner.drop_batch()
        self._table.finish(state, "aborted")
        return True

    def close_source(self) -> None:
        """No more requests will come: waves stop waiting for company."""
        self.scheduler.no_more_requests = True

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting, running, decoding or not yet handed out."""
        return bool(self._states or self._table.num_outputs)

    def reset_peak_memory(self) -> None:
        """Requests from now on tell the most memory since now; else since the limits were measured."""
        self.runner.reset_peak_memory()

    def costs(self) -> CostMeter:
        """What the steps so far took; waits for the device."""
        self._timer.settle_all()
        return self._timer.costs

    @torch.inference_mode()
    def snapshot(self) -> Snapshot:
        """How far every unfinished request has come; between steps, without waiting for the device."""
        self._timer.settle_finished()
        now = self.clock()
        return self._with_memory_back(lambda: Snapshot.of(self._states.values(), self.runner, now))

    # --- one iteration -----------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One denoise step for all running requests; returns the outputs that are ready."""
        self._reserve_decode_slot()
        decoding = filter(None, map(self._table.state_of, self.runner.decoding))
        self.scheduler.decoding_tokens = max((state.decode_tokens for state in decoding), default=0)
        plan = self.scheduler.schedule(self.clock())
        running = [state for entry in plan.running if (state := self._ready(entry.request_id))]
        if running and self._denoise(running):
            for entry in self.scheduler.advance():
                self._decode(self._states[entry.request_id])
        elif not plan.running and self.scheduler.waiting:
            time.sleep(WAVE_POLL_S)
        self._prepare_ahead()
        self._collect(wait=not self.scheduler.running and not self.scheduler.waiting)
        if not self._states:
            self._timer.pause()
        return self._table.take()

    def take_outputs(self) -> list[RequestOutput]:
        """Those that are ready and nobody has taken; also of an engine whose `step` has raised."""
        return self._table.take()

    def finish_decoding(self) -> list[RequestOutput]:
        """The outputs of requests past their last step; waits for the device and begins no step."""
        self._timer.settle_all()
        while self.runner.num_decoding:
            self._collect(wait=True)
        return self._table.take()

    def _ready(self, request_id: str) -> RequestState | None:
        """A running request with its prompts encoded; None when it failed on the way."""
        state = self._states[request_id]
        if not self._prepare(state):
            return None
        if state.started is None:
            state.started = self.clock()
            state.metrics.queue_s += state.started - state.arrival
        return state

    def _prepare(self, state: RequestState) -> bool:
        if state.prepared is not None:
            return True
        self.on_start(state.request.request_id)
        self._timer.resume()
        try:
            state.prepared = self._with_memory_back(
                lambda: self.runner.prepare(state.request, state.prompt, state.negative, state.resume)
            )
        except Exception as error:
            self._fail(state, *row_fault(error, self.model.device))
            return False
        state.resume = None
        state.metrics.encode_s += state.prepared.encode_s
        self._timer.lap()
        return True

    def _prepare_ahead(self) -> None:
        num_ahead, num_a_step = NUM_PREPARED[self.model.device.type]
        upcoming = [self._states[entry.request_id] for entry in self.scheduler.upcoming(num_ahead)]
        unprepared = [state for state in upcoming if state.prepared is None]
        for state in unprepared[:num_a_step]:
            self._prepare(state)

    def _denoise(self, running: Sequence[RequestState]) -> bool:
        """One step; False when it did not happen and the next iteration tries again."""
        prepared = [state.prepared for state in running if state.prepared is not None]
        start = self._timer.begin()
        self._previews.before_step(prepared)
        try:
            num_seqs = self._with_memory_back(lambda: self.runner.denoise(prepared))
        except Exception as error:
            if is_out_of_memory(error):
                self._on_out_of_memory(running, error)
            else:
                self._on_step_failure(running, error)
            return False
        self._timer.end(start, [state.share for state in running])
        self._previews.after_step()
        self._timer.lap()
        self._count_step(running, num_seqs)
        return True

    def _count_step(self, running: Sequence[RequestState], num_seqs: int) -> None:
        num_tokens = sum(state.num_tokens for state in running)
        self.stats.count_step(len(running), num_seqs, num_tokens, self.scheduler.max_num_batched_tokens)
        for state in running:
            state.metrics.steps_run += 1
            state.sum_batch_seqs += num_seqs
        self._budget.count_good_step()

    # --- faults ------------------------------------------------------------------------------

    def _with_memory_back(self, work: Callable[[], T]) -> T:
        """Runs ``work``; out of memory, once more with everything given back that can be spared."""
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._forget_pack(error)
        self.runner.prompts.clear()
        while self.runner.num_decoding:
            self._collect(wait=True)
        return work()

    def _on_out_of_memory(self, running: Sequence[RequestState], error: BaseException) -> None:
        """Shrinks the budget and tries again; a request that is alone fails with its numbers."""
        self._forget_pack(error)
        num_tokens = sum(state.num_tokens for state in running)
        if len(running) == 1:
            self._fail(running[0], "out_of_memory", f"{num_tokens} tokens in a step do not fit: {error}")
            return
        for state in running:
            state.metrics.attempts += 1
        self._budget.shrink(num_tokens)

    def _on_step_failure(self, running: Sequence[RequestState], error: Exception) -> None:
        """Finds whose fault it was by stepping each request alone; the others go on."""
        self._forget_pack(error)
        if len(running) == 1:
            self._fail(running[0], *row_fault(error, self.model.device))
            return
        for state in running:
            state.metrics.attempts += 1
        logger.warning("a step of %d requests failed, each now runs it alone: %s", len(running), error)
        for state in running:
            assert state.prepared is not None
            try:
                num_seqs = self.runner.denoise([state.prepared])
                self.runner.drop_batch()
            except Exception as own:
                self._forget_pack(own)
                self._fail(state, *row_fault(own, self.model.device))
                continue
            self._count_step([state], num_seqs)
        for entry in self.scheduler.advance():
            self._decode(self._states[entry.request_id])

    def _forget_pack(self, error: BaseException) -> None:
        error.__traceback__ = None  # its frames hold the failed step's tensors
        self.runner.drop_batch()

    def _fail(self, state: RequestState, error_type: str, error: str) -> None:
        self.scheduler.remove(state.request.request_id)
        self._table.finish(state, "failed", error_type, error)

    # --- images out --------------------------------------------------------------------------

    def _decode(self, state: RequestState) -> None:
        prepared = state.prepared
        assert prepared is not None
        state.end_denoising(self.clock())
        self.runner.drop_batch()
        try:
            self._with_memory_back(lambda: self.runner.decode(prepared))
        except Exception as error:
            self._table.finish(state, "failed", *row_fault(error, self.model.device))
        self._timer.lap()

    def _reserve_decode_slot(self) -> None:
        while self.runner.num_decoding >= MAX_DECODING:
            self._collect(wait=True)

    def _collect(self, *, wait: bool) -> None:
        for image in self.runner.collect(wait=wait):
            self._hand_out(image)

    def _hand_out(self, image: DecodedImage) -> None:
        if image.step_index is not None:
            self._table.show(image)
            return
        state = self._states[image.request.request_id]
        self._timer.settle_finished()
        state.metrics.decode_s = image.decode_s()
        if not bool(image.is_finite):
            self._table.finish(state, "failed", "nan", "the final latents hold NaN or infinity")
            return
        pixels = image.to_numpy()  # may fail: then there is no output
        self._table.finish(state, "ok").pixels = pixels

    # --- the whole way -----------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Draws ``requests``, pulled lazily so that any number fits in memory; outputs as they finish.

        A caller that stops early drops what is not finished.

        Raises:
            RuntimeError: An earlier ``generate`` of this engine is neither finished nor closed; its
                outputs would get mixed up with these.
        """
        if self._generating:
            raise RuntimeError("another generate() of this engine is open: exhaust it or close() it first")
        self._generating = True
        source = iter(requests)
        is_open = True
        self.scheduler.no_more_requests = False
        try:
            while is_open or self.has_unfinished:
                while is_open and self.num_waiting + self._table.num_outputs < LOOK_AHEAD:
                    request = next(source, None)
                    if request is None:
                        is_open = False
                        self.close_source()
                        break
                    self.add_request(request)
                yield from self.step()
        finally:
            self._generating = False
            self._drop_all()

    def _drop_all(self) -> None:
        """Also what an interrupted `step` has left in no queue."""
        self.runner.drop_batch()
        self.runner.drop_decoding()
        self.scheduler.waiting.clear()
        self.scheduler.running.clear()
        self.runner.prompts.forget_expected()
        self._table.clear()
