"""Whole jobs of a family that shares steps by shape: SDXL under a noise scheduler that remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from families import CASES, build_sdxl
from job_fakes import Runner, at_step, decode, make_rows, read_table, write_jsonl

from offline_diffusion.cli.main import main
from offline_diffusion.config import EngineConfig
from offline_diffusion.data.rows import ManifestRow, RowDefaults, RowFault, RowImages, resolve_row
from offline_diffusion.data.work import WorkMeter
from offline_diffusion.job import StopFlag
from offline_diffusion.models.loader import load_model
from offline_diffusion.models.registry import find_checkpoint
from offline_diffusion.request import MICRO_CONDITIONING, SamplingParams

NUM_IMAGES = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdxl(tmp_path_factory.mktemp("sdxl") / "model", kind="dpm")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = make_rows(NUM_IMAGES)
    for index, row in enumerate(rows):
        row |= {"height": 64, "width": [64, 96][index % 2], "num_inference_steps": 3 + index % 3}
        row |= [{}, {}, {"original_size": [512, 1024]}, {"crops_coords_top_left": [0, 64]}][index % 4]
        row |= [{"guidance_scale": 1.0}, {"negative_prompt": "grey"}, {"cfg": 3.0}][index % 3]
    return write_jsonl(tmp_path_factory.mktemp("manifest") / "m.jsonl", rows)


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    return Runner(load_model(EngineConfig(model=str(folder), device="cpu")))


@pytest.fixture(scope="module")
def images(runner: Runner, folder: Path, manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("whole")
    summary = runner.run(manifest, out, model=str(folder), device="cpu")
    assert summary.num_ok == NUM_IMAGES
    return read_table(out, "images")


def test_a_jobs_images_are_the_pipelines(images: list[dict[str, Any]], folder: Path) -> None:
    """Given what the dataset records of each row."""
    pipeline = CASES["sdxl"].load(folder)
    assert {row["guidance_scale"] for row in images} == {1.0, 3.0, 5.0}
    for row in images:
        assert row["guidance_scale"] == row["true_cfg_scale"]
        names = ("prompt", "negative_prompt", "guidance_scale", "height", "width", "num_inference_steps")
        (image,) = pipeline(
            **{name: row[name] for name in names},
            **{name: tuple(row[name]) for name in MICRO_CONDITIONING[:2] if row[name] is not None},
            generator=torch.Generator("cpu").manual_seed(row["seed"]),
        ).images
        difference = np.abs(decode(row["image"]).astype(int) - np.asarray(image).astype(int))
        assert difference.max() <= 1, row["id"]


def test_stopped_again_and_again_the_images_are_the_same(
    images: list[dict[str, Any]], runner: Runner, folder: Path, manifest: Path, tmp_path: Path
) -> None:
    """What the noise scheduler remembers is in the step checkpoints, so no step is done again."""
    total, num_runs, summary = 0, 0, None
    while summary is None or summary.interrupted:
        stop = StopFlag()
        runner.on_step = at_step(2 + num_runs % 2, lambda stop=stop: stop.request("SIGTERM"))  # type: ignore[misc]
        summary = runner.run(manifest, tmp_path, model=str(folder), device="cpu", max_num_seqs=3, stop=stop)
        total += 0 if runner.engine is None else runner.engine.num_image_steps
        num_runs += 1
        assert num_runs < 40
    assert num_runs > 3
    assert total == sum(row["num_inference_steps"] for row in images)
    again = {row["id"]: decode(row["image"]).astype(int) for row in read_table(tmp_path, "images")}
    for row in images:
        assert np.abs(again[row["id"]] - decode(row["image"]).astype(int)).max() <= 1


def test_a_plan_counts_both_branches_and_steps_of_one_shape(folder: Path, manifest: Path) -> None:
    result = CliRunner().invoke(main, ["plan", str(manifest), "--model", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert (plan["num_images"], plan["num_cfg_images"], plan["num_guidance_off_rows"]) == (9, 6, 0)
    assert plan["text_tokens"] == 77 * (9 + 6)
    assert plan["num_steps"] == 5 + 5  # the longest of each shape, all others beside it
    assert plan["max_num_batched_tokens"] == 4 * 16_896  # the engine's on a CPU, in tokens of 8 × 8 pixels


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("original_size", "512x512", "must be two integers"),
        ("original_size", [512], "must be two integers"),
        ("target_size", [512, -1], "must be two integers"),
        ("guidance_rescale", 0.7, "rescaled guidance is not supported"),
        ("prompt_2", "a lamp", "second encoder alone is not supported"),
    ],
)
def test_what_a_unet_cannot_mix_and_what_makes_no_sense_is_a_fault_of_its_row(
    folder: Path, column: str, value: object, reason: str
) -> None:
    row = ManifestRow(3, "c", "m.jsonl", 4, "hash", "a cup", SamplingParams(), {column: value})
    capabilities = find_checkpoint(str(folder)).capabilities
    fault = resolve_row(row, capabilities, RowDefaults())
    assert isinstance(fault, RowFault)
    assert fault.column == column
    assert reason in fault.reason
    assert WorkMeter(capabilities, RowDefaults()).measure(row) == fault.reason


@pytest.mark.parametrize("value", [[768, 1024], (768, 1024), "[768, 1024]", " (768,1024) ", "768, 1024"])
def test_pairs_are_read_from_lists_and_text(folder: Path, value: object) -> None:
    row = ManifestRow(3, "c", "m.jsonl", 4, "hash", "a cup", SamplingParams(), {"original_size": value})
    resolved = resolve_row(row, find_checkpoint(str(folder)).capabilities, RowDefaults())
    assert isinstance(resolved, RowImages)
    assert resolved.first.request.original_size == (768, 1024)
    assert resolved.first.request.target_size is None
