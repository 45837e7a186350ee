"""The Python entry point: prompts in, images out."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from offline_diffusion.config import make_engine_config
from offline_diffusion.engine.engine import Engine
from offline_diffusion.models.loader import load_model
from offline_diffusion.request import MAX_SEED, Request, RequestOutput, SamplingParams


class OfflineDiffusion:
    """A model and an engine in this process.

    Args:
        model: A diffusers folder or hub id; left out, a small model made on the spot.
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
        requests = self._requests(prompts, _one_each(params, len(prompts)))
        return self._run(requests, ordered=ordered)

    def _requests(self, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[Request]:
        requests = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            if not isinstance(prompt, str):
                raise ValueError(f"prompt {index} must be a string, got {prompt!r}")
            if not prompt.strip():
                raise ValueError(f"prompt {index} is blank")
            seed = secrets.randbits(64) if own.seed is None else own.seed
            for image in range(own.num_images_per_prompt):
                name = f"{index}-{image}" if own.num_images_per_prompt > 1 else str(index)
                capabilities = self.engine.model.capabilities
                requests.append(capabilities.resolve(name, prompt, own, seed=(seed + image) & MAX_SEED))
        return requests

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
