"""Loading a checkpoint: devices, dtypes, and folders that are damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offline_diffusion.config import EngineConfig
from offline_diffusion.errors import BackendError, ModelError
from offline_diffusion.models.loader import load_model, resolve_device, resolve_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WEIGHTS = ("transformer/diffusion_pytorch_model", "vae/diffusion_pytorch_model", "text_encoder/model")


def test_auto_follows_the_machine() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == CPU


@pytest.mark.parametrize("name", ["gpu", "", "cpu:x", "cuda:-1"])
def test_a_device_that_is_no_name(name: str) -> None:
    with pytest.raises(BackendError, match=r"device .* allowed: auto, cpu, cuda, cuda:N"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["mps", "meta"])
def test_a_device_that_is_not_supported(name: str) -> None:
    with pytest.raises(BackendError, match=f"device '{name}' is not supported"):
        resolve_device(name)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(BackendError, match=r"device 'cuda:99' is not there: \d+ CUDA devices found"):
        resolve_device("cuda:99")


def test_dtypes() -> None:
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", CUDA) == torch.bfloat16
    assert resolve_dtype("float32", CUDA) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_parts_are_loaded_in_the_dtype(tiny_model: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    model: Any = load_model(EngineConfig(model=str(tiny_model), device="cpu", dtype=name))
    assert model.dtype == dtype
    pipeline = model._pipeline
    for part in (pipeline.transformer, pipeline.vae, pipeline.text_encoder):
        assert {parameter.dtype for parameter in part.parameters()} == {dtype}


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [_halve, lambda path: path.write_bytes(b""), Path.unlink])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_cannot_be_read(folder: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(folder / f"{name}.safetensors")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    "changes", [{"num_attention_heads": 3}, {"num_attention_heads": "two"}, {"num_layers": 5}], ids=str
)
def test_a_config_that_does_not_fit_its_weights(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError):
        load_model(EngineConfig(model=str(folder)))


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    torch.save(_Malice(folder / "opened"), path.with_suffix(".bin"))
    path.unlink()
    with pytest.raises(ModelError, match=r"hint: weights are read from \.safetensors files only"):
        load_model(EngineConfig(model=str(folder)))
    assert not (folder / "opened").exists()


class _Malice:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._trace,)


def test_an_unknown_attention_backend_stops_before_work(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), device="cpu", attention_backend="fa3")
    with pytest.raises(BackendError, match="attention backend 'fa3' does not work here: needs a CUDA device"):
        load_model(config)


def test_a_tokenizer_that_does_not_fit_the_template(folder: Path) -> None:
    """Without its vocabulary transformers makes an empty tokenizer, which would draw wrong pictures."""
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (folder / "tokenizer" / name).unlink(missing_ok=True)
    with pytest.raises(ModelError, match="template"):
        load_model(EngineConfig(model=str(folder), device="cpu"))
