"""Which family a checkpoint is of and what it can do, read from its configs alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offline_diffusion.errors import ModelError, UnsupportedModelError
from offline_diffusion.models.capabilities import BatchKind
from offline_diffusion.models.registry import capabilities_for, find_checkpoint

CONFIGS = ("model_index.json", "transformer/config.json", "vae/config.json", "generation_config.json")


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """The configs of the tiny model, without its weights."""
    for name in CONFIGS:
        target = tmp_path / "model" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tiny_model / name, target)
    return tmp_path / "model"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_capabilities_of_a_folder(folder: Path) -> None:
    transformer = json.loads((folder / "transformer/config.json").read_text())
    defaults = json.loads((folder / "generation_config.json").read_text())
    capabilities = capabilities_for(str(folder))
    assert capabilities.family == "qwen_image"
    assert capabilities.pipeline == "QwenImagePipeline"
    assert capabilities.batch_kind is BatchKind.PACKED
    assert capabilities.size_multiple == capabilities.patch_pixels == 16
    assert capabilities.num_layers == transformer["num_layers"]
    assert capabilities.hidden_size == (
        transformer["num_attention_heads"] * transformer["attention_head_dim"]
    )
    for name in ("height", "width", "num_inference_steps", "true_cfg_scale"):
        assert getattr(capabilities, f"default_{name}") == defaults[name]


def test_without_its_own_defaults_a_checkpoint_has_those_of_the_pipeline(folder: Path) -> None:
    """diffusers' ``QwenImagePipeline.__call__``: 1024 pixels, 50 steps, scale 4."""
    (folder / "generation_config.json").unlink()
    capabilities = capabilities_for(str(folder))
    assert (capabilities.default_height, capabilities.default_width) == (1024, 1024)
    assert capabilities.default_num_inference_steps == 50
    assert capabilities.default_true_cfg_scale == 4.0
    assert capabilities.max_prompt_tokens == 512


def test_sizes_end_where_the_position_tables_end(folder: Path, tiny_pipeline: Any) -> None:
    """4096 places from an image's middle: half of its longer side, then 512 text tokens."""
    capabilities = capabilities_for(str(folder))
    table = tiny_pipeline.transformer.pos_embed
    patches = capabilities.max_size // 16
    img, txt = table([[(1, 1, patches)]], max_txt_seq_len=512, device=None)
    assert (img.shape[0], txt.shape[0]) == (patches, 512)
    assert table([[(1, 1, patches + 2)]], max_txt_seq_len=512, device=None)[1].shape[0] < 512


@pytest.mark.parametrize("name", ["shapes", "tiny"])
def test_two_models_have_names_and_need_no_download(name: str, tiny_model: Path) -> None:
    checkpoint = find_checkpoint(name)
    assert checkpoint.identity["model"] == name
    assert (Path(checkpoint.source) == tiny_model) is (name == "tiny")
    assert (Path(checkpoint.source) / "model_index.json").is_file()


def test_identity_follows_the_configs(folder: Path) -> None:
    before = find_checkpoint(str(folder)).identity
    assert find_checkpoint(str(folder)).identity == before
    edit(folder / "transformer/config.json", lambda config: config.update(num_layers=9))
    assert find_checkpoint(str(folder)).identity != before
    assert find_checkpoint(str(folder), "v2").identity["revision"] == "v2"


@pytest.mark.parametrize("name", ["transformer/diffusion_pytorch_model", "vae/diffusion_pytorch_model"])
def test_identity_follows_the_weights(tiny_model: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    before = find_checkpoint(str(folder)).identity
    path = folder / f"{name}.safetensors"
    half = path.stat().st_size // 2
    path.write_bytes(path.read_bytes()[:half] + b"\x07" * half)  # as another fine-tune: same size
    after = find_checkpoint(str(folder)).identity
    assert {key for key in before if before[key] != after[key]} == {"content"}


def test_keys_that_a_config_leaves_out_are_diffusers_defaults(folder: Path) -> None:
    for key in ("num_layers", "num_attention_heads", "attention_head_dim"):
        edit(folder / "transformer/config.json", lambda config, key=key: config.pop(key))  # type: ignore[misc]
    capabilities = capabilities_for(str(folder))
    assert (capabilities.num_layers, capabilities.hidden_size) == (60, 24 * 128)


@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json", "vae/config.json"])
def test_a_missing_config_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"has no {name}") as caught:
        find_checkpoint(str(folder))
    assert caught.value.hint


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("text", ["{", "[]", "null", "\x00"])
def test_a_damaged_config_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ModelError, match=name):
        find_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("height", "tall"),
        ("width", 0),
        ("num_inference_steps", 2.5),
        ("true_cfg_scale", -1),
        ("guidance_scale", "high"),
    ],
)
def test_defaults_that_make_no_sense_are_named(folder: Path, key: str, value: Any) -> None:
    edit(folder / "generation_config.json", lambda config: config.update({key: value}))
    with pytest.raises(ModelError, match=f"generation_config.json: {key} must be"):
        find_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["HunyuanDiTPipeline", None])
def test_a_pipeline_of_no_family_is_named(folder: Path, name: str | None) -> None:
    edit(folder / "model_index.json", lambda index: index.update({"_class_name": name}))
    with pytest.raises(UnsupportedModelError, match=f"pipeline {name} is not supported.*QwenImagePipeline"):
        find_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing", "/no/such/folder", "a b", "x" * 300])
def test_a_model_that_is_nowhere(name: str) -> None:
    with pytest.raises(ModelError, match="is no folder here and cannot be had from the hub") as caught:
        find_checkpoint(name)
    assert caught.value.hint


def test_parts_from_other_libraries_are_not_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers imports whatever library a part names; here a checkpoint brings no code."""
    (folder.parent / "malice.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(folder.parent))
    edit(folder / "model_index.json", lambda index: index.update(vae=["malice", "AutoencoderKLQwenImage"]))
    with pytest.raises(ModelError, match="takes vae from 'malice', allowed: diffusers, transformers"):
        find_checkpoint(str(folder))
    edit(folder / "model_index.json", lambda index: index.update(vae=[None, None]))
    find_checkpoint(str(folder))


def test_a_slip_of_the_pen_is_guessed() -> None:
    with pytest.raises(ModelError) as caught:
        find_checkpoint("shape")
    assert caught.value.hint == "did you mean 'shapes'?"


def test_reading_capabilities_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys; from offline_diffusion.models.registry import capabilities_for; "
        f"capabilities_for({str(folder)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
