"""Prompts in batches against the pipeline's own encoding of each alone, and against being alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from offline_diffusion.models.loader import model_from_pipeline
from offline_diffusion.models.qwen_image_text import BATCH_TOKENS, PAD_ID, PromptEncoder
from offline_diffusion.models.registry import find_checkpoint

CPU = torch.device("cpu")


class Spy:
    """A language model that notes the shapes it is called with."""

    def __init__(self, language_model: Any) -> None:
        self.language_model = language_model
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, **options: Any) -> Any:
        self.shapes.append(tuple(input_ids.shape))
        return self.language_model(input_ids, **options)


@pytest.fixture(scope="module")
def language_model(tiny_pipeline: Any) -> Any:
    return tiny_pipeline.text_encoder.model.language_model


@pytest.fixture(params=[BATCH_TOKENS, 1], ids=["as on a GPU", "as on a CPU"])
def encode(request: pytest.FixtureRequest, language_model: Any) -> PromptEncoder:
    return PromptEncoder(language_model, CPU, request.param)


def random_ids(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, 6000) for _ in range(length))


@torch.inference_mode()
def test_each_of_many_prompts_is_encoded_as_the_pipeline_encodes_it_alone(
    tiny_model: Any, tiny_pipeline: Any
) -> None:
    """Prompts of every shape, mixed up and cut: catches wrong positions, wrong rows and a lost order."""
    model = model_from_pipeline(tiny_pipeline, find_checkpoint(str(tiny_model)), CPU)
    transformer = tiny_pipeline.transformer
    texts = ["lamp " * count for count in (1, 500, 25, 24, 200, 3, 90, 88, 150, 300, 600, 26, 2, 470)]
    tokenized = [model.tokenize(text) for text in texts]
    assert {model.encode_shape(prompt)[1] for prompt in tokenized} == {64, 128, 192, 256, 384, 576}
    for text, encoded in zip(texts, model.prepare_encode(tokenized), strict=True):
        embeds, _ = tiny_pipeline.encode_prompt(text, max_sequence_length=512)
        expected = transformer.txt_in(transformer.txt_norm(embeds))[0]
        assert encoded.stream.shape == expected.shape
        assert (encoded.stream - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_company_changes_no_bit(encode: PromptEncoder, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [random_ids(rng, rng.choice([1, 40, 64, 65, 100, 128, 190, 250, 576])) for _ in range(14)]
    alone = [encode([ids])[0] for ids in prompts]
    for order in (prompts, prompts[::-1]):
        together = encode(order)
        for ids, states in zip(order, together, strict=True):
            assert torch.equal(states, alone[prompts.index(ids)])
            assert states.shape[0] == len(ids)
            assert states.isfinite().all()


@torch.inference_mode()
def test_what_fills_a_row_up_has_no_say(
    encode: PromptEncoder, language_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention that looked to the right, or into another row, would see the loud padding."""
    rng = random.Random(5)
    prompts = [random_ids(rng, length) for length in (7, 63, 70, 260)]
    before = encode(prompts)
    weight = language_model.embed_tokens.weight
    loud = weight.clone()
    loud[PAD_ID] *= 1000
    monkeypatch.setattr(weight, "data", loud)
    assert all(map(torch.equal, encode(prompts), before))


@torch.inference_mode()
def test_attention_is_causal_without_a_mask(language_model: Any) -> None:
    """A mask made from data would cost a wait for the device, and another kernel."""
    seen: list[tuple[Any, Any]] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch.nn.functional.scaled_dot_product_attention:
                seen.append((kwargs["attn_mask"], kwargs["is_causal"]))
            return function(*args, **(kwargs or {}))

    with Watch():
        PromptEncoder(language_model, CPU, BATCH_TOKENS)([(1, 2, 3), (4, 5)])
    assert seen == [(None, True)] * len(language_model.layers)


@torch.inference_mode()
def test_shapes_are_run_whole_and_shared(language_model: Any) -> None:
    spy = Spy(language_model)
    encode = PromptEncoder(spy, CPU, BATCH_TOKENS)
    assert len(encode([(1, 2)] * 10 + [(1,) * 65] + [(1,) * 546])) == 12
    assert spy.shapes == [(9, 64), (9, 64), (4, 128), (1, 576)]
    assert encode([]) == []


@pytest.mark.parametrize(
    ("num_ids", "rows", "length"),
    [(1, 9, 64), (64, 9, 64), (65, 4, 128), (129, 3, 192), (193, 2, 256), (257, 1, 384), (385, 1, 576)],
)
def test_the_own_length_decides_on_the_shape(
    language_model: Any, num_ids: int, rows: int, length: int
) -> None:
    assert PromptEncoder(language_model, CPU, 576).shape(num_ids) == (rows, length)
    assert PromptEncoder(language_model, CPU, 1).shape(num_ids) == (1, length)


def test_longer_prompts_than_any_family_allows_still_fit(language_model: Any) -> None:
    encode = PromptEncoder(language_model, CPU, BATCH_TOKENS)
    assert [encode.shape(num_ids) for num_ids in (577, 640, 641)] == [(1, 640), (1, 640), (1, 704)]
