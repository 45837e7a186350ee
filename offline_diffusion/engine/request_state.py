"""A request between ``add_request`` and its output."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from offline_diffusion.engine.admission import ScheduledRequest
from offline_diffusion.engine.memory import DeviceLimits
from offline_diffusion.engine.packed_batch import PreparedRequest
from offline_diffusion.engine.stats import StepShare
from offline_diffusion.models.base import DiffusionModel, TokenizedPrompt
from offline_diffusion.models.modes import same_shape_key
from offline_diffusion.request import Request, RequestMetrics, StepState


def check_resume(request: Request, resume: StepState, model: DiffusionModel) -> None:
    """Raises ``ValueError`` when no engine can have left ``request`` so."""
    num_tokens = model.capabilities.num_image_tokens(request.height, request.width)
    shape = num_tokens, model.num_latent_channels
    if not 0 < resume.step_index < request.num_inference_steps or resume.latents.shape != shape:
        raise ValueError(
            f"request {request.request_id!r} has {request.num_inference_steps} steps and latents {shape}, "
            f"not step {resume.step_index} and latents {resume.latents.shape}"
        )


def _negative_of(request: Request, prompt: TokenizedPrompt, model: DiffusionModel) -> TokenizedPrompt:
    if request.negative_prompt is None:
        return prompt.nothing()
    return model.tokenize(request.negative_prompt)


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
        is_denoised: Whether its last step is done; its metrics then have the time of all.
        prepared: Set when its prompts are encoded.
        sum_batch_seqs: Sequences of all its steps.
        decode_tokens: Tokens that take the memory of its decode.
        resume: Where it goes on; None for a new one, and from when it is prepared.
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
    resume: StepState | None = None
    is_denoised: bool = False

    @classmethod
    def of(
        cls,
        request: Request,
        model: DiffusionModel,
        limits: DeviceLimits | None,
        arrival: float,
        resume: StepState | None = None,
    ) -> RequestState:
        """Tokenizes the prompts, which decide how much of the token budget the request takes.

        Times and counts of ``resume`` go on.
        """
        prompt = model.tokenize(request.prompt)
        negative = _negative_of(request, prompt, model) if request.cfg_active else None
        branches = [prompt] if negative is None else [prompt, negative]
        num_image_tokens = model.capabilities.num_image_tokens(request.height, request.width)
        lengths = [num_image_tokens + branch.num_tokens for branch in branches]
        metrics = replace(
            RequestMetrics() if resume is None else resume.metrics,
            cfg_active=negative is not None,
            num_tokens=sum(lengths),
            prompt_tokens=prompt.num_tokens,
            truncated_tokens=sum(branch.truncated_tokens for branch in branches),
        )
        share = StepShare(metrics, sum(lengths), sum(length**2 for length in lengths))
        decode_tokens = 0 if limits is None else limits.decode_tokens(request.height * request.width)
        return cls(
            request,
            prompt,
            negative,
            arrival,
            metrics,
            share,
            sum_batch_seqs=round(metrics.mean_batch_seqs * metrics.steps_run),
            decode_tokens=decode_tokens,
            resume=resume,
        )

    @property
    def num_tokens(self) -> int:
        """Image and text tokens of all its sequences."""
        return self.share.num_tokens

    @property
    def branches(self) -> list[TokenizedPrompt]:
        """Of each sequence its text."""
        return [self.prompt] if self.negative is None else [self.prompt, self.negative]

    @property
    def step_index(self) -> int:
        """Steps done, earlier runs included."""
        if self.prepared is not None:
            return self.prepared.step_index
        return 0 if self.resume is None else self.resume.step_index

    def end_denoising(self, now: float) -> None:
        """Its last step is done; ``now`` in seconds on the engine's clock."""
        assert self.started is not None
        self.metrics.denoise_s += now - self.started
        self.is_denoised = True

    def metrics_so_far(self, now: float) -> RequestMetrics:
        """As they would be if it ended ``now``, seconds on the engine's clock."""
        metrics = replace(self.metrics)
        metrics.total_s += now - self.arrival
        if self.started is None:
            metrics.queue_s += now - self.arrival
        elif not self.is_denoised:
            metrics.denoise_s += now - self.started
        if metrics.steps_run:
            metrics.mean_batch_seqs = self.sum_batch_seqs / metrics.steps_run
        return metrics

    def scheduled(self, model: DiffusionModel, *, same_shape: bool = False) -> ScheduledRequest:
        """As the scheduler sees it, before its first step here.

        With ``same_shape`` only like requests may share a step with it, whatever the model can do.
        """
        request = self.request
        alike = same_shape_key(request, model.capabilities.guidance)
        num_steps = request.num_inference_steps - self.step_index
        return ScheduledRequest(
            request_id=request.request_id,
            num_tokens=self.num_tokens,
            num_steps=num_steps,
            num_text_tokens=sum(branch.num_tokens for branch in self.branches),
            decode_tokens=self.decode_tokens,
            batch_key=(model.batch_key(request), alike if same_shape else None),
            wave_key=(alike, num_steps),
            arrival=self.arrival,
            deadline=math.inf if request.slo_ms is None else self.arrival + request.slo_ms / 1000,
        )
