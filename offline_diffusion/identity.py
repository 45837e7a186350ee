"""What makes a job's dataset what it is: model, manifest, and every option that changes pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offline_diffusion.config import LAYOUT_OPTIONS, PIXEL_OPTIONS, JobConfig
from offline_diffusion.data.job_file import JobIdentity
from offline_diffusion.data.scan import ManifestIndex
from offline_diffusion.models.registry import Checkpoint


def job_identity(config: JobConfig, checkpoint: Checkpoint, index: ManifestIndex) -> JobIdentity:
    """The identity of a job, which a resume must share."""
    told_elsewhere = {"model", "revision", "map", "limit"}  # by the model's and the manifest's identity
    names = set(PIXEL_OPTIONS + LAYOUT_OPTIONS) - told_elsewhere
    if config.image_format != "jpeg":
        names.remove("image_level")  # the others lose nothing
    if config.guidance_scale is None:
        names.remove("guidance_scale")  # jobs from before there was such an option go on
    options = config.model_dump(mode="json", include=names) | _compute_kind(config)
    return JobIdentity(
        model=checkpoint.identity,
        manifest=_content(index.fingerprint),
        options=options,
        num_rows=index.num_rows,
        shard_size=config.shard_size,
        carried_schema=index.carried_schema,
    )


def _content(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """What of a manifest's fingerprint makes it another one; a file only moved or touched does not."""
    files = [{key: file[key] for key in ("size", "digest")} for file in fingerprint["files"]]
    return {**fingerprint, "files": files}


def _compute_kind(config: JobConfig) -> dict[str, str]:
    """What ``auto`` comes to here of everything that changes an image's last bits."""
    from offline_diffusion.attention.backends import load_backend
    from offline_diffusion.models.loader import resolve_device, resolve_dtype

    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    backend, _ = load_backend(config.attention_backend, device, dtype)
    return {"dtype": str(dtype).removeprefix("torch."), "device": device.type, "attention_backend": backend}
