"""Packed pixels against diffusers' pipeline given each row alone: CPU, float32, within 1/255."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from qwen_rows import GUIDANCE, draw_alone, max_difference, random_rows

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.models.base import DiffusionModel
from offline_diffusion.models.loader import model_from_pipeline
from offline_diffusion.models.registry import find_checkpoint
from offline_diffusion.request import Request

SEEDS = (1, 2, 3)

MODES: dict[str, dict[str, Any]] = {
    # small budgets: requests join and leave in mid-run, and some are larger than the budget
    "pack": {"scheduling_policy": "pack", "max_num_seqs": 4, "max_num_batched_tokens": 1500},
    "fifo": {"scheduling_policy": "fifo", "max_num_seqs": 3, "max_num_batched_tokens": 900},
    "all at once": {"max_num_seqs": 64, "max_num_batched_tokens": 1_000_000},
    "waves": {"step_execution": False, "max_num_seqs": 4},
    "same shape": {"batching": "same_shape", "scheduling_policy": "fifo", "max_num_seqs": 4},
    "previews": {"diffusion_streaming_output": True, "preview_interval": 1, "max_num_seqs": 8},
    "serial": {"max_num_seqs": 1},
}


@pytest.fixture(scope="module")
def model(tiny_model: Any, tiny_pipeline: Any) -> DiffusionModel:
    return model_from_pipeline(tiny_pipeline, find_checkpoint(str(tiny_model)), torch.device("cpu"))


@pytest.fixture(scope="module")
def mixes(tiny_pipeline: Any, model: DiffusionModel) -> dict[int, list[tuple[Request, np.ndarray]]]:
    """Rows and the pipeline's pictures of them; two like rows in each mix, for waves of more than one."""
    drawn = {}
    for seed in SEEDS:
        rows = random_rows(tiny_pipeline.tokenizer, seed)
        twin = {"height": rows[0].height, "width": rows[0].width, "seed": 5}
        rows.append(replace(rows[0], request_id=f"{seed}-twin", prompt="two of a kind", **twin))
        drawn[seed] = [(row, draw_alone(tiny_pipeline, row)) for row in rows]
    return drawn


def draw_packed(model: DiffusionModel, rows: list[Request], **options: Any) -> dict[str, Any]:
    engine = Engine(model, EngineConfig(**options))
    return {output.request_id: output for output in engine.generate(rows) if output.finished}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_of_a_mix_is_the_pipelines(
    model: DiffusionModel, mixes: dict[int, list[tuple[Request, np.ndarray]]], seed: int, mode: str
) -> None:
    rows = mixes[seed]
    outputs = draw_packed(model, [row for row, _ in rows], **MODES[mode])
    for row, expected in rows:
        output = outputs[row.request_id]
        assert (output.status, output.error) == ("ok", None)
        assert max_difference(output.pixels, expected) <= 1, row
        assert output.metrics.cfg_active == (row.true_cfg_scale > 1 and row.negative_prompt is not None)


def test_the_mixes_cover_what_they_are_for(
    tiny_pipeline: Any, mixes: dict[int, list[tuple[Request, np.ndarray]]]
) -> None:
    rows = [row for mix in mixes.values() for row, _ in mix]
    assert {(row.true_cfg_scale, row.negative_prompt) for row in rows} == set(GUIDANCE)
    assert any(row.height != row.width for row in rows)
    assert max(row.seed for row in rows) == 2**64 - 1
    lengths = [len(tiny_pipeline.tokenizer(row.prompt)["input_ids"]) for row in rows]
    assert min(lengths) == 1
    assert 500 <= max(lengths) <= 530
    text = " ".join(row.prompt for row in rows)
    assert all(piece in text for piece in ("{}", "<|im_end|>", "雨", "🙂", "<|im_start|>user"))
    for _, picture in (pair for mix in mixes.values() for pair in mix):
        assert picture.std() > 5  # no picture is blank


