"""Ragged attention against a float64 softmax by hand, and what is said where a backend is missing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offline_diffusion.attention import backends
from offline_diffusion.attention.backends import available_backends, load_backend
from offline_diffusion.attention.metadata import AttentionMetadata
from offline_diffusion.errors import BackendError

CPU = torch.device("cpu")


def by_hand(q: Tensor, k: Tensor, v: Tensor, seqlens: Sequence[int]) -> Tensor:
    """Each sequence on its own, in float64: ``softmax(q k^T / sqrt(D)) v``."""
    q, k, v = q.double(), k.double(), v.double()
    out, start = torch.empty_like(v), 0
    for length in seqlens:
        own = slice(start, start + length)
        scores = torch.einsum("qhd,khd->hqk", q[own], k[own]) / q.shape[-1] ** 0.5
        out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[own])
        start += length
    return out


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 1000))
def test_sdpa_is_attention_within_each_sequence(seqlens: list[int], num_heads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(seqlens), num_heads, 8, generator=generator) for _ in range(3))
    _, attend = load_backend("sdpa", CPU, torch.float32)
    out = attend(q, k, v, AttentionMetadata.from_seqlens(seqlens, CPU))
    assert out.shape == v.shape
    assert (out - by_hand(q, k, v, seqlens)).abs().max() < 1e-5


def test_a_sequence_is_the_same_bits_in_any_company() -> None:
    torch.manual_seed(0)
    seqlens = [7, 64, 130]
    q, k, v = (torch.randn(sum(seqlens), 4, 32) for _ in range(3))
    _, attend = load_backend("sdpa", CPU, torch.float32)
    together = attend(q, k, v, AttentionMetadata.from_seqlens(seqlens, CPU)).split(seqlens)
    parts = zip(q.split(seqlens), k.split(seqlens), v.split(seqlens), strict=True)
    for out, part in zip(together, parts, strict=True):
        assert torch.equal(out, attend(*part, AttentionMetadata.from_seqlens([len(part[0])], CPU)))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_metadata_are_running_sums(seqlens: list[int]) -> None:
    meta = AttentionMetadata.from_seqlens(seqlens, CPU)
    assert meta.cu_seqlens.tolist() == [sum(seqlens[:n]) for n in range(len(seqlens) + 1)]
    assert meta.cu_seqlens.dtype == torch.int32
    assert (meta.seqlens, meta.max_seqlen) == (tuple(seqlens), max(seqlens))


def test_auto_is_the_reference_on_a_cpu() -> None:
    name, _ = load_backend("auto", CPU, torch.float32)
    assert name == "sdpa"


def test_an_unknown_backend_is_told_the_known_ones() -> None:
    with pytest.raises(BackendError) as caught:
        load_backend("xformers", CPU, torch.float32)
    message = str(caught.value)
    assert "unknown attention backend 'xformers'" in message
    assert all(name in message for name in ("auto", "fa3", "flash_attn", "torch_varlen", "sdpa"))


@pytest.mark.parametrize("name", ["fa3", "flash_attn", "torch_varlen"])
def test_a_backend_that_needs_a_gpu_says_so_and_what_works(name: str) -> None:
    with pytest.raises(BackendError) as caught:
        load_backend(name, CPU, torch.bfloat16)
    assert f"attention backend {name!r} does not work here: needs a CUDA device" in caught.value.message
    assert "working: sdpa" in caught.value.message
    assert caught.value.hint


def test_every_backend_that_does_not_work_says_why_and_how() -> None:
    statuses = available_backends(CPU, torch.float32)
    assert [status.name for status in statuses] == ["fa3", "flash_attn", "torch_varlen", "sdpa"]
    for status in statuses:
        assert status.works == (status.name == "sdpa")
        assert (status.why_not is None) == status.works
        assert (status.hint is None) == status.works


def test_float32_needs_the_reference_even_on_a_gpu() -> None:
    statuses = {status.name: status for status in available_backends(torch.device("cuda"), torch.float32)}
    assert statuses["torch_varlen"].why_not == "needs bfloat16 or float16, the model runs in float32"
    assert statuses["torch_varlen"].hint == "run in bfloat16"
    assert statuses["sdpa"].works


@pytest.mark.parametrize(
    ("device", "dtype", "why", "hint"),
    [
        ("cpu", torch.bfloat16, "needs a CUDA device, this one is cpu", "run on a CUDA GPU"),
        ("cuda", torch.float32, "needs bfloat16 or float16, the model runs in float32", "run in bfloat16"),
        ("cuda", torch.float16, "the forward-only build has no float16", "run in bfloat16"),
        ("cuda", torch.bfloat16, "package fa3-fwd is not installed", "pip install 'offline-diffusion[gpu]'"),
    ],
)
def test_the_hint_is_against_the_obstacle_at_hand(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, why: str, hint: str
) -> None:
    def not_installed(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fa3 = available_backends(torch.device(device), dtype)[0]
    assert (fa3.name, fa3.why_not, fa3.hint) == ("fa3", why, hint)


def _broken() -> backends.AttentionFunction:
    raise ImportError("undefined symbol: _ZN3c10")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is installed but built for another torch."""
    backend = backends._Backend(_broken, lambda device, dtype: None)
    monkeypatch.setattr(backends, "_BACKENDS", {"fa3": backend, **_only("sdpa")})


def _only(name: str) -> dict[str, backends._Backend]:
    return {name: backends._BACKENDS[name]}


@pytest.mark.usefixtures("broken")
def test_auto_passes_over_a_broken_installation(caplog: pytest.LogCaptureFixture) -> None:
    name, _ = load_backend("auto", CPU, torch.float32)
    assert name == "sdpa"
    assert "'fa3' cannot be loaded: undefined symbol" in caplog.text


@pytest.mark.usefixtures("broken")
def test_a_broken_installation_asked_for_by_name_is_an_error() -> None:
    with pytest.raises(BackendError, match="'fa3' cannot be loaded: undefined symbol") as caught:
        load_backend("fa3", CPU, torch.float32)
    assert caught.value.hint
