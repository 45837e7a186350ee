"""A small SDXL with random weights in the layout of the real checkpoints, made on the spot."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as token_models

from offline_diffusion.models import tiny_words

NOISE_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("EulerDiscrete", {"timestep_spacing": "leading", "steps_offset": 1}),
    "lightning": ("EulerDiscrete", {"timestep_spacing": "trailing"}),
    "dpm": ("DPMSolverMultistep", {"use_karras_sigmas": True, "solver_order": 2}),
    "turbo": ("EulerAncestralDiscrete", {"timestep_spacing": "trailing"}),
    "v": ("EulerDiscrete", {"prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
}
"""As ``scheduler_config.json`` of published checkpoints has them, the betas aside."""

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}

UNET_CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (16, 32, 48),
    "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": [1, 1, 2],
    "attention_head_dim": [2, 2, 3],  # by a slip of old, the number of heads
    "cross_attention_dim": 32 + 48,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 40 + 6 * 8,
}

VAE_CONFIG: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [8, 8, 16, 16],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "sample_size": 128,
    "scaling_factor": 0.13025,
    "force_upcast": True,
}


def build_small_sdxl(folder: Path, *, kind: str = "base", seed: int = 0, **unet_overrides: Any) -> Path:
    """Writes a complete folder; ``kind`` picks the noise scheduler."""
    name, config = NOISE_SCHEDULERS[kind]
    with torch.random.fork_rng(devices=[]):
        parts = {
            "unet": diffusers.UNet2DConditionModel(**{**UNET_CONFIG, **unet_overrides}),
            "vae": diffusers.AutoencoderKL(**VAE_CONFIG),
            "text_encoder": _clip(transformers.CLIPTextModel, 32, "quick_gelu"),
            "text_encoder_2": _clip(transformers.CLIPTextModelWithProjection, 48, "gelu"),
        }
    for part, module in parts.items():
        _fill(module, f"{seed}/{part}")
    pipeline = diffusers.StableDiffusionXLPipeline(
        **parts,
        tokenizer=clip_tokenizer(pad_token="<|endoftext|>"),
        tokenizer_2=clip_tokenizer(pad_token="!"),
        scheduler=getattr(diffusers, f"{name}Scheduler")(**BETAS, **config),
        add_watermarker=False,
    )
    pipeline.save_pretrained(folder)
    return folder


def _clip(model_class: Any, width: int, hidden_act: str) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=len(clip_tokenizer(pad_token="!")),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=4,
        hidden_act=hidden_act,
        projection_dim=40,
        eos_token_id=2,  # as published: then the pooled token is the one of the highest id
        bos_token_id=0,
        pad_token_id=1,
    )
    return model_class(config)


def clip_tokenizer(*, pad_token: str) -> transformers.CLIPTokenizer:
    """Words of `tiny_words` as merges; any text encodes."""
    learner = Tokenizer(token_models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([*alphabet, *(f"{own}</w>" for own in alphabet)])}
    trainer = trainers.BpeTrainer(
        vocab_size=1500, show_progress=False, initial_alphabet=alphabet, end_of_word_suffix="</w>"
    )
    learner.train_from_iterator(tiny_words.WORDS.lower().split(), trainer)
    merges = [tuple(pair) for pair in _learnt(learner)]
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))
    vocab |= {token: len(vocab) + place for place, token in enumerate(("<|startoftext|>", "<|endoftext|>"))}
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad_token, model_max_length=77)


def _learnt(learner: Tokenizer) -> list[list[str]]:
    import json

    merges: list[list[str]] = json.loads(learner.to_str())["model"]["merges"]
    return merges


def _fill(module: torch.nn.Module, seed: str) -> None:
    """No weight at 0 or 1; ``!`` pads a tokenizer with id 0, so that too is a vector of its own."""
    for name, parameter in module.named_parameters():
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        noise = (torch.rand(parameter.shape, generator=generator) - 0.5) * math.sqrt(12)
        if "embedding.weight" in name or "class_embedding" in name:
            mean, std = 0.0, 1.0
        elif name.endswith("bias"):
            mean, std = 0.0, 0.2
        elif parameter.ndim == 1:
            mean, std = 1.0, 0.25
        else:
            mean, std = 0.0, 1 / math.sqrt(parameter[0].numel())
        with torch.no_grad():
            parameter.copy_(mean + std * noise)
