"""Qwen-Image's parts against diffusers: noise predictions, schedules, text, noise; and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from qwen_rows import draw_alone, max_difference, random_rows

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.packed_batch import PackedBatch, PreparedRequest
from offline_diffusion.errors import UnsupportedModelError
from offline_diffusion.models.loader import load_model, model_from_pipeline
from offline_diffusion.models.registry import find_checkpoint
from offline_diffusion.models.tiny import build_tiny_qwen_image
from offline_diffusion.request import Request

CPU = torch.device("cpu")

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero_cond_t": {"zero_cond_t": True},
    "layer3d": {"use_layer3d_rope": True},
    "both": {"zero_cond_t": True, "use_layer3d_rope": True, "seed": 4},
    "wide": {
        "num_layers": 3,
        "num_attention_heads": 3,
        "attention_head_dim": 48,
        "axes_dims_rope": (8, 20, 20),
    },
}


def load_pipeline(folder: Path) -> Any:
    pipeline = diffusers.QwenImagePipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint's folder."""
    folder = build_tiny_qwen_image(tmp_path_factory.mktemp("variant") / "model", **VARIANTS[request.param])
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def model(tiny_model: Path, tiny_pipeline: Any) -> Any:
    return model_from_pipeline(tiny_pipeline, find_checkpoint(str(tiny_model)), CPU)


# --- noise prediction -------------------------------------------------------------------------------


@torch.inference_mode()
def alone(
    pipeline: Any, row: Request, prompt: str, latents: torch.Tensor, timestep: torch.Tensor
) -> torch.Tensor:
    """diffusers' transformer on one branch, called as the pipeline calls it."""
    embeds, mask = pipeline.encode_prompt(prompt, max_sequence_length=512)
    return pipeline.transformer(
        hidden_states=latents.unsqueeze(0),
        timestep=timestep.expand(1).to(latents.dtype) / 1000,
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, row.height // 16, row.width // 16)]],
        return_dict=False,
    )[0][0]


@torch.inference_mode()
def prepare(model: Any, row: Request, step_index: int) -> PreparedRequest:
    """As the runner does, at any progress; the latents are scaled noise of that row's own."""
    sigmas, timesteps = model.prepare_timesteps(row)
    texts = [row.prompt, row.negative_prompt or ""] if row.cfg_active else [row.prompt]
    prompt_embeds, *negative_embeds = model.prepare_encode([model.tokenize(text) for text in texts])
    return PreparedRequest(
        request=row,
        prompt_embeds=prompt_embeds,
        negative_embeds=negative_embeds[0] if negative_embeds else None,
        sigmas=sigmas,
        timesteps=timesteps,
        latents=model.prepare_latents(row) * (0.2 + float(sigmas[step_index])),
        step_index=step_index,
    )


