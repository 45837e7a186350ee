"""Batch job runner for text-to-image prompt sets.

The public names are loaded when they are first used, so that ``offdiff --help`` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offline_diffusion.engine.offline import AsyncOfflineDiffusion, OfflineDiffusion
    from offline_diffusion.request import Request, RequestOutput, SamplingParams

    __version__: str

__all__ = [
    "AsyncOfflineDiffusion",
    "OfflineDiffusion",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_MODULE_OF = {
    "AsyncOfflineDiffusion": "offline_diffusion.engine.offline",
    "OfflineDiffusion": "offline_diffusion.engine.offline",
    "Request": "offline_diffusion.request",
    "RequestOutput": "offline_diffusion.request",
    "SamplingParams": "offline_diffusion.request",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("offline-diffusion")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
