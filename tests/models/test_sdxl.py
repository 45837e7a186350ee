"""SDXL's rows in company against diffusers' pipeline given each row alone: CPU, float32, within 1/255."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from families import CASES, build_sdxl, sdxl_noise_scheduler
from qwen_rows import max_difference
from sdxl_rows import GUIDANCE, draw_alone, random_rows

from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.errors import BackendError, UnsupportedModelError
from offline_diffusion.models.loader import load_model, model_from_pipeline
from offline_diffusion.models.registry import Checkpoint, find_checkpoint
from offline_diffusion.request import Request, SamplingParams, StepState

MODES: dict[str, dict[str, Any]] = {
    # small budgets: requests join and leave in mid-run, and some are larger than the budget
    "pack": {"scheduling_policy": "pack", "max_num_seqs": 4, "max_num_batched_tokens": 900},
    "fifo": {"scheduling_policy": "fifo", "max_num_seqs": 3, "max_num_batched_tokens": 700},
    "all at once": {"max_num_seqs": 64, "max_num_batched_tokens": 1_000_000},
    "waves": {"step_execution": False, "max_num_seqs": 4},
    "serial": {"max_num_seqs": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdxl(tmp_path_factory.mktemp("sdxl"))


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return find_checkpoint(str(folder))


@pytest.fixture(scope="module")
def weights(folder: Path) -> Any:
    """diffusers' own pipeline over the folder."""
    return CASES["sdxl"].load(folder)


def with_scheduler(pipeline: Any, kind: str) -> Any:
    """The same weights with another noise scheduler."""
    parts = {**pipeline.components, "scheduler": sdxl_noise_scheduler(kind)}
    other = diffusers.StableDiffusionXLPipeline(**parts, add_watermarker=False)
    other.set_progress_bar_config(disable=True)
    return other


def wrap(pipeline: Any, checkpoint: Checkpoint) -> Any:
    return model_from_pipeline(pipeline, checkpoint, torch.device("cpu"))


def draw(model: Any, rows: list[Request], **options: Any) -> dict[str, Any]:
    engine = Engine(model, EngineConfig(**options))
    return {output.request_id: output for output in engine.generate(rows)}


Mix = list[tuple[Request, np.ndarray]]


@pytest.fixture(scope="module")
def mix(weights: Any, checkpoint: Checkpoint) -> Mix:
    """Rows and the pipeline's pictures of them; every guidance once."""
    rows = random_rows(checkpoint.capabilities, seed=1)
    return [(row, draw_alone(weights, row)) for row in rows]


@pytest.mark.parametrize("mode", MODES)
def test_every_row_of_a_mix_is_the_pipelines(
    weights: Any, checkpoint: Checkpoint, mix: Mix, mode: str
) -> None:
    outputs = draw(wrap(weights, checkpoint), [row for row, _ in mix], **MODES[mode])
    for row, expected in mix:
        output = outputs[row.request_id]
        assert (output.status, output.error) == ("ok", None)
        assert max_difference(output.pixels, expected) <= 1, row
        assert output.metrics.cfg_active == (row.guidance_scale is not None and row.guidance_scale > 1)


def test_the_mix_covers_what_it_is_for(mix: Mix) -> None:
    rows = [row for row, _ in mix]
    assert {(row.guidance_scale, row.negative_prompt) for row in rows} == set(GUIDANCE)
    assert len({row.num_inference_steps for row in rows}) >= 3
    sizes = [(row.height, row.width) for row in rows]
    assert max(sizes.count(size) for size in sizes) >= 3  # some share their steps
    assert len(set(sizes)) >= 2
    for _, picture in mix:
        assert picture.std() > 5  # no picture is blank