@pytest.mark.parametrize(("num_words", "negative_words"), [(600, 3), (1500, 3), (5, 700), (1500, 2500)])
def test_prompts_over_the_limit_are_cut_as_the_pipeline_cuts_them(
    model: DiffusionModel, tiny_pipeline: Any, num_words: int, negative_words: int
) -> None:
    prompt = " ".join(f"lamp{n % 7}" for n in range(num_words))
    negative = " ".join(f"river{n % 5}" for n in range(negative_words))
    row = Request(
        request_id="long",
        prompt=prompt,
        negative_prompt=negative,
        true_cfg_scale=4.0,
        height=64,
        width=48,
        num_inference_steps=2,
        seed=3,
    )
    short = replace(row, request_id="short", prompt="short", negative_prompt=None)
    output = draw_packed(model, [row, short])["long"]
    assert max_difference(output.pixels, draw_alone(tiny_pipeline, row)) <= 1
    # the text stream: prompt and the template's five last tokens, of which 512 are kept
    lengths = [len(tiny_pipeline.tokenizer(text)["input_ids"]) + 5 for text in (prompt, negative)]
    assert output.metrics.truncated_tokens == sum(max(0, length - 5 - 512) for length in lengths)
    assert output.metrics.prompt_tokens == min(512, lengths[0])
    assert output.metrics.num_tokens == 2 * 12 + sum(min(512, length) for length in lengths)


@pytest.mark.parametrize("num_tokens", [505, 506, 507, 508, 512, 513])
def test_prompts_about_the_limit(model: DiffusionModel, tiny_pipeline: Any, num_tokens: int) -> None:
    prompt = "lamp" + " lamp" * (num_tokens - 2)
    num_tokens = len(tiny_pipeline.tokenizer(prompt)["input_ids"])
    row = Request(
        request_id="edge",
        prompt=prompt,
        true_cfg_scale=1.0,
        height=48,
        width=48,
        num_inference_steps=2,
        seed=3,
    )
    output = draw_packed(model, [row])["edge"]
    assert max_difference(output.pixels, draw_alone(tiny_pipeline, row)) <= 1
    assert output.metrics.truncated_tokens == max(0, num_tokens - 512)


@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 160)])
def test_one_step_is_a_picture_worked_out_by_hand(
    model: DiffusionModel, tiny_pipeline: Any, height: int, width: int, guided: bool
) -> None:
    """The schedule's only sigma is 1: the image is ``decode(noise - prediction at sigma 1)``.

    diffusers' own table is 0/0 there, and its picture black.
    """
    row = Request(
        request_id="one",
        prompt="a red cup",
        negative_prompt="a river" if guided else None,
        true_cfg_scale=3.0,
        height=height,
        width=width,
        num_inference_steps=1,
        seed=2**64 - 1,
    )
    more = replace(row, request_id="more", num_inference_steps=3)
    pixels = draw_packed(model, [row, more])["one"].pixels
    expected = _one_step_by_hand(tiny_pipeline, row)
    assert max_difference(pixels, expected) <= 1
    assert expected.std() > 5


@torch.inference_mode()
def _one_step_by_hand(pipeline: Any, row: Request) -> np.ndarray:
    rows, columns = row.height // 16, row.width // 16
    generator = torch.Generator("cpu").manual_seed(row.seed)
    noise = torch.randn((1, 1, 16, 2 * rows, 2 * columns), generator=generator)
    latents = pipeline._pack_latents(noise, 1, 16, 2 * rows, 2 * columns)

    def predict(prompt: str) -> torch.Tensor:
        embeds, mask = pipeline.encode_prompt(prompt, max_sequence_length=512)
        return pipeline.transformer(
            hidden_states=latents,
            timestep=torch.ones(1),
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, rows, columns)]],
            return_dict=False,
        )[0]

    prediction = predict(row.prompt)
    if row.negative_prompt is not None:
        positive, negative = prediction, predict(row.negative_prompt)
        prediction = negative + row.true_cfg_scale * (positive - negative)
        prediction = prediction * positive.norm(dim=-1, keepdim=True) / prediction.norm(dim=-1, keepdim=True)
    clean = pipeline._unpack_latents(latents - prediction, row.height, row.width, 8)
    mean = torch.tensor(pipeline.vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(pipeline.vae.config.latents_std).view(1, -1, 1, 1, 1)
    image = pipeline.vae.decode(clean * std + mean, return_dict=False)[0][0, :, 0]
    return ((image.permute(1, 2, 0) / 2 + 0.5).clamp(0, 1) * 255).round().byte().numpy()
