"""The model ``tiny``: made on the spot, the same every time, and worth looking at."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.errors import ModelError
from offline_diffusion.models import tiny
from offline_diffusion.models.tiny import build_tiny_qwen_image, is_intact, tiny_model_folder


def draw(
    pipeline: Any, prompt: str = "a red cube on a blue table", *, seed: int = 1, **options: Any
) -> np.ndarray:
    """One image by diffusers, int ``[H, W, 3]``."""
    options = {"height": 64, "width": 96, "num_inference_steps": 4, "negative_prompt": " ", **options}
    generator = torch.Generator("cpu").manual_seed(seed)
    image = pipeline(prompt, generator=generator, **options).images[0]
    return np.asarray(image).astype(int)


def file_digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_pictures_are_neither_flat_nor_saturated(tiny_pipeline: Any) -> None:
    image = draw(tiny_pipeline, height=128, width=128, num_inference_steps=8)
    assert image.shape == (128, 128, 3)
    assert image.std(axis=(0, 1)).min() > 10
    assert np.isin(image, (0, 255)).mean() < 0.1


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "two green cats in the snow"},
        {"seed": 2},
        {"true_cfg_scale": 1.0},
        {"num_inference_steps": 7},
        {"negative_prompt": "blurry, dark"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_pictures_depend_on(tiny_pipeline: Any, other: dict[str, Any]) -> None:
    difference = np.abs(draw(tiny_pipeline) - draw(tiny_pipeline, **other))
    assert difference.mean() > 5


def test_same_request_same_picture(tiny_pipeline: Any) -> None:
    assert (draw(tiny_pipeline) == draw(tiny_pipeline)).all()


def test_components_are_those_of_the_real_checkpoint(tiny_pipeline: Any) -> None:
    names = {name: type(part).__name__ for name, part in tiny_pipeline.components.items()}
    assert names == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
        "transformer": "QwenImageTransformer2DModel",
        "vae": "AutoencoderKLQwenImage",
    }
    assert tiny_pipeline.vae_scale_factor == 8
    config = tiny_pipeline.scheduler.config
    assert (config.use_dynamic_shifting, config.shift_terminal, config.max_shift) == (True, 0.02, 0.9)


def test_template_prefix_is_34_tokens(tiny_pipeline: Any) -> None:
    template, dropped = tiny_pipeline.prompt_template_encode, tiny_pipeline.prompt_template_encode_start_idx
    prefix = template.split("{}")[0]
    assert prefix == tiny.TEMPLATE_PREFIX
    tokenizer = tiny_pipeline.tokenizer
    assert len(tokenizer(prefix).input_ids) == dropped == 34
    whole = tokenizer(template.format("a cat")).input_ids
    assert tokenizer.convert_ids_to_tokens(whole[34:]) == [
        "a", "Ġcat", "<|im_end|>", "Ċ", "<|im_start|>", "assistant", "Ċ",
    ]  # fmt: skip


def test_ordinary_words_are_few_tokens(tiny_pipeline: Any) -> None:
    prompt = (
        "An astronaut photographed the quiet harbour at sunset, while hungry gulls circled above the boats"
    )
    counts = [len(tiny_pipeline.tokenizer(f" {word}").input_ids) for word in prompt.replace(",", "").split()]
    assert max(counts) <= 3
    assert np.mean(counts) < 2


@functools.cache
def _tokenizer() -> Any:
    return tiny.make_tokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_encodes_and_comes_back(text: str) -> None:
    tokenizer = _tokenizer()
    decoded = tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False)
    assert decoded == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("text", ["🦊👩‍🚀", "一只红色的狐狸", "a\0b", "\u202e\ufeff", "é"])
def test_odd_text_draws(tiny_pipeline: Any, text: str) -> None:
    assert draw(tiny_pipeline, text, num_inference_steps=2).std() > 5


def test_rebuild_is_the_same_bytes_and_leaves_global_randomness_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    built = build_tiny_qwen_image(tmp_path / "again")
    after = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert file_digests(built) == file_digests(tiny_model)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_folder_is_small(tiny_model: Path) -> None:
    assert sum(path.stat().st_size for path in tiny_model.rglob("*")) < 10_000_000


def test_defaults_file(tiny_model: Path) -> None:
    defaults = json.loads((tiny_model / "generation_config.json").read_bytes())
    assert defaults == {"height": 256, "width": 256, "num_inference_steps": 12, "true_cfg_scale": 4.0}


def test_no_layer_is_idle(tiny_pipeline: Any) -> None:
    """The noise prediction depends on every parameter but the end of the last block's text stream."""
    transformer = copy.deepcopy(tiny_pipeline.transformer).requires_grad_(True)
    latents = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(0))
    embeds = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1))
    prediction = transformer(
        hidden_states=latents,
        encoder_hidden_states=embeds,
        timestep=torch.tensor([0.6]),
        img_shapes=[[(1, 4, 6)]],
        return_dict=False,
    )[0]
    prediction.square().sum().backward()
    idle = {
        name
        for name, parameter in transformer.named_parameters()
        if parameter.grad is None or parameter.grad.abs().max() < 1e-3
    }
    last = "transformer_blocks.1"
    unused = [f"{last}.txt_mlp.net.0.proj", f"{last}.txt_mlp.net.2", f"{last}.attn.to_add_out"]
    queries = {f"{last}.attn.add_q_proj.{kind}" for kind in ("weight", "bias")}
    assert idle == {f"{name}.{kind}" for name in unused for kind in ("weight", "bias")} | queries | {
        f"{last}.attn.norm_added_q.weight"
    }
    assert not any((parameter == 0).all() for parameter in transformer.parameters())


