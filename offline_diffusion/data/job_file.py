"""``job.json``: what the output folder was made from, and how two jobs differ."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from offline_diffusion.data.files import read_json, to_json
from offline_diffusion.data.schemas import schema_from_text, schema_to_text
from offline_diffusion.errors import JobError

JOB_FILE = "job.json"
FORMAT_VERSION = 1

_PACKAGES = (
    "offline-diffusion",
    "torch",
    "diffusers",
    "transformers",
    "numpy",
    "pillow",
    "pyarrow",
    "datasets",
)
_MODEL_SPELLING = ("model.model", "model.revision")
"""How the user named the model: told, not compared. The digests beside it say which model it is."""

_CHANGEABLE = ("manifest.", "num_rows", "carried.", "options.limit", "options.shard_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """What makes a dataset what it is; a resume with another identity is refused.

    Args:
        model: Name and revision as the user gave them, and digests of what they stand for. Only the
            digests are compared.
        manifest: Its fingerprint.
        options: Those that change pixels or which rows fall into which shard.
        num_rows: Rows of the manifest, faulty ones included.
        shard_size: Rows of a shard.
        carried_schema: The manifest's other columns.
    """

    model: Mapping[str, Any]
    manifest: Mapping[str, Any]
    options: Mapping[str, Any]
    num_rows: int
    shard_size: int
    carried_schema: pa.Schema

    def flatten(self) -> dict[str, str]:
        """Dotted name → value as text."""
        values = {"model": self.model, "manifest": self.manifest, "options": self.options}
        flat = _flatten(json.loads(to_json(values)))
        flat["num_rows"] = str(self.num_rows)
        flat["options.shard_size"] = str(self.shard_size)
        flat |= {f"carried.{field.name}": str(field.type) for field in self.carried_schema}
        return flat


@dataclass(frozen=True, slots=True)
class Job:
    """The contents of ``job.json``.

    Args:
        job_id: Fresh whenever the folder is given to another manifest.
        created_at: ISO 8601, UTC.
        identity: What the dataset is made from.
        versions: Package → version at the start; informative, not compared.
    """

    job_id: str
    created_at: str
    identity: JobIdentity
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """What ``job.json`` holds."""
        identity = self.identity
        carried = identity.carried_schema
        return {
            "version": FORMAT_VERSION,
            "job_id": self.job_id,
            "created_at": self.created_at,
            "num_rows": identity.num_rows,
            "shard_size": identity.shard_size,
            "model": dict(identity.model),
            "manifest": dict(identity.manifest),
            "options": dict(identity.options),
            "versions": dict(self.versions),
            "carried": {
                "columns": {field.name: str(field.type) for field in carried},
                "arrow_schema": schema_to_text(carried),
            },
        }


def new_job(identity: JobIdentity) -> Job:
    """A job that starts now."""
    return Job(secrets.token_hex(8), datetime.now(UTC).isoformat(timespec="seconds"), identity, _versions())


def read_job(out: Path) -> Job:
    """Reads the ``job.json`` of an output folder.

    Raises:
        JobError: There is none, or it is not one of ours.
    """
    path = out / JOB_FILE
    try:
        values = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise JobError(
            f"{out} is not an output folder of offdiff: it has no {JOB_FILE}",
            hint="give the folder that `offdiff run ... --out DIR` wrote",
        ) from None
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}") from None
    if values.get("version") != FORMAT_VERSION:
        raise JobError(
            f"{path} has version {values.get('version')!r}, this offdiff reads version {FORMAT_VERSION}",
            hint="use the version of offdiff that wrote the folder, or another --out",
        )
    try:
        return job_from_dict(values)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise JobError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def job_from_dict(values: Mapping[str, Any]) -> Job:
    """The job that ``Job.to_dict`` described."""
    identity = JobIdentity(
        model=values["model"],
        manifest=values["manifest"],
        options=values["options"],
        num_rows=int(values["num_rows"]),
        shard_size=int(values["shard_size"]),
        carried_schema=schema_from_text(values["carried"]["arrow_schema"]),
    )
    return Job(values["job_id"], values["created_at"], identity, values["versions"])


@dataclass(frozen=True, slots=True)
class Difference:
    """One value in which two jobs differ, as text; ``(none)`` where one has no such value."""

    name: str
    old: str
    new: str

    @property
    def changeable(self) -> bool:
        """Whether ``--allow-manifest-change`` covers it: pixels do not depend on it."""
        return self.name.startswith(_CHANGEABLE)

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new}"


def differences(old: JobIdentity, new: JobIdentity) -> list[Difference]:
    """Every value in which two jobs differ, by name; none when only the model's spelling differs."""
    before, after = old.flatten(), new.flatten()
    names = [*before, *(name for name in after if name not in before)]
    found = (Difference(name, before.get(name, "(none)"), after.get(name, "(none)")) for name in names)
    differing = [difference for difference in found if difference.old != difference.new]
    model = {difference.name for difference in differing if difference.name.startswith("model.")}
    if model <= set(_MODEL_SPELLING):
        return [difference for difference in differing if difference.name not in model]
    return differing


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {prefix: value if isinstance(value, str) else json.dumps(value)}
    flat: dict[str, str] = {}
    for key, item in items:
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else key)
    return flat


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
