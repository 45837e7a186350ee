"""A request between ``add_request`` and its output."""

from __future__ import annotations

from dataclasses import dataclass

from offline_diffusion.engine.memory import DeviceLimits
from offline_diffusion.engine.packed_batch import PreparedRequest
from offline_diffusion.engine.scheduler import ScheduledRequest
from offline_diffusion.engine.stats import StepShare
from offline_diffusion.models.base import DiffusionModel, TokenizedPrompt
from offline_diffusion.request import Request, RequestMetrics


@dataclass(slots=True)
class RequestState:
    """What the engine keeps of a request.

    Args:
        request: What was asked.
        prompt, negative: Its branches' texts; ``negative`` None when guidance is off.
        arrival: Seconds on the engine's clock.
        metrics: Of its output.
        share: Its part in a step.
        started: When its first step began.
        prepared: Set when its prompts are encoded.
        sum_batch_seqs: Sequences of all its steps.
        decode_tokens: Tokens that take the memory of its decode.
    """

    request: Request
    prompt: TokenizedPrompt
    negative: TokenizedPrompt | None
    arrival: float
    metrics: RequestMetrics
    share: StepShare
    started: float | None = None
    prepared: PreparedRequest | None = None
    sum_batch_seqs: int = 0
    decode_tokens: int = 0

    @classmethod
    def of(
        cls, request: Request, model: DiffusionModel, limits: DeviceLimits | None, now: float
    ) -> RequestState:
        """Tokenizes the prompts, which decide how much of the token budget the request takes."""
        prompt = model.tokenize(request.prompt)
        negative = model.tokenize(request.negative_prompt or "") if request.cfg_active else None
        branches = [prompt] if negative is None else [prompt, negative]
        num_image_tokens = model.capabilities.num_image_tokens(request.height, request.width)
        lengths = [num_image_tokens + branch.num_tokens for branch in branches]
        metrics = RequestMetrics(
            cfg_active=negative is not None,
            num_tokens=sum(lengths),
            prompt_tokens=prompt.num_tokens,
            truncated_tokens=sum(branch.truncated_tokens for branch in branches),
        )
        share = StepShare(metrics, sum(lengths), sum(length**2 for length in lengths))
        decode_tokens = 0 if limits is None else limits.decode_tokens(request.height * request.width)
        return cls(request, prompt, negative, now, metrics, share, decode_tokens=decode_tokens)

    @property
    def num_tokens(self) -> int:
        """Image and text tokens of all its sequences."""
        return self.share.num_tokens

    @property
    def branches(self) -> list[TokenizedPrompt]:
        """Of each sequence its text."""
        return [self.prompt] if self.negative is None else [self.prompt, self.negative]

    def scheduled(self, model: DiffusionModel) -> ScheduledRequest:
        """As the scheduler sees it."""
        request = self.request
        return ScheduledRequest(
            request_id=request.request_id,
            num_tokens=self.num_tokens,
            num_steps=request.num_inference_steps,
            num_text_tokens=sum(branch.num_tokens for branch in self.branches),
            decode_tokens=self.decode_tokens,
            batch_key=model.batch_key(request),
            wave_key=(request.height, request.width, request.num_inference_steps, request.cfg_active),
            arrival=self.arrival,
        )
