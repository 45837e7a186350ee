"""One pass over a whole manifest: how many rows and images, which ids repeat, what is carried."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from offline_diffusion.data.carried import CarriedTypes
from offline_diffusion.data.columns import flatten_openai_schema
from offline_diffusion.data.files import replace_file, to_json
from offline_diffusion.data.id_table import IdTable, repeated_rows
from offline_diffusion.data.manifest import Manifest
from offline_diffusion.data.readers.arrow import huggingface_features
from offline_diffusion.data.row_set import RowSet
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.work import ShardCosts
from offline_diffusion.errors import ManifestError

INDEX_FILE = "manifest-index.json"
DUPLICATES_FILE = "manifest-duplicates.npy"
COSTS_FILE = "manifest-shard-costs.npy"
PLACES_FILE = "manifest-places.npy"
_ARRAY_FILES = (DUPLICATES_FILE, COSTS_FILE, PLACES_FILE)
INDEX_VERSION = 3


@dataclass(frozen=True)
class ManifestIndex:
    """What a scan finds out.

    Args:
        num_rows: All rows, faulty ones included.
        num_faults: Rows that are faulty or repeat an id.
        num_images: Images that the good rows ask for.
        carried_schema: A field for each carried column; see ``carried.carried_array``. Features of
            ``datasets``, such as Image, are in its metadata.
        duplicates: Rows whose id an earlier good row has; for ``Manifest.read``.
        fingerprint: Of the manifest, see ``Manifest.fingerprint``.
        shard_size: Rows of a shard, for which ``shard_costs`` holds; 0 where costs were not asked for.
        shard_costs: A cost for each shard; see ``ShardCosts``.
        row_counts, places: Rows of every file, and where rows begin in it; for ``Manifest.recall``.
    """

    num_rows: int
    num_faults: int
    num_images: int
    carried_schema: pa.Schema
    duplicates: RowSet
    fingerprint: dict[str, Any]
    shard_size: int = 0
    shard_costs: array[float] = field(default_factory=lambda: array("d"))
    row_counts: dict[int, int] = field(default_factory=dict)
    places: array[int] = field(default_factory=lambda: array("q"))

    def save(self, folder: Path) -> None:
        """Writes the index into ``folder``, each file at once or not at all.

        Raises:
            OSError: The folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {
            DUPLICATES_FILE: _npy(self.duplicates.to_bits()),
            COSTS_FILE: _npy(np.array(self.shard_costs, dtype=np.float64)),
            PLACES_FILE: _npy(np.array(self.places, dtype=np.int64)),
        }
        content = {
            "version": INDEX_VERSION,
            "num_rows": self.num_rows,
            "num_faults": self.num_faults,
            "num_images": self.num_images,
            "carried_schema": base64.b64encode(self.carried_schema.serialize()).decode("ascii"),
            "digests": {name: _digest(stored) for name, stored in arrays.items()},
            "shard_size": self.shard_size,
            "row_counts": sorted(self.row_counts.items()),
            "fingerprint": self.fingerprint,
        }
        for name, stored in arrays.items():
            replace_file(folder / name, stored, folder)
        replace_file(folder / INDEX_FILE, to_json(content), folder)

    @classmethod
    def load(cls, folder: Path) -> ManifestIndex | None:
        """The index in ``folder``; None when there is none, or none that this version can use."""
        try:
            content = json.loads((folder / INDEX_FILE).read_bytes())
            if content["version"] != INDEX_VERSION:
                return None
            digests = content["digests"]
            arrays = {name: (folder / name).read_bytes() for name in _ARRAY_FILES}
            if any(digests[name] != _digest(stored) for name, stored in arrays.items()):
                return None
            return cls(
                num_rows=content["num_rows"],
                num_faults=content["num_faults"],
                num_images=content["num_images"],
                carried_schema=pa.ipc.read_schema(pa.py_buffer(base64.b64decode(content["carried_schema"]))),
                duplicates=RowSet.from_bits(_from_npy(arrays[DUPLICATES_FILE])),
                fingerprint=content["fingerprint"],
                shard_size=content["shard_size"],
                shard_costs=array("d", _from_npy(arrays[COSTS_FILE]).tolist()),
                row_counts={int(file): int(count) for file, count in content["row_counts"]},
                places=array("q", _from_npy(arrays[PLACES_FILE]).tolist()),
            )
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            return None


def _npy(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()


def _from_npy(stored: bytes) -> np.ndarray:
    return np.asarray(np.load(io.BytesIO(stored), allow_pickle=False))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def scan(
    manifest: Manifest,
    *,
    on_row: Callable[[ManifestRow | RowFault], None] | None = None,
    costs: ShardCosts | None = None,
) -> ManifestIndex:
    """Reads the whole manifest once, in flat memory: one row at a time.

    Rows that repeat an id are read a second time. Of more than a million rows the ids are kept in a temporary
    file, 24 bytes a row.

    Args:
        manifest: What to read.
        on_row: Called with each row in order; does not know of duplicates yet.
        costs: Gets every row, too; what it comes to is a part of the index.

    Raises:
        ManifestError: A file cannot be read to its end, or changed meanwhile.
    """
    fingerprint = manifest.fingerprint()
    types = declared_types(manifest)
    untyped = {file.name for file in manifest.files if file.schema is None}
    ids = IdTable()
    num_rows = num_faults = num_images = 0
    for item in manifest.read():
        num_rows += 1
        if isinstance(item, ManifestRow):
            ids.add(item.id)
            num_images += item.params.num_images_per_prompt
            if item.file in untyped:
                types.observe(item.carried)
        else:
            ids.add(None)
            num_faults += 1
        if costs is not None:
            costs.add(item)
        if on_row is not None:
            on_row(item)
    duplicates = ids.repeated()
    for row in repeated_rows(manifest, duplicates):
        num_images -= row.params.num_images_per_prompt
    _require_unchanged(manifest, fingerprint)
    num_faults += len(duplicates)
    return ManifestIndex(
        num_rows=num_rows,
        num_faults=num_faults,
        num_images=num_images,
        carried_schema=types.schema(),
        duplicates=duplicates,
        fingerprint=fingerprint,
        shard_size=costs.shard_size if costs else 0,
        shard_costs=costs.values if costs else array("d"),
        row_counts=manifest.known_row_counts(),
        places=manifest.known_places(),
    )


def declared_types(manifest: Manifest) -> CarriedTypes:
    """The types of carried columns as far as the files declare them."""
    types = CarriedTypes()
    for file in manifest.files:
        plan = manifest.plan(file)
        if plan is None or file.schema is None:
            continue
        schema = flatten_openai_schema(file.schema)
        features = huggingface_features(file.schema)
        for column, name in plan.carried:
            feature = features.get(column)
            is_special = isinstance(feature, dict) and feature.get("_type") not in (None, "Value")
            types.declare(name, schema.field(column).type, feature if is_special else None)
    return types


def _require_unchanged(manifest: Manifest, fingerprint: dict[str, Any]) -> None:
    for file, before in zip(manifest.files, fingerprint["files"], strict=True):
        if file.stamp() != (before["size"], before["version"]):
            raise ManifestError(
                f"{file.name}: changed while it was read", hint="start again when nobody writes to it"
            )
