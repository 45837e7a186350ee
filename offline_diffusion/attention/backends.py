"""Attention over ragged batches: one function type, a lazy registry, and ``auto``.

Every backend maps ``q`` ``[T, H, D]``, ``k, v`` ``[S, H, D]`` and an ``AttentionMetadata`` to ``[T, H, D]``.
A query attends to all keys of its own sequence and to none of another's. A sequence's result must not
depend, to the last bit, on what it is packed with: backends that split work by the total are out.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from offline_diffusion.attention.metadata import AttentionMetadata
from offline_diffusion.errors import BackendError

logger = logging.getLogger(__name__)

AttentionFunction = Callable[[Tensor, Tensor, Tensor, AttentionMetadata], Tensor]


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Whether a backend works here, and if not, what is missing and how to get it."""

    name: str
    works: bool
    why_not: str | None = None
    hint: str | None = None


class _Obstacle(NamedTuple):
    """Why a backend does not work here, and what would help against just that."""

    why: str
    hint: str


@dataclass(frozen=True, slots=True)
class _Backend:
    load: Callable[[], AttentionFunction]
    obstacle: Callable[[torch.device, torch.dtype], _Obstacle | None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata) -> Tensor:
    """The reference: torch's dense attention, a sequence at a time."""
    keys = meta.keys.seqlens
    parts = zip(q.split(meta.queries.seqlens), k.split(keys), v.split(keys), strict=True)
    return torch.cat([_dense(*part) for part in parts])


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[T, H, D]`` and twice ``[S, H, D]``; the batch axis keeps torch on its flash kernels."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)


def _load_torch_varlen() -> AttentionFunction:
    from torch.nn.attention.varlen import varlen_attn

    def attend(q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata) -> Tensor:
        queries, keys = meta.queries, meta.keys
        out = varlen_attn(q, k, v, queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen)
        assert isinstance(out, Tensor)
        return out

    return attend


def _load_flash_attn() -> AttentionFunction:
    from flash_attn import flash_attn_varlen_func

    return _flash_call(flash_attn_varlen_func)


def _load_fa3() -> AttentionFunction:
    from fa3_fwd_interface import flash_attn_varlen_func

    return _flash_call(flash_attn_varlen_func)


def _flash_call(function: Callable[..., Tensor | tuple[Tensor, ...]]) -> AttentionFunction:
    def attend(q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata) -> Tensor:
        queries, keys = meta.queries, meta.keys
        out = function(q, k, v, queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen)
        return out[0] if isinstance(out, tuple) else out

    return attend


def _needs_cuda_half(device: torch.device, dtype: torch.dtype) -> _Obstacle | None:
    if device.type != "cuda":
        return _Obstacle(f"needs a CUDA device, this one is {device.type}", "run on a CUDA GPU")
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return _Obstacle(f"needs bfloat16 or float16, the model runs in {name}", "run in bfloat16")
    return None


def _missing(package: str, hint: str) -> _Obstacle | None:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _Obstacle(f"package {package} is not installed", hint)
    return None


def _works_everywhere(*_: object) -> None:
    return None


def _flash_attn_obstacle(device: torch.device, dtype: torch.dtype) -> _Obstacle | None:
    return _needs_cuda_half(device, dtype) or _missing(
        "flash-attn", "pip install flash-attn --no-build-isolation"
    )


def _fa3_obstacle(device: torch.device, dtype: torch.dtype) -> _Obstacle | None:
    if (obstacle := _needs_cuda_half(device, dtype)) is not None:
        return obstacle
    if torch.cuda.get_device_capability(device) != (9, 0):
        return _Obstacle("needs a Hopper GPU (compute capability 9.0)", "flash_attn or torch_varlen may do")
    if dtype != torch.bfloat16:
        return _Obstacle("the forward-only build has no float16", "run in bfloat16")
    return _missing("fa3-fwd", "pip install 'offline-diffusion[gpu]'")


_BACKENDS = {
    "fa3": _Backend(_load_fa3, _fa3_obstacle),
    "flash_attn": _Backend(_load_flash_attn, _flash_attn_obstacle),
    "torch_varlen": _Backend(_load_torch_varlen, _needs_cuda_half),
    "sdpa": _Backend(lambda: _sdpa, _works_everywhere),
}
"""Best first: ``auto`` takes the first that works."""


def available_backends(device: torch.device, dtype: torch.dtype) -> list[BackendStatus]:
    """All backends, best first, and whether each works on ``device`` in ``dtype``."""
    statuses = []
    for name, backend in _BACKENDS.items():
        obstacle = backend.obstacle(device, dtype)
        statuses.append(BackendStatus(name, obstacle is None, *(obstacle or (None, None))))
    return statuses


def load_backend(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str, AttentionFunction]:
    """The backend's name and function; ``auto`` picks the best that works.

    Raises:
        BackendError: It is unknown or does not work here; says which do.
    """
    statuses = {status.name: status for status in available_backends(device, dtype)}
    working = [status.name for status in statuses.values() if status.works]
    if name == "auto":
        return _load_first(working)
    if name not in statuses:
        raise BackendError(f"unknown attention backend {name!r}, known: auto, {', '.join(statuses)}")
    status = statuses[name]
    if not status.works:
        raise BackendError(
            f"attention backend {name!r} does not work here: {status.why_not}; working: {', '.join(working)}",
            hint=status.hint,
        )
    return _load_first([name])


def _load_first(names: list[str]) -> tuple[str, AttentionFunction]:
    """The first that loads: an installed package may still be built for another torch."""
    faults = []
    for name in names:
        try:
            return name, _BACKENDS[name].load()
        except (ImportError, OSError) as error:
            faults.append(f"attention backend {name!r} cannot be loaded: {error}")
            logger.warning(faults[-1])
    raise BackendError("; ".join(faults), hint="name another, or install it again for this torch")