@pytest.mark.parametrize("kind", ["lightning", "dpm", "turbo", "v"])
def test_under_every_noise_scheduler(weights: Any, checkpoint: Checkpoint, kind: str) -> None:
    pipeline = with_scheduler(weights, kind)
    rows = [replace(row, height=64, width=96) for row in random_rows(checkpoint.capabilities, 5, count=4)]
    outputs = draw(wrap(pipeline, checkpoint), rows)
    for row in rows:
        difference = max_difference(outputs[row.request_id].pixels, draw_alone(pipeline, row))
        assert difference <= 1, row


@pytest.mark.parametrize("kind", ["base", "dpm", "turbo"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_picture_resumed_in_mid_denoise_is_the_same(
    weights: Any, checkpoint: Checkpoint, kind: str, step: int
) -> None:
    """What the noise scheduler remembers, and noise yet to be drawn, come back with the latents."""
    model = wrap(with_scheduler(weights, kind), checkpoint)
    rows = [
        replace(row, height=64, width=96, num_inference_steps=4 + index)
        for index, row in enumerate(random_rows(checkpoint.capabilities, 7, count=3))
    ]
    whole = draw(model, rows)
    engine = Engine(model, EngineConfig())
    for row in rows:
        engine.add_request(row)
    for _ in range(step):
        assert engine.step() == []
    states = engine.snapshot().states()
    assert states.keys() == whole.keys()
    for row in rows:
        output = resume(model, row, states[row.request_id])
        assert max_difference(output.pixels, whole[row.request_id].pixels) <= 1
        assert output.metrics.steps_run == row.num_inference_steps


def resume(model: Any, row: Request, state: StepState) -> Any:
    engine = Engine(model, EngineConfig())
    engine.add_request(row, state)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    (output,) = outputs
    return output


@pytest.mark.parametrize(
    "change",
    [
        {"original_size": (32, 1024)},
        {"crops_coords_top_left": (0, 77)},
        {"target_size": (512, 64)},
        {"prompt": "seven lamps"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_micro_conditioning_and_the_prompt_are_seen(
    weights: Any, checkpoint: Checkpoint, change: dict[str, Any]
) -> None:
    """Each changes the picture, so that the comparisons above would notice if it went missing."""
    row = random_rows(checkpoint.capabilities, 1)[0]
    plain = draw_alone(weights, row)
    assert max_difference(draw_alone(weights, replace(row, **change)), plain) > 10


def test_rows_of_other_micro_conditioning_share_a_step(weights: Any, checkpoint: Checkpoint) -> None:
    row = replace(random_rows(checkpoint.capabilities, 1)[0], height=64, width=64, num_inference_steps=3)
    rows = [replace(row, request_id=str(side), original_size=(side, 64)) for side in (64, 300, 2000)]
    engine = Engine(wrap(weights, checkpoint), EngineConfig())
    outputs = {output.request_id: output for output in engine.generate(rows)}
    assert engine.stats.num_steps == 3
    for own in rows:
        assert max_difference(outputs[own.request_id].pixels, draw_alone(weights, own)) <= 1


def test_a_long_prompt_is_cut_as_the_pipeline_cuts_it(weights: Any, checkpoint: Checkpoint) -> None:
    params = SamplingParams(height=64, width=64, num_inference_steps=2, negative_prompt="river " * 200)
    row = checkpoint.capabilities.resolve("long", "lamp storm " * 60, params, seed=3)
    output = draw(wrap(weights, checkpoint), [row])["long"]
    assert max_difference(output.pixels, draw_alone(weights, row)) <= 1
    lengths = [len(weights.tokenizer(text)["input_ids"]) for text in (row.prompt, row.negative_prompt)]
    assert output.metrics.truncated_tokens == 2 * sum(length - 77 for length in lengths)  # of both encoders
    assert output.metrics.num_tokens == 2 * (8 * 8 + 77)


def test_without_force_zeros_no_negative_prompt_is_an_empty_one(weights: Any, checkpoint: Checkpoint) -> None:
    capabilities = replace(checkpoint.capabilities, guides_from_nothing=False)
    params = SamplingParams(height=64, width=64, num_inference_steps=2, guidance_scale=4.0)
    row = capabilities.resolve("row", "a red cup", params, seed=3)
    assert row.negative_prompt == ""
    pipeline = with_scheduler(weights, "base")
    pipeline.register_to_config(force_zeros_for_empty_prompt=False)
    expected = draw_alone(pipeline, replace(row, negative_prompt=None))
    output = draw(wrap(weights, checkpoint), [row])["row"]
    assert max_difference(output.pixels, expected) <= 1
    zeros = draw(
        wrap(weights, checkpoint), [checkpoint.capabilities.resolve("z", "a red cup", params, seed=3)]
    )
    assert max_difference(zeros["z"].pixels, expected) > 5


def test_one_shape_is_a_step_and_two_shapes_are_two(weights: Any, checkpoint: Checkpoint) -> None:
    model = wrap(weights, checkpoint)
    rows = random_rows(checkpoint.capabilities, 3)
    sizes = {(row.height, row.width) for row in rows}
    assert len(sizes) > 1
    engine = Engine(model, EngineConfig(max_num_batched_tokens=1_000_000))
    outputs = list(engine.generate(rows))
    longest = {
        size: max(row.num_inference_steps for row in rows if (row.height, row.width) == size)
        for size in sizes
    }
    assert len(outputs) == len(rows)
    assert engine.stats.num_steps == sum(longest.values())


# --- checkpoints -----------------------------------------------------------------------------


def test_the_folder_is_found_and_loaded_by_its_class(folder: Path) -> None:
    model: Any = load_model(EngineConfig(model=str(folder), device="cpu"))
    capabilities = model.capabilities
    assert capabilities.family == "sdxl"
    assert (capabilities.default_height, capabilities.default_width) == (128, 128)
    assert (capabilities.size_multiple, capabilities.max_prompt_tokens) == (8, 77)
    assert capabilities.default_guidance_scale == 5.0
    assert capabilities.default_num_inference_steps == 50
    assert model.attention_backend == "sdpa"
    assert model.num_latent_channels == 4


def test_a_turbo_checkpoint_has_its_cards_defaults(folder: Path, tmp_path: Path) -> None:
    turbo = tmp_path / "sdxl-turbo"
    turbo.symlink_to(folder)
    capabilities = find_checkpoint(str(turbo)).capabilities
    assert capabilities.default_num_inference_steps == 1
    row = capabilities.resolve("row", "a red cup", SamplingParams(), seed=1)
    assert row.guidance_scale == 0.0
    assert not row.cfg_active


def test_a_multistep_checkpoint_carries_its_memory(weights: Any, checkpoint: Checkpoint) -> None:
    assert wrap(with_scheduler(weights, "dpm"), checkpoint).num_latent_channels == 8


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("unet", "time_cond_proj_dim", 16),
        ("unet", "in_channels", 9),
        ("unet", "class_embed_type", "timestep"),
        ("unet", "addition_embed_type", None),
        ("vae", "latents_mean", [0.0] * 4),
    ],
)
def test_what_it_lacks_is_refused_by_name(
    weights: Any, checkpoint: Checkpoint, part: str, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = getattr(weights, part)
    monkeypatch.setattr(module, "_internal_dict", type(module.config)(dict(module.config) | {key: value}))
    with pytest.raises(UnsupportedModelError, match=key):
        wrap(weights, checkpoint)


def test_an_attention_backend_that_does_not_work_here_is_refused(
    weights: Any, checkpoint: Checkpoint
) -> None:
    with pytest.raises(BackendError, match="fa3"):
        model_from_pipeline(weights, checkpoint, torch.device("cpu"), "fa3")


def test_a_text_encoder_that_is_missing_is_named(weights: Any, checkpoint: Checkpoint) -> None:
    parts = {**weights.components, "text_encoder": None, "tokenizer": None}
    with pytest.raises(UnsupportedModelError, match="tokenizer"):
        wrap(diffusers.StableDiffusionXLPipeline(**parts, add_watermarker=False), checkpoint)
