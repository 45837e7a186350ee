"""Tokenizers of CLIP and T5 made on the spot: for tests and benchmarks without a download."""

from __future__ import annotations

import string
from typing import Any

WORDS = ("a", "red", "cup", "storm", "lamp", "violet", "river", "quiet", "glass", "blurry", "under", "low")


def clip_tokenizer() -> Any:
    """Every byte a token; no merges."""
    import transformers
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(f"{letter}</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer() -> Any:
    """A few words, and letters for all others."""
    import transformers

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -3.0)]
    pieces += [(f"▁{word}", -2.0) for word in WORDS]
    pieces += [(letter, -5.0) for letter in string.ascii_letters + string.punctuation]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)