def test_other_sizes_of_the_transformer(tmp_path: Path) -> None:
    import diffusers

    folder = build_tiny_qwen_image(
        tmp_path / "deep" / "wide",
        seed=3,
        num_layers=1,
        num_attention_heads=3,
        attention_head_dim=64,
        axes_dims_rope=(16, 24, 24),
        zero_cond_t=True,
    )
    transformer = diffusers.QwenImageTransformer2DModel.from_pretrained(folder / "transformer")
    assert (len(transformer.transformer_blocks), transformer.inner_dim) == (1, 192)
    assert transformer.config.zero_cond_t is True


def test_rotary_axes_must_fill_a_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sum to attention_head_dim 32"):
        build_tiny_qwen_image(tmp_path / "m", axes_dims_rope=(8, 12, 14))


def test_refuses_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ModelError, match="holds other files"):
        build_tiny_qwen_image(tmp_path)
    assert (tmp_path / "model_index.json").read_text() == "{}"


def test_it_is_cached(tiny_model: Path) -> None:
    modified = (tiny_model / "model_index.json").stat().st_mtime_ns
    assert tiny_model_folder() == tiny_model
    assert tiny_model.parent == Path(os.environ["XDG_CACHE_HOME"]) / "offline_diffusion"
    assert (tiny_model / "model_index.json").stat().st_mtime_ns == modified


@pytest.fixture
def own_cache(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the model in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Path(shutil.copytree(tiny_model, tmp_path / "offline_diffusion" / tiny_model.name))


def flip_a_byte(folder: Path) -> None:
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped byte": flip_a_byte,
    "torn file": lambda folder: os.truncate(folder / "tokenizer" / "tokenizer.json", 100),
    "missing folder": lambda folder: shutil.rmtree(folder / "vae"),
    "missing digests": lambda folder: (folder / "digests.json").unlink(),
    "foreign digests": lambda folder: (folder / "digests.json").write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_cache_is_rebuilt(own_cache: Path, tiny_model: Path, damage: str) -> None:
    DAMAGE[damage](own_cache)
    assert not is_intact(own_cache)
    assert tiny_model_folder() == own_cache
    assert file_digests(own_cache) == file_digests(tiny_model)
    assert [path.name for path in own_cache.parent.iterdir()] == [own_cache.name]


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="hint: set XDG_CACHE_HOME"):
        tiny_model_folder()


def test_racing_builders(tmp_path: Path, tiny_model: Path) -> None:
    """Whoever loses the race replaces files by the same files: nothing is missing at any time."""
    script = "from offline_diffusion.models.tiny import tiny_model_folder; print(tiny_model_folder())"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    racers = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [racer.communicate(timeout=120)[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert outputs[0] == outputs[1]
    assert file_digests(Path(outputs[0])) == file_digests(tiny_model)
    assert len(list(Path(outputs[0]).parent.iterdir())) == 1
