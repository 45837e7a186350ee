"""The model of the package: the default, small, drawing what diffusers draws, and what captions say."""

from __future__ import annotations

import shutil
import tomllib
from glob import glob
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from qwen_rows import draw_alone, max_difference
from world.scorer import Score, score
from world.supply import Example, sample_examples

import offline_diffusion
from offline_diffusion import OfflineDiffusion, SamplingParams
from offline_diffusion.config import DEFAULT_MODEL, EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.errors import ModelError
from offline_diffusion.models import registry
from offline_diffusion.models.loader import load_model
from offline_diffusion.models.registry import find_checkpoint
from offline_diffusion.request import Request

PACKAGE = Path(offline_diffusion.__file__).parent
FOLDER = PACKAGE / "models" / "shapes"
MAX_BYTES = 30_000_000

SIZE = (128, 128)
NUM_CAPTIONS = 20
"""Of each kind, without a relation and with one."""

LEAST = {"things": 0.65, "relation": 0.8}
"""Far below the shares in the model's card, as few captions vary widely."""


def test_it_is_small_and_all_of_it_is_package_data() -> None:
    files = {path for path in FOLDER.rglob("*") if path.is_file()}
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert {path.suffix for path in files} == {".json", ".jsonl", ".md", ".safetensors"}  # nothing could run
    with (PACKAGE.parent / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["offline_diffusion"]
    found = {path for pattern in patterns for path in glob(pattern, root_dir=PACKAGE, recursive=True)}
    assert files <= {PACKAGE / path for path in found}


def test_it_is_what_draws_where_no_model_is_named() -> None:
    assert EngineConfig().model == DEFAULT_MODEL == "shapes"
    checkpoint = find_checkpoint(DEFAULT_MODEL)
    assert (Path(checkpoint.source), checkpoint.identity["model"]) == (FOLDER, "shapes")
    request = checkpoint.capabilities.resolve("0", "a red circle", SamplingParams(), seed=0)
    assert (request.height, request.width, request.num_inference_steps) == (128, 128, 20)
    assert request.true_cfg_scale == 4.0


# --- a package that is not whole -------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that takes the packaged folder's place."""
    folder = shutil.copytree(FOLDER, tmp_path / "shapes")
    monkeypatch.setattr(registry, "PACKAGED_FOLDER", folder)
    return Path(folder)


@pytest.mark.parametrize("missing", [".", "model_index.json", "transformer/config.json"])
def test_what_is_missing_is_named_and_how_to_get_it(damaged: Path, missing: str) -> None:
    path = damaged / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    name = "model_index.json" if missing == "." else missing
    with pytest.raises(ModelError, match=f"shapes has no {name}") as caught:
        find_checkpoint(DEFAULT_MODEL)
    assert caught.value.hint == "this model comes with offline-diffusion: install the package again"


@pytest.mark.parametrize("torn", [True, False])
def test_weights_that_are_missing_or_torn(damaged: Path, torn: bool) -> None:
    path = damaged / "vae" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:1000]) if torn else path.unlink()
    with pytest.raises(ModelError, match="shapes cannot be loaded") as caught:
        load_model(EngineConfig(device="cpu"))
    assert "install the package again" in str(caught.value)


# --- diffusers -------------------------------------------------------------------------------------


def row(prompt: str, height: int, width: int, steps: int, scale: float, negative: str | None) -> Request:
    return Request(
        request_id=prompt,
        prompt=prompt,
        negative_prompt=negative,
        true_cfg_scale=scale,
        height=height,
        width=width,
        num_inference_steps=steps,
        seed=2**40 + steps,
    )


def test_pictures_are_those_of_diffusers() -> None:
    """Of rows that share all steps and are alike in nothing; loaded as a user of diffusers loads a folder."""
    rows = [
        row("a red circle left of a blue star", 64, 128, 6, 4.0, " "),
        row("Two small green hearts on a beige background.", 96, 96, 9, 1.0, None),
        row("a cross", 160, 96, 4, 7.0, "a black cross"),
        row("a white ring", 128, 128, 20, 2.5, ""),
    ]
    pipeline = diffusers.QwenImagePipeline.from_pretrained(FOLDER, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    engine = Engine(load_model(EngineConfig(device="cpu")), EngineConfig())
    outputs = {output.request_id: output for output in engine.generate(rows)}
    for own in rows:
        picture = draw_alone(pipeline, own)
        assert picture.std() > 8  # where nothing is drawn, any two agree
        assert max_difference(outputs[own.request_id].pixels, picture) <= 1, own


# --- captions --------------------------------------------------------------------------------------


def drawn_and_scored(examples: list[Example], **guidance: Any) -> list[Score]:
    """The pictures of captions by the default model, read back by the world's scorer."""
    height, width = SIZE
    params = [SamplingParams(height=height, width=width, seed=at, **guidance) for at in range(len(examples))]
    outputs = OfflineDiffusion(device="cpu").generate([e.caption for e in examples], params, ordered=True)
    return [
        score(np.asarray(output.image), example.scene)
        for output, example in zip(outputs, examples, strict=True)
    ]


@pytest.mark.slow
def test_captions_that_training_never_saw_come_true() -> None:
    """In 20 steps, with guidance 4. A wrong scheduler, template or weight draws nothing of the kind."""
    mixed = sample_examples("shipped/mixed", SIZE, NUM_CAPTIONS, related=0.0, held_out=True)
    related = sample_examples("shipped/related", SIZE, NUM_CAPTIONS, related=1.0, held_out=True)
    scores = drawn_and_scored(mixed + related, negative_prompt=" ")
    things = float(np.mean([own.things for own in scores]))
    relations = [own.relation for own in scores if own.relation is not None]
    assert len(relations) == NUM_CAPTIONS
    print(f"things {things:.3f}, relations {np.mean(relations):.3f}")
    assert things >= LEAST["things"]
    assert float(np.mean(relations)) >= LEAST["relation"]
