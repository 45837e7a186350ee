"""Ragged attention against a float64 softmax by hand, and what is said where a backend is missing."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.attention import backends
from offline_diffusion.attention.backends import available_backends, load_backend
from offline_diffusion.attention.metadata import AttentionMetadata, SequenceBounds
from offline_diffusion.errors import BackendError

CPU = torch.device("cpu")


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_queries: list[int], num_keys: list[int]
) -> torch.Tensor:
    """Softmax attention of each sequence's queries over its keys, written out."""
    outs = []
    lengths = num_keys
    for query, key, value in zip(q.split(num_queries), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("qhd,khd->hqk", query, key) / q.shape[-1] ** 0.5
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    return torch.cat(outs)


def metadata(num_queries: list[int], num_keys: list[int]) -> AttentionMetadata:
    return AttentionMetadata(
        SequenceBounds.from_seqlens(num_queries, CPU), SequenceBounds.from_seqlens(num_keys, CPU)
    )


lengths = st.tuples(st.integers(1, 20), st.integers(1, 20))


@given(st.lists(lengths, min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 1000))
def test_sdpa_is_attention_within_each_sequence(
    seqlens: list[tuple[int, int]], num_heads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_queries, num_keys = (list(part) for part in zip(*seqlens, strict=True))
    q = torch.randn(sum(num_queries), num_heads, 8, generator=generator)
    k, v = (torch.randn(sum(num_keys), num_heads, 8, generator=generator) for _ in range(2))
    _, attend = load_backend("sdpa", CPU, torch.float32)
    out = attend(q, k, v, metadata(num_queries, num_keys))
    assert out.shape == q.shape
    assert (out - by_hand(q, k, v, num_queries, num_keys)).abs().max() < 1e-5


def test_a_sequence_is_the_same_bits_in_any_company() -> None:
    torch.manual_seed(0)
    num_queries, num_keys = [5, 64, 30], [7, 64, 130]
    q = torch.randn(sum(num_queries), 4, 32)
    k, v = (torch.randn(sum(num_keys), 4, 32) for _ in range(2))
    _, attend = load_backend("sdpa", CPU, torch.float32)
    together = attend(q, k, v, metadata(num_queries, num_keys)).split(num_queries)
    parts = zip(q.split(num_queries), k.split(num_keys), v.split(num_keys), strict=True)
    for out, part in zip(together, parts, strict=True):
        assert torch.equal(out, attend(*part, metadata([len(part[0])], [len(part[1])])))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_bounds_are_running_sums(seqlens: list[int]) -> None:
    bounds = SequenceBounds.from_seqlens(seqlens, CPU)
    assert bounds.cu_seqlens.tolist() == [sum(seqlens[:n]) for n in range(len(seqlens) + 1)]
    assert bounds.cu_seqlens.dtype == torch.int32
    assert (bounds.seqlens, bounds.max_seqlen) == (tuple(seqlens), max(seqlens))


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
