"""Encoders of padded ids: batches of several rows, as on a GPU, held against transformers' own calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from families import clip_encoder, t5_encoder
from made_tokenizers import clip_tokenizer, t5_tokenizer

from offline_diffusion.models.padded_prompts import BATCH_TOKENS, PaddedEncoder, PaddedPrompts

CPU = torch.device("cpu")
TEXTS = ("a red cup", "storm", "violet river under glass " * 9, "", "quiet lamp", "low", "☂ 雨")


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any, Any, Any]:
    tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
    clip = clip_encoder(tokenizer, 32, projects=False, seed=1)
    return tokenizer, clip, tokenizer_2, t5_encoder(tokenizer_2, 48, seed=2)


@pytest.fixture
def calls() -> list[tuple[int, ...]]:
    """Shapes of the ids that the second encoder was given."""
    return []


@pytest.fixture
def prompts(parts: tuple[Any, Any, Any, Any], calls: list[tuple[int, ...]]) -> PaddedPrompts:
    tokenizer, clip, tokenizer_2, t5 = parts

    def states(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(tuple(ids.shape))
        return (t5(ids)[0],)

    encoders = [
        PaddedEncoder(tokenizer, clip, 77, lambda ids: (clip(ids).pooler_output,)),
        PaddedEncoder(tokenizer_2, t5, 64, states),
    ]
    return PaddedPrompts(encoders, 64, CPU)


def expected(parts: tuple[Any, Any, Any, Any], text: str) -> Sequence[torch.Tensor]:
    """Pooled output and states of a text alone, by transformers."""
    outputs = []
    for tokenizer, encoder, length in zip(parts[::2], parts[1::2], (77, 64), strict=True):
        options: dict[str, Any] = {"padding": "max_length", "max_length": length, "truncation": True}
        outputs.append(encoder(tokenizer(text, return_tensors="pt", **options).input_ids))
    return outputs[0].pooler_output[0], outputs[1].last_hidden_state[0]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8])
@torch.inference_mode()
def test_batches_of_any_height_are_run_whole_and_every_prompt_gets_its_own(
    parts: tuple[Any, Any, Any, Any], prompts: PaddedPrompts, calls: list[tuple[int, ...]], num_rows: int
) -> None:
    prompts.shape = num_rows, 77
    encoded = prompts.encode([prompts.tokenize(text) for text in TEXTS])
    assert calls == [(num_rows, 64)] * -(len(TEXTS) // -num_rows)
    for text, own in zip(TEXTS, encoded, strict=True):
        for found, wanted in zip(own, expected(parts, text), strict=True):
            assert found.shape == wanted.shape
            assert torch.allclose(found, wanted, atol=1e-5), text


def test_what_each_encoder_cuts_is_counted(parts: tuple[Any, Any, Any, Any], prompts: PaddedPrompts) -> None:
    for text in TEXTS:
        tokenized = prompts.tokenize(text)
        lengths = [len(tokenizer(text, verbose=False).input_ids) for tokenizer in parts[::2]]
        assert tokenized.truncated_tokens == max(0, lengths[0] - 77) + max(0, lengths[1] - 64)
        assert (len(tokenized.input_ids), tokenized.num_tokens) == (77 + 64, 64)


def test_a_gpu_gets_several_prompts_a_batch_and_a_cpu_one(parts: tuple[Any, Any, Any, Any]) -> None:
    tokenizer, clip, *_ = parts
    encoders = [PaddedEncoder(tokenizer, clip, 77, lambda ids: (clip(ids).pooler_output,))]
    assert PaddedPrompts(encoders, 77, torch.device("cuda")).shape == (BATCH_TOKENS // 77, 77)
    assert PaddedPrompts(encoders, 77, CPU).shape == (1, 77)
