"""What all tests share: no network, no cache of the user's touched, one tiny model a session."""

from __future__ import annotations

import os
import shutil
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

_home = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Sets the environment before any test module imports a library that reads it."""
    home = config.stash[_home] = Path(tempfile.mkdtemp(prefix="offdiff-tests-"))
    os.environ.update(
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HOME=str(home / "huggingface"),
        HF_HUB_CACHE=str(home / "huggingface" / "hub"),
        HF_DATASETS_CACHE=str(home / "huggingface" / "datasets"),
        HF_MODULES_CACHE=str(home / "huggingface" / "modules"),
        XDG_CACHE_HOME=str(home / "cache"),
    )
    if not Path("/dev/nvidiactl").exists():
        # Triton reads this on its first import, which diffusers may do before any test of a kernel.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # torch.set_num_threads(2) without importing torch, for subprocesses as well.
    os.environ.setdefault("OMP_NUM_THREADS", "2")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_home], ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the model ``tiny``, in the session's own cache."""
    from offline_diffusion.models.tiny import tiny_model_folder

    return tiny_model_folder()


@pytest.fixture(scope="session")
def tiny_pipeline(tiny_model: Path) -> Any:
    """diffusers' own pipeline over ``tiny_model``: CPU, float32. The reference of parity tests."""
    import diffusers

    pipeline = diffusers.QwenImagePipeline.from_pretrained(tiny_model)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def shared() -> Path:
    """The project's shared data, or a skip: ``$OFFDIFF_SHARED``, else ``../shared`` beside the checkout."""
    folder = Path(os.environ.get("OFFDIFF_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"needs the shared data: {folder} is no folder (set OFFDIFF_SHARED)")
    return folder


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[Any]:
    pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    from s3_server import S3Server

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(_s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A real S3 server with an empty bucket, which the environment points to; see ``s3_server``."""
    from offline_diffusion.data import requests_again

    monkeypatch.setenv("AWS_ENDPOINT_URL", _s3_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # Only our own patience: that of the libraries takes seconds.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setattr("botocore.retryhandler.delay_exponential", lambda **_: 0.0)
    monkeypatch.setattr(requests_again, "FIRST_PAUSE_S", 0.01)
    _s3_server.reset()
    return _s3_server


@pytest.fixture(scope="session")
def _hub_server() -> Iterator[Any]:
    pytest.importorskip("werkzeug", reason="comes with the test extra's S3 server")
    from hub_server import HubServer

    server = HubServer()
    yield server
    server.close()


@pytest.fixture
def hub(_hub_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Hub with one new dataset repo, as its library sees it here; see ``hub_server``."""
    from hub_server import TOKEN

    from offline_diffusion.data import hub_storage, requests_again

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", _hub_server.url)
    files = f"{_hub_server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # a service of its own
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, value in {"ENDPOINT": _hub_server.url, "HUB_OFFLINE": "0", "HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(f"HF_{name}", value)  # for processes that a test starts
    monkeypatch.delenv("TRANSFORMERS_OFFLINE")
    # Only our own patience: that of the library takes seconds.
    monkeypatch.setattr("huggingface_hub.utils._http.time", types.SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(requests_again, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(hub_storage, "MOVED_PAUSE_S", 0.01)
    _hub_server.reset()
    return _hub_server
