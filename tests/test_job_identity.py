"""What makes two jobs the same: what is drawn and how, not how the user spells it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from job_fakes import SMALL, Runner, make_rows, write_jsonl

from offline_diffusion.errors import BackendError, JobMismatchError
from offline_diffusion.models import loader

OPTIONS: dict[str, Any] = {"shard_size": 2, **SMALL}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "m.jsonl", make_rows(2))


def differences(error: pytest.ExceptionInfo[JobMismatchError]) -> list[str]:
    """The lines of the message that name a difference."""
    return [line.strip() for line in error.value.message.splitlines()[1:]]


def test_job_json_holds_what_auto_comes_to(manifest: Path, tmp_path: Path) -> None:
    Runner().run(manifest, tmp_path / "out", device="cpu", **OPTIONS)
    options = json.loads((tmp_path / "out" / "job.json").read_text())["options"]
    found = {name: options[name] for name in ("dtype", "device", "attention_backend")}
    assert found == {"dtype": "float32", "device": "cpu", "attention_backend": "sdpa"}


def test_auto_and_what_it_comes_to_are_one_job(manifest: Path, tmp_path: Path) -> None:
    Runner().run(manifest, tmp_path / "out", device="cpu", **OPTIONS)
    said = {"dtype": "float32", "device": "cpu", "attention_backend": "sdpa"}
    assert Runner().run(manifest, tmp_path / "out", **said, **OPTIONS).num_resumed == 2


def test_a_gpu_does_not_go_on_with_a_job_of_a_cpu(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Runner().run(manifest, tmp_path / "out", device="cpu", **OPTIONS)
    monkeypatch.setattr(loader, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("offline_diffusion.attention.backends.load_backend", lambda *_: ("fa3", None))
    with pytest.raises(JobMismatchError) as caught:
        Runner().run(manifest, tmp_path / "out", **OPTIONS)
    assert sorted(differences(caught)) == [
        "options.attention_backend: sdpa -> fa3",
        "options.device: cpu -> cuda",
        "options.dtype: float32 -> bfloat16",
    ]


def test_a_device_that_is_not_there_is_refused_with_nothing_left_to_draw(
    manifest: Path, tmp_path: Path
) -> None:
    Runner().run(manifest, tmp_path / "out", device="cpu", **OPTIONS)
    with pytest.raises(BackendError, match="'mps' is not supported"):
        Runner().run(manifest, tmp_path / "out", device="mps", **OPTIONS)


def test_the_model_s_spelling_is_told_but_not_compared(
    manifest: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model, tmp_path / "mod")
    monkeypatch.chdir(tmp_path)
    Runner().run(manifest, tmp_path / "out", model="mod", **OPTIONS)
    for spelling in ("mod/", "./mod", str(tmp_path / "mod")):
        assert Runner().run(manifest, tmp_path / "out", model=spelling, **OPTIONS).num_resumed == 2
    assert json.loads((tmp_path / "out" / "job.json").read_text())["model"]["model"] == "mod"


def test_another_model_is_refused_by_its_digests_and_named_once(
    manifest: Path, tiny_model: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "mod")
    config = other / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 1}))
    Runner().run(manifest, tmp_path / "out", **OPTIONS)
    with pytest.raises(JobMismatchError) as caught:
        Runner().run(manifest, tmp_path / "out", model=str(other), **OPTIONS)
    lines = differences(caught)
    assert f"model.model: tiny -> {other}" in lines
    assert [line.split(":")[0] for line in lines] == ["model.model", "model.content"]


def test_a_limit_and_a_map_are_named_once(manifest: Path, tmp_path: Path) -> None:
    Runner().run(manifest, tmp_path / "out", **OPTIONS)
    with pytest.raises(JobMismatchError) as caught:
        Runner().run(manifest, tmp_path / "out", limit=1, map={"seed": "num_images_per_prompt"}, **OPTIONS)
    assert sorted(line.split(":")[0] for line in differences(caught)) == [
        "manifest.column_map.seed",
        "manifest.limit",
        "num_rows",
    ]
