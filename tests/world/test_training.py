"""Both trainings in miniature: cut into sittings they are the uncut ones, and their folder draws."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_denoiser
import train_vae
from click.testing import CliRunner
from safetensors.torch import load_file
from world import curves
from world.recipe import DEFAULTS, TRANSFORMER_CONFIG

from offline_diffusion import OfflineDiffusion, SamplingParams

pytestmark = pytest.mark.slow

STEPS = 12
VAE_FLAGS = ("--steps=10", "--pixels=4096", "--pool=65536", "--measured=2")
SEED = 3
"""Its pool of one chunk is of 64 by 64 pixels."""


class TickingClock:
    """Four seconds pass whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 4
        return self.now


def command(module: Any, out: Path, *flags: str) -> int:
    result = CliRunner().invoke(module.main, [str(out), "--no-compile", f"--seed={SEED}", *flags])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code


def train(out: Path, *flags: str) -> int:
    """Some steps of the denoiser; its exit code."""
    small = ("--examples=64", "--slots=6", "--layouts=2")
    return command(train_denoiser, out, f"--steps={STEPS}", *small, *flags)


def curve(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def trained_vae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a VAE that has seen next to nothing. The scripts set how exact products are."""
    exactness = torch.get_float32_matmul_precision()
    for module in (train_vae, train_denoiser, curves):
        monkeypatch.setattr(module, "time", TickingClock())
    out = tmp_path / "cut"
    assert command(train_vae, out, *VAE_FLAGS) == 0
    yield out
    torch.set_float32_matmul_precision(exactness)


def test_a_cut_training_is_the_uncut_one_and_its_folder_draws(trained_vae: Path, tmp_path: Path) -> None:
    first, *_, last = curve(trained_vae / "vae.jsonl")
    assert first["seed"] == SEED
    assert last["steps"] == 10
    assert 0 < last["held_out_psnr_db"] < 40  # after ten steps

    cut, uncut = trained_vae, tmp_path / "uncut"
    assert train(cut, "--sitting=36") == 75
    assert not (cut / "model").exists()
    shutil.copytree(cut, uncut, ignore=shutil.ignore_patterns("state.pt", "denoiser.jsonl"))
    (stop,) = [line for line in curve(cut / "denoiser.jsonl") if line.get("interrupted")]
    assert 0 < stop["step"] < STEPS
    assert train(cut) == 0
    assert train(uncut) == 0

    lines = curve(cut / "denoiser.jsonl")
    assert lines[0]["config"] == json.loads(json.dumps(TRANSFORMER_CONFIG))
    steps = [line["step"] for line in lines if "step" in line]
    assert steps == sorted(steps)
    assert lines[-1]["steps"] == STEPS
    losses = [line["step"] for line in lines if "loss" in line]
    assert min(losses) < stop["step"] < max(losses)
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    assert all(earlier < later for earlier, later in pairwise(seconds))
    weights = "model/transformer/diffusion_pytorch_model.safetensors"
    assert (cut / weights).read_bytes() == (uncut / weights).read_bytes()

    engine = OfflineDiffusion(str(cut / "model"), device="cpu")
    params = SamplingParams(height=64, width=96, num_inference_steps=2, negative_prompt=" ", seed=1)
    (output,) = engine.generate(["a red circle"], params)
    assert output.status == "ok"
    assert np.asarray(output.image).shape == (64, 96, 3)
    assert json.loads((cut / "model/generation_config.json").read_text()) == DEFAULTS
    configs = [path.read_text(encoding="utf-8") for path in (cut / "model").glob("*/config.json")]
    assert len(configs) == 3
    assert not any(str(tmp_path) in text or "float32" in text for text in configs)


def test_a_vae_that_goes_on_begins_where_the_other_ended(trained_vae: Path, tmp_path: Path) -> None:
    """The same flags without it would make the same weights."""
    assert command(train_vae, tmp_path, *VAE_FLAGS, f"--init={trained_vae / 'vae'}") == 0
    before, after = (
        load_file(out / "vae/diffusion_pytorch_model.safetensors")["decoder.conv_in.weight"].float()
        for out in (trained_vae, tmp_path)
    )
    assert 0 < (after - before).abs().mean() < 0.05 * before.abs().mean()