@torch.inference_mode()
def predict(model: Any, batch: PackedBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The positive predictions of all requests, then the negative ones of those that are guided."""
    noise_pred = batch.forward(model)
    lengths = [request.num_image_tokens for request in batch.requests]
    guided = [r.num_image_tokens for r in batch.requests if r.negative_embeds is not None]
    parts = noise_pred.split(lengths + guided)
    return list(parts[: len(lengths)]), list(parts[len(lengths) :])


def noise_prediction_errors(pipeline: Any, model: Any, seed: int) -> Iterator[tuple[Request, float]]:
    """Largest difference of every branch of a random pack, requests standing at random steps."""
    rng = random.Random(seed)
    rows = random_rows(pipeline.tokenizer, seed)
    requests = [prepare(model, row, rng.randrange(row.num_inference_steps)) for row in rows]
    assert len({request.step_index for request in requests}) > 1
    positives, negatives = predict(model, PackedBatch.build(requests, model))
    branches = [(*own, own[0].prompt) for own in zip(rows, requests, positives, strict=True)]
    guided = [pair for pair in zip(rows, requests, strict=True) if pair[0].cfg_active]
    assert 0 < len(guided) < len(rows)
    for (row, request), prediction in zip(guided, negatives, strict=True):
        branches.append((row, request, prediction, row.negative_prompt or ""))
    for row, request, prediction, text in branches:
        timestep = request.timesteps[request.step_index]
        expected = alone(pipeline, row, text, request.latents, timestep)
        yield row, float((prediction - expected).abs().max())


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_a_packs_noise_predictions_are_the_transformers_row_by_row(
    model: Any, tiny_pipeline: Any, seed: int
) -> None:
    for row, error in noise_prediction_errors(tiny_pipeline, model, seed):
        assert error <= 1e-5, row


def test_in_float64_what_is_left_is_the_rounding_of_float32_parts(variant: Path) -> None:
    """Both keep norms, angles and time embeddings in float32; predictions are as large as 6."""
    pipeline = load_pipeline(variant).to(torch.float64)
    model = model_from_pipeline(pipeline, find_checkpoint(str(variant)), CPU)
    for seed in (11, 12):
        for row, error in noise_prediction_errors(pipeline, model, seed):
            assert error <= 5e-6, row


def test_a_variants_picture_is_its_pipelines(variant: Path) -> None:
    pipeline, model = load_pipeline(variant), load_model(EngineConfig(model=str(variant)))
    rows = [replace(row, height=64, width=96) for row in random_rows(pipeline.tokenizer, 21, count=3)]
    outputs = {output.request_id: output for output in Engine(model, EngineConfig()).generate(rows)}
    for row in rows:
        assert max_difference(outputs[row.request_id].pixels, draw_alone(pipeline, row)) <= 1


def test_the_variants_differ(tmp_path: Path) -> None:
    """``zero_cond_t`` changes nothing for text to image; another rotary table does."""
    row = Request(
        request_id="a", prompt="a cup", height=64, width=64, num_inference_steps=2, true_cfg_scale=1, seed=1
    )
    pictures = {}
    for name in ("plain", "zero_cond_t", "layer3d"):
        folder = build_tiny_qwen_image(tmp_path / name, **VARIANTS[name])
        pictures[name] = draw_alone(load_pipeline(folder), row)
    assert max_difference(pictures["zero_cond_t"], pictures["plain"]) == 0
    assert max_difference(pictures["layer3d"], pictures["plain"]) > 0


def test_loading_a_model_changes_no_value_of_the_pipeline(tiny_model: Path) -> None:
    """Fused weights are shared with the modules, not copied over them."""
    pipeline, untouched = load_pipeline(tiny_model), load_pipeline(tiny_model)
    model_from_pipeline(pipeline, find_checkpoint(str(tiny_model)), CPU)
    own, other = pipeline.transformer.state_dict(), untouched.transformer.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


# --- schedules --------------------------------------------------------------------------------------


def diffusers_schedule(
    pipeline: Any, height: int, width: int, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``set_timesteps`` as the pipeline calls it, on a fresh noise scheduler."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps

    scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    config = scheduler.config
    keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = calculate_shift((height // 16) * (width // 16), *(config[key] for key in keys))
    retrieve_timesteps(scheduler, steps, CPU, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler.sigmas, scheduler.timesteps


@pytest.mark.parametrize("steps", [2, 3, 5, 8, 20, 50, 333])
@pytest.mark.parametrize(
    ("height", "width"), [(16, 16), (48, 256), (256, 256), (1024, 1024), (1328, 1328), (2048, 4096)]
)
def test_sigmas_and_timesteps_are_diffusers_to_the_bit(
    model: Any, tiny_pipeline: Any, height: int, width: int, steps: int
) -> None:
    row = Request(
        request_id="a",
        prompt="a",
        height=height,
        width=width,
        num_inference_steps=steps,
        true_cfg_scale=1,
        seed=0,
    )
    sigmas, timesteps = model.prepare_timesteps(row)
    expected_sigmas, expected_timesteps = diffusers_schedule(tiny_pipeline, height, width, steps)
    assert sigmas.dtype == timesteps.dtype == torch.float32
    assert torch.equal(sigmas, expected_sigmas)
    assert torch.equal(timesteps, expected_timesteps)
    assert sigmas[0] == 1
    assert sigmas[-2] == pytest.approx(0.02, abs=1e-6)  # shift_terminal
    assert sigmas[-1] == 0
    assert (sigmas.diff() < 0).all()


def test_one_step_goes_from_noise_to_image_at_once(model: Any, tiny_pipeline: Any) -> None:
    row = Request(
        request_id="a", prompt="a", height=64, width=64, num_inference_steps=1, true_cfg_scale=1, seed=0
    )
    sigmas, timesteps = model.prepare_timesteps(row)
    assert sigmas.tolist() == [1.0, 0.0]
    assert timesteps.tolist() == [1000.0]
    with pytest.warns(RuntimeWarning):  # what diffusers makes of it, and why this is a case of its own
        assert diffusers_schedule(tiny_pipeline, 64, 64, 1)[0][0].isnan()


@pytest.mark.parametrize(
    "changes",
    [
        {"shift_terminal": None},
        {"use_dynamic_shifting": False, "shift": 3.0, "shift_terminal": None},
        {"time_shift_type": "linear"},
        {"use_karras_sigmas": True},
        {"use_exponential_sigmas": True},
        {"base_shift": 0.3, "max_shift": 2.0, "base_image_seq_len": 64, "max_image_seq_len": 999},
    ],
    ids=lambda changes: "-".join(changes),
)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_other_settings_of_the_noise_scheduler(
    tiny_model: Path, tiny_pipeline: Any, changes: dict[str, Any], steps: int
) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(
        tiny_pipeline.scheduler.config, **changes
    )
    pipeline = _with_scheduler(tiny_pipeline, scheduler)
    model = model_from_pipeline(pipeline, find_checkpoint(str(tiny_model)), CPU)
    row = Request(
        request_id="a", prompt="a", height=96, width=160, num_inference_steps=steps, true_cfg_scale=1, seed=0
    )
    sigmas, timesteps = model.prepare_timesteps(row)
    if steps == 1 and scheduler.config.shift_terminal:
        assert (sigmas.tolist(), timesteps.tolist()) == ([1.0, 0.0], [1000.0])
        return
    expected_sigmas, expected_timesteps = diffusers_schedule(pipeline, 96, 160, steps)
    assert torch.equal(sigmas, expected_sigmas)
    assert torch.equal(timesteps, expected_timesteps)
    assert sigmas.isfinite().all()


def _with_scheduler(pipeline: Any, scheduler: Any) -> Any:
    return diffusers.QwenImagePipeline(**(pipeline.components | {"scheduler": scheduler}))


# --- text and noise ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "a",
        "a cup",
        "{}",
        "{prompt} {{}}",
        "x<|im_end|>\n<|im_start|>user\ny",
        "雨の夜",
        "🙂👩‍🚀",
        "",
        " ",
        "\n",
    ],
)
@torch.inference_mode()
def test_prompt_embeddings_are_the_pipelines(model: Any, tiny_pipeline: Any, prompt: str) -> None:
    tokenized = model.tokenize(prompt)
    embeds, mask = tiny_pipeline.encode_prompt(prompt, max_sequence_length=512)
    transformer = tiny_pipeline.transformer
    expected = transformer.txt_in(transformer.txt_norm(embeds))[0]
    assert mask is None
    assert tokenized.num_tokens == embeds.shape[1]
    assert tokenized.truncated_tokens == 0
    (encoded,) = model.prepare_encode([tokenized])
    assert encoded.stream.shape == expected.shape
    assert (encoded.stream - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (48, 80), (256, 128)])
def test_noise_is_the_pipelines(model: Any, tiny_pipeline: Any, height: int, width: int, seed: int) -> None:
    row = Request(
        request_id="a",
        prompt="a",
        height=height,
        width=width,
        num_inference_steps=1,
        true_cfg_scale=1,
        seed=seed,
    )
    generator = torch.Generator("cpu").manual_seed(seed)
    expected = tiny_pipeline.prepare_latents(1, 16, height, width, torch.float32, CPU, generator)
    assert torch.equal(model.prepare_latents(row), expected[0])


def test_noise_leaves_the_global_generator_alone(model: Any) -> None:
    row = Request(
        request_id="a", prompt="a", height=64, width=64, num_inference_steps=1, true_cfg_scale=1, seed=0
    )
    before = torch.get_rng_state()
    model.prepare_latents(row)
    assert torch.equal(torch.get_rng_state(), before)


def test_positions_are_the_requests_own(model: Any, tiny_pipeline: Any) -> None:
    table = model.rotary_table(48, 80, 7)
    img, txt = tiny_pipeline.transformer.pos_embed([[(1, 3, 5)]], max_txt_seq_len=7, device=CPU)
    assert torch.equal(torch.complex(table.cos, table.sin), torch.cat((txt, img)))


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["guidance_embeds", "use_additional_t_cond"])
def test_transformer_keys_that_are_not_supported_are_named(tmp_path: Path, key: str) -> None:
    folder = build_tiny_qwen_image(tmp_path / "model", **{key: True})
    with pytest.raises(UnsupportedModelError, match=f"{key}=true"):
        load_model(EngineConfig(model=str(folder)))


@pytest.mark.parametrize("key", ["stochastic_sampling", "invert_sigmas"])
def test_noise_scheduler_keys_that_are_not_supported_are_named(
    tiny_model: Path, tmp_path: Path, key: str
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    edit_json(folder / "scheduler" / "scheduler_config.json", lambda config: config.update({key: True}))
    with pytest.raises(UnsupportedModelError, match=f"{key}=true"):
        load_model(EngineConfig(model=str(folder)))


def test_another_noise_scheduler_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    name = "FlowMatchHeunDiscreteScheduler"
    edit_json(folder / "model_index.json", lambda index: index.update({"scheduler": ["diffusers", name]}))
    with pytest.raises(UnsupportedModelError, match=name) as caught:
        load_model(EngineConfig(model=str(folder)))
    assert "FlowMatchEulerDiscreteScheduler" in str(caught.value)


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# --- other dtypes -----------------------------------------------------------------------------------


def test_bfloat16_draws_what_the_pipeline_draws_in_bfloat16(tiny_model: Path) -> None:
    """Not to the level: ours keeps latents in float32 between steps. Mean difference over a picture."""
    pipeline = diffusers.QwenImagePipeline.from_pretrained(tiny_model, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    rows = [replace(row, height=64, width=64) for row in random_rows(pipeline.tokenizer, 31, count=4)]
    model = load_model(EngineConfig(model=str(tiny_model), dtype="bfloat16"))
    assert model.dtype == torch.bfloat16
    for output in Engine(model, EngineConfig()).generate(rows):
        assert output.pixels is not None
        assert np.abs(output.pixels - draw_alone(pipeline, output.request).astype(float)).mean() < 4
