"""The Python entry points: prompts in, images out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any, Self

from offline_diffusion.config import make_engine_config
from offline_diffusion.engine.async_engine import MAX_NUM_REQUESTS, AsyncEngine
from offline_diffusion.engine.engine import Engine
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.loader import load_model
from offline_diffusion.request import MAX_SEED, Request, RequestOutput, SamplingParams


class OfflineDiffusion:
    """A model and an engine in this process.

    Args:
        model: A diffusers folder or hub id; left out, the small one of this package.
        options: Any field of `config.EngineConfig`, such as ``max_num_seqs``.

    Raises:
        ModelError: The checkpoint cannot be loaded.
        BackendError: The device or attention backend does not work here.
        ConfigError: An option is unknown or its value not allowed.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        given = options if model is None else {"model": model, **options}
        config = make_engine_config(given, source="OfflineDiffusion")
        self.engine = Engine(load_model(config), config)

    def generate(
        self,
        prompts: str | Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ordered: bool = False,
    ) -> Iterator[RequestOutput]:
        """Draws every prompt as a request of its own.

        Args:
            prompts: One or many.
            params: One for all or one a prompt. Prompts without a seed get a random one, which the
                output's request records.
            ordered: Outputs in input order; otherwise as they finish.

        Returns:
            An iterator of outputs; image *k* of prompt *i* has ``request_id`` ``"i"`` or, where
            several images are asked for, ``"i-k"``. A failed request is an output, never an error.
            With ``diffusion_streaming_output`` previews come between, as they are there: outputs that are
            not ``finished``.

        Raises:
            ValueError: The counts of prompts and params differ, a prompt is no string or blank, or a
                parameter is none or does not fit the model.
        """
        if not isinstance(prompts, Iterable):
            raise ValueError(f"prompts must be a string or a sequence of strings, got {prompts!r}")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = zip(prompts, _one_each(params, len(prompts)), strict=True)
        capabilities = self.engine.model.capabilities
        requests = [
            request
            for index, (prompt, own) in enumerate(each)
            for request in _requests_of(str(index), prompt, own, capabilities)
        ]
        return self._run(requests, ordered=ordered)

    def _run(self, requests: Sequence[Request], *, ordered: bool) -> Iterator[RequestOutput]:
        if not ordered:
            yield from self.engine.generate(requests)
            return
        early: dict[str, RequestOutput] = {}
        due = iter(requests)
        expected = next(due, None)
        for output in self.engine.generate(requests):
            if not output.finished:
                yield output
                continue
            early[output.request_id] = output
            while expected is not None and expected.request_id in early:
                yield early.pop(expected.request_id)
                expected = next(due, None)


class AsyncOfflineDiffusion:
    """A model and an engine in a thread of its own, which takes prompts while it runs.

    ::

        async with AsyncOfflineDiffusion(model="Qwen/Qwen-Image", diffusion_streaming_output=True) as engine:
            async for output in engine.generate("a cup of coffee", SamplingParams(seed=7)):
                output.image.save("cup.png" if output.finished else f"cup-{output.step_index}.png")

    Args:
        model: A diffusers folder or hub id; left out, the small one of this package.
        max_num_requests: Most images at hand; ``generate`` waits for a place where there are more.
        options: Any field of `config.EngineConfig`.

    Raises:
        OffdiffError: See `OfflineDiffusion`.
    """

    def __init__(
        self, model: str | None = None, *, max_num_requests: int = MAX_NUM_REQUESTS, **options: Any
    ) -> None:
        engine = OfflineDiffusion(model, **options).engine
        self.engine = AsyncEngine(engine, max_num_requests=max_num_requests)
        self._numbers = itertools.count()

    async def generate(
        self, prompt: str, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Draws one prompt; any number of calls may run at once, and their images share steps.

        Args:
            prompt: Not blank.
            params: Without a seed a random one is taken.
            request_id: Of its outputs; several images get ``-0``, ``-1``, … after it. Left out, a number.

        Returns:
            An iterator of outputs: of each image its previews, if any, then its end. A failed request is an
            output, never an error. Whoever stops iterating aborts the rest.

        Raises:
            ValueError: The prompt is no string or blank, a parameter does not fit the model, or another
                request with this id is at hand.
            OffdiffError: The engine is broken or closed.
        """
        name = str(next(self._numbers)) if request_id is None else request_id
        capabilities = self.engine.engine.model.capabilities
        requests = _requests_of(name, prompt, params or SamplingParams(), capabilities)
        async with contextlib.aclosing(self.engine.generate(*requests)) as outputs:
            async for output in outputs:
                yield output

    def abort(self, request_id: str) -> None:
        """Drops an image: its output has status ``aborted``, unless it was past its last step."""
        self.engine.abort(request_id)

    async def close(self) -> None:
        """Lets nobody in any more and waits for what is at hand."""
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await asyncio.to_thread(self.engine.close, abort=kind is not None)


def _requests_of(name: str, prompt: str, params: SamplingParams, capabilities: Capabilities) -> list[Request]:
    """A request for each image of a prompt; raises ``ValueError``."""
    if not isinstance(prompt, str):
        raise ValueError(f"prompt {name} must be a string, got {prompt!r}")
    if not prompt.strip():
        raise ValueError(f"prompt {name} is blank")
    seed = secrets.randbits(64) if params.seed is None else params.seed
    count = params.num_images_per_prompt
    names = [f"{name}-{image}" for image in range(count)] if count > 1 else [name]
    return [
        capabilities.resolve(own, prompt, params, seed=(seed + image) & MAX_SEED)
        for image, own in enumerate(names)
    ]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(own, SamplingParams) for own in params):
        raise ValueError(f"params must be SamplingParams, one or a sequence, got {params!r}")
    if len(params) != count:
        raise ValueError(f"{count} prompts but {len(params)} sampling params: give one, or one a prompt")
    return list(params)
