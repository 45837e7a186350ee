"""Runs the stages of requests on the device: encode, denoise, decode, copy.

On a GPU, decoding and the copy to the host run on a side stream beside the next steps, and nothing
here waits for the device but `StepTimer`, which keeps the host at most two steps ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offline_diffusion.accel.graphs import MAX_GRAPH_TOKENS, MIN_REPLAYS, StepRecorder
from offline_diffusion.engine.batch import Batch, build_batch
from offline_diffusion.engine.packed_batch import PreparedRequest
from offline_diffusion.engine.prompt_cache import PromptCache
from offline_diffusion.engine.stats import WorkCounts
from offline_diffusion.models.base import DiffusionModel, TokenizedPrompt
from offline_diffusion.request import Request, StepState
from offline_diffusion.stages import NO_STAGES, Stages, in_stage
from offline_diffusion.upload import upload


@dataclass(slots=True)
class DecodedImage:
    """An image on its way to the host.

    Args:
        request: Whose.
        pixels: uint8 ``[height, width, 3]``, host memory; valid once ``ready()``.
        is_finite: One bool, host memory: whether latents and image were finite all over.
        done: Recorded after the copy; None where work is synchronous.
        start: Recorded before the decode, likewise.
        seconds: Decode time where work is synchronous.
        step_index: Of a preview the steps done; None for a finished image.
    """

    request: Request
    pixels: Tensor
    is_finite: Tensor
    done: torch.cuda.Event | None
    start: torch.cuda.Event | None
    seconds: float
    step_index: int | None = None

    def ready(self) -> bool:
        """Whether pixels may be read without waiting."""
        return self.done is None or bool(self.done.query())

    def wait(self) -> None:
        """Blocks until pixels may be read."""
        if self.done is not None:
            self.done.synchronize()

    def decode_s(self) -> float:
        """Device seconds of decode and copy."""
        if self.done is None or self.start is None:
            return self.seconds
        return float(self.start.elapsed_time(self.done)) / 1000

    def to_numpy(self) -> np.ndarray:
        """A copy where the memory is pinned, which is scarce."""
        return self.pixels.numpy() if self.done is None else self.pixels.numpy().copy()


@dataclass(slots=True)
class LatentsCopy:
    """Latents of several requests on their way to the host, one after the other.

    Args:
        host: float32 ``[T, C]``, host memory; valid once ``done`` has happened.
        lengths: Tokens of each request.
        done: Recorded after the copy; None where work is synchronous.
    """

    host: Tensor
    lengths: list[int]
    done: torch.cuda.Event | None

    def to_numpy(self) -> list[np.ndarray]:
        """Of each request ``[S, C]``; waits for the copy. Each in memory of its own: pinned is scarce, and
        one that is kept must not keep the others."""
        if self.done is not None:
            self.done.synchronize()
        parts: tuple[Tensor, ...] = self.host.split(self.lengths)
        return [part.numpy().copy() for part in parts]


class ModelRunner:
    """Holds the model, the current pack and the images being decoded.

    Args:
        model: A loaded family.
        clock: Seconds, for what happens before the first step.
    """

    def __init__(self, model: DiffusionModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model = model
        self.stages: Stages = NO_STAGES
        self.counts = WorkCounts()
        self._batch: Batch | None = None
        self.prompts = PromptCache(model, clock)
        self._clock = clock
        self._recorder = StepRecorder(model.device)
        self._decoding: deque[DecodedImage] = deque()
        on_gpu = model.device.type == "cuda"
        self._side_stream = torch.cuda.Stream(model.device) if on_gpu else None

    # --- encode ------------------------------------------------------------------------------

    @in_stage("prompt_encode")
    def prepare(
        self,
        request: Request,
        prompt: TokenizedPrompt,
        negative: TokenizedPrompt | None,
        resume: StepState | None = None,
    ) -> PreparedRequest:
        """Encodes the prompts (each distinct one once), draws the noise, lays out the schedule.

        With ``resume`` there are latents already and some steps are done.
        """
        prompts = [prompt] if negative is None else [prompt, negative]
        (prompt_embeds, *negative_embeds), encode_s = self.prompts.get(prompts)
        self.counts.num_prompts = self.prompts.num_encoded
        start = self._clock()
        sigmas, timesteps = self.model.prepare_timesteps(request)
        latents = self.model.prepare_latents(request) if resume is None else torch.tensor(resume.latents)
        return PreparedRequest(
            request=request,
            prompt_embeds=prompt_embeds,
            negative_embeds=negative_embeds[0] if negative_embeds else None,
            sigmas=sigmas,
            timesteps=timesteps,
            latents=upload(latents, self.model.device).float(),
            step_index=0 if resume is None else resume.step_index,
            encode_s=encode_s + self._clock() - start,
            shown_step=0 if resume is None else resume.step_index,
        )

    # --- denoise -----------------------------------------------------------------------------

    def denoise(self, requests: Sequence[PreparedRequest]) -> int:
        """One step for all ``requests`` in one forward; returns the number of sequences.

        Between two calls with the same requests in the same order the pack is reused as it is.
        Nothing has changed if this raises: the step can be tried again with fewer requests.
        """
        with self.stages.stage("pack"):
            if self._batch is None or self._batch.requests != list(requests):
                self.drop_batch()
                self._batch = build_batch(list(requests), self.model)
            batch = self._batch
            self._record(batch)
        self._launch_step(batch)
        batch.advance()
        return batch.num_seqs

    def _record(self, batch: Batch) -> None:
        """Records the device's part of a step, if the pack is small and has stayed the same."""
        if (
            batch.num_steps == 1
            and batch.num_steps_left >= MIN_REPLAYS
            and batch.num_tokens <= self.model.capabilities.own_tokens(MAX_GRAPH_TOKENS)
        ):
            batch.replay = self._recorder.record(
                lambda: batch.step_scheduler(batch.forward(self.model), self.model)
            )

    def _launch_step(self, batch: Batch) -> None:
        with self.stages.stage("denoise"):
            batch.refresh(self.model)
            if batch.replay is not None:
                batch.replay()  # with the solver in it
                return
            noise_pred = batch.forward(self.model)
        with self.stages.stage("solver"):
            batch.step_scheduler(noise_pred, self.model)

    def drop_batch(self) -> None:
        """Gives the requests of the current pack their latents back and forgets the pack."""
        if self._batch is not None:
            self._batch.release()
        self._batch = None

    def copy_latents(self, requests: Sequence[PreparedRequest]) -> LatentsCopy:
        """Begins to copy their latents as they are now to the host; the pack may go on at once."""
        if self._batch is not None:
            self._batch.release()  # views: the pack stays as it is
        latents = torch.cat([request.latents for request in requests])  # the next step changes the pack's
        lengths = [request.num_image_tokens for request in requests]
        stream = self._side_stream
        if stream is None:
            return LatentsCopy(latents, lengths, None)
        stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(stream):
            host = torch.empty(latents.shape, dtype=latents.dtype, pin_memory=True)
            host.copy_(latents, non_blocking=True)
            latents.record_stream(stream)
            done = torch.cuda.Event()
            done.record()
        return LatentsCopy(host, lengths, done)

    def latents_now(self, requests: Sequence[PreparedRequest]) -> list[Tensor]:
        """Copies of their latents on the device, as they are now: steps change them in place."""
        if self._batch is not None:
            self._batch.release()  # views: the pack stays as it is
        return [request.latents.clone() for request in requests]

    # --- decode ------------------------------------------------------------------------------

    def decode(self, prepared: PreparedRequest) -> None:
        """Starts decoding a finished request; `collect` hands the image out. Needs a dropped pack."""
        self._decode(prepared.request, prepared.latents, None)

    def preview(self, prepared: PreparedRequest, latents: Tensor) -> None:
        """Likewise for an unfinished one, from latents ``[S, C]`` of which the caller lets go."""
        self._decode(prepared.request, latents, prepared.step_index)

    def _decode(self, request: Request, latents: Tensor, step_index: int | None) -> None:
        if self._side_stream is None:
            start = time.perf_counter()
            pixels, is_finite = self._post_decode(request, latents)
            image = DecodedImage(request, pixels, is_finite, None, None, time.perf_counter() - start)
        else:
            image = self._decode_beside(request, latents, self._side_stream)
        image.step_index = step_index
        self._decoding.append(image)
        self.counts.num_images += 1
        self.counts.num_pixels += request.height * request.width

    @in_stage("decode")
    def _post_decode(self, request: Request, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels uint8 ``[height, width, 3]``, and whether latents and image are finite all over."""
        image = self.model.post_decode(latents, request.height, request.width)
        is_finite = latents.isfinite().all() & image.isfinite().all()
        return (image * 255).round().to(torch.uint8).contiguous(), is_finite

    def _decode_beside(self, request: Request, latents: Tensor, stream: torch.cuda.Stream) -> DecodedImage:
        stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(stream):
            start = torch.cuda.Event(enable_timing=True)
            start.record()
            pixels, is_finite = self._post_decode(request, latents)
            latents.record_stream(stream)
            with self.stages.stage("copy"):
                host_pixels = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
                host_finite = torch.empty((), dtype=torch.bool, pin_memory=True)
                host_pixels.copy_(pixels, non_blocking=True)
                host_finite.copy_(is_finite, non_blocking=True)
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        return DecodedImage(request, host_pixels, host_finite, done, start, 0.0)

    def drop_decoding(self) -> None:
        """Forgets the images that are being decoded, once the device is through with them."""
        if self._side_stream is not None:
            self._side_stream.synchronize()
        self._decoding.clear()

    def collect(self, *, wait: bool) -> list[DecodedImage]:
        """Images that have arrived, in the order they were started; with ``wait``, at least one."""
        arrived: list[DecodedImage] = []
        while self._decoding:
            image = self._decoding[0]
            if not image.ready():
                if arrived or not wait:
                    break
                with self.stages.stage("wait_device"):
                    image.wait()
            arrived.append(self._decoding.popleft())
        return arrived

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    @property
    def decoding(self) -> list[Request]:
        """Whose images are being decoded, in the order they were started."""
        return [image.request for image in self._decoding]

    def peak_memory_bytes(self) -> int:
        """Most device memory allocated since the last reset; 0 where the device does not tell."""
        if self.model.device.type != "cuda":
            return 0
        return int(torch.cuda.max_memory_allocated(self.model.device))

    def reset_peak_memory(self) -> None:
        """Forgets the peak so far."""
        if self.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.model.device)
