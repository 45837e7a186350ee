"""An engine that only counts time: the real scheduler, and a cost model in the place of a device.

Free of torch. Between two events nothing changes, so steps that are alike are taken at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from offline_diffusion.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineConfig
from offline_diffusion.data.work import estimate_text_tokens
from offline_diffusion.engine.cost import CostModel
from offline_diffusion.engine.scheduler import ScheduledRequest, Scheduler
from offline_diffusion.models.capabilities import BatchKind, Capabilities
from offline_diffusion.models.modes import ExecutionMode, execution_mode, same_shape_key
from offline_diffusion.request import Request, RequestMetrics, RequestOutput

POLL_S = 0.001
"""How long the engine sleeps when a wave waits for company."""

PROMPT_CACHE_TOKENS = 65_536
"""Of encoded prompts that are kept, as in the engine."""


class SimulatedClock:
    """Goes as far as it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.next_event = math.inf

    def __call__(self) -> float:
        return self.now

    def wait_until(self, then: float) -> None:
        """It is ``then``."""
        self.now = max(self.now, then)


@dataclass(slots=True)
class SimulatedStats:
    """As of the engine."""

    num_steps: int = 0
    num_step_images: int = 0
    num_step_tokens: int = 0
    budget_tokens: int = 0
    device_s: float = 0.0


@dataclass(slots=True)
class _Image:
    """An image that waits or runs.

    Args:
        prompts: Text and tokens of each of its sequences.
        sum_squares: Squared lengths of these.
        num_pixels: That are decoded.
        started: When its first step began.
    """

    request: Request
    entry: ScheduledRequest
    prompts: list[tuple[str, int]]
    sum_squares: int
    num_pixels: int
    started: float | None = None
    encode_s: float = 0.0


class SimulatedEngine:
    """Has what `replay.Replay` asks of an engine.

    Time passes for steps, for the prompts of images that join one, and for decodes before their images are
    handed out: on a GPU these run beside steps and slow them by about as much.

    Args:
        capabilities: Of the model.
        config: Scheduling options.
        cost: What things take.
        clock: Goes on by that.
        max_num_batched_tokens: The token budget, where the options say nothing.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        config: EngineConfig,
        cost: CostModel,
        clock: SimulatedClock,
        max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    ) -> None:
        self.stats = SimulatedStats()
        self.scheduler = Scheduler.of(config, config.max_num_batched_tokens or max_num_batched_tokens)
        mode = execution_mode(config, capabilities.batch_kind)
        self._only_alike = mode is ExecutionMode.SAME_SHAPE or capabilities.batch_kind is BatchKind.STACKED
        self._capabilities, self._cost, self._clock = capabilities, cost, clock
        self._images: dict[str, _Image] = {}
        self._encoded: OrderedDict[str, int] = OrderedDict()  # text → tokens, the last used at the end
        self._num_encoded_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether any image waits or runs."""
        return bool(self._images)

    def reset_peak_memory(self) -> None:
        """It has no memory."""

    def add_request(self, request: Request, *, arrival: float) -> None:
        """Queues an image that was asked for at ``arrival``; text tokens are guessed from its bytes."""
        texts = [request.prompt] + ([request.negative_prompt or ""] if request.cfg_active else [])
        limit = self._capabilities.max_prompt_tokens
        prompts = [(text, min(estimate_text_tokens(text), limit)) for text in texts]
        num_image_tokens = self._capabilities.num_image_tokens(request.height, request.width)
        lengths = [num_image_tokens + num_tokens for _, num_tokens in prompts]
        alike = same_shape_key(request, self._capabilities.guidance)
        entry = ScheduledRequest(
            request_id=request.request_id,
            num_tokens=sum(lengths),
            num_steps=request.num_inference_steps,
            num_text_tokens=sum(num_tokens for _, num_tokens in prompts),
            batch_key=alike if self._only_alike else None,
            wave_key=(alike, request.num_inference_steps),
            arrival=arrival,
            deadline=math.inf if request.slo_ms is None else arrival + request.slo_ms / 1000,
        )
        squares = sum(length * length for length in lengths)
        pixels = request.height * request.width
        self._images[request.request_id] = _Image(request, entry, prompts, squares, pixels)
        self.scheduler.add(entry)

    def step(self) -> list[RequestOutput]:
        """One step, or several that differ in nothing; the images that are done after it."""
        plan = self.scheduler.schedule(self._clock.now)
        if not plan.running:
            self._clock.now = min(self._clock.now + POLL_S, max(self._clock.now, self._clock.next_event))
            return []
        running = [self._images[entry.request_id] for entry in plan.running]
        for entry in plan.admitted:
            self._start(self._images[entry.request_id])
        self._run(running, may_repeat=not plan.admitted or not self.scheduler.waiting)
        finished = [self._images.pop(entry.request_id) for entry in self.scheduler.advance()]
        decode_s = sum(self._cost.image_s + self._cost.pixel_s * image.num_pixels for image in finished)
        self._clock.now += decode_s
        return [self._output(image, decode_s) for image in finished]

    def _start(self, image: _Image) -> None:
        image.started = self._clock.now
        image.encode_s = self._cost.prompt_s * self._encode(image.prompts)
        self._clock.now += image.encode_s

    def _encode(self, prompts: list[tuple[str, int]]) -> int:
        """How many were not encoded yet; the longest unused are forgotten."""
        num_new = 0
        for text, num_tokens in prompts:
            if text not in self._encoded:
                num_new += 1
                self._num_encoded_tokens += num_tokens
            self._encoded[text] = num_tokens
            self._encoded.move_to_end(text)
        while self._num_encoded_tokens > PROMPT_CACHE_TOKENS and len(self._encoded) > 1:
            self._num_encoded_tokens -= self._encoded.popitem(last=False)[1]
        return num_new

    def _run(self, running: list[_Image], *, may_repeat: bool) -> None:
        """Runs the step, all but its last `Scheduler.advance`.

        With ``may_repeat`` as often as nobody can join or leave: until the first is done or the next event.
        """
        num_tokens = sum(image.entry.num_tokens for image in running)
        sum_squares = sum(image.sum_squares for image in running)
        step_s = self._cost.seconds(num_steps=1, num_tokens=num_tokens, sum_squares=sum_squares)
        count = min(image.entry.num_steps for image in running) if may_repeat else 1
        until_event = self._clock.next_event - self._clock.now
        if count > 1 and until_event < count * step_s:
            count = max(1, min(count, math.ceil(until_event / step_s)))
        for image in running:
            image.entry.num_steps -= count - 1
        self._clock.now += count * step_s
        stats = self.stats
        stats.num_steps += count
        stats.num_step_images += count * len(running)
        stats.num_step_tokens += count * num_tokens
        stats.budget_tokens += count * self.scheduler.max_num_batched_tokens
        stats.device_s += count * step_s

    def _output(self, image: _Image, decode_s: float) -> RequestOutput:
        assert image.started is not None
        now = self._clock.now
        metrics = RequestMetrics(
            cfg_active=image.request.cfg_active,
            num_tokens=image.entry.num_tokens,
            steps_run=image.request.num_inference_steps,
            queue_s=image.started - image.entry.arrival,
            encode_s=image.encode_s,
            denoise_s=now - decode_s - image.started,
            decode_s=decode_s,
            total_s=now - image.entry.arrival,
        )
        return RequestOutput(image.request, "ok", metrics=metrics)
