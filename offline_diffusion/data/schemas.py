"""Explicit Arrow schemas of everything we publish, so that no file depends on its first rows."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

IMAGE_TYPE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
"""How ``datasets`` stores an ``Image`` feature."""

INVALID_ROW = "invalid_row"
"""``error_type`` of a quarantined row; failed images have the type of what failed."""

_TIMESTAMP = pa.timestamp("us", tz="UTC")

_IMAGE_FIELDS: list[tuple[str, pa.DataType]] = [
    ("id", pa.string()),
    ("row", pa.int64()),
    ("image_index", pa.int32()),
    ("prompt", pa.string()),
    ("negative_prompt", pa.string()),
    ("seed", pa.uint64()),
    ("width", pa.int32()),
    ("height", pa.int32()),
    ("num_inference_steps", pa.int32()),
    ("true_cfg_scale", pa.float64()),
    ("guidance_scale", pa.float64()),
    ("image", IMAGE_TYPE),
    ("sha256", pa.string()),
]

IMAGE_COLUMNS = tuple(name for name, _ in _IMAGE_FIELDS)
"""The columns of the images table that are ours; the carried ones follow."""

METRICS_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("row", pa.int64()),
        ("image_index", pa.int32()),
        ("status", pa.string()),
        ("error_type", pa.string()),
        ("error", pa.string()),
        ("attempts", pa.int32()),
        ("cfg_active", pa.bool_()),
        ("num_tokens", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("truncated_tokens", pa.int64()),
        ("steps_run", pa.int32()),
        ("queue_s", pa.float64()),
        ("encode_s", pa.float64()),
        ("denoise_s", pa.float64()),
        ("device_s", pa.float64()),
        ("decode_s", pa.float64()),
        ("write_s", pa.float64()),
        ("total_s", pa.float64()),
        ("mean_batch_seqs", pa.float64()),
        ("peak_memory_bytes", pa.int64()),
        ("task", pa.int32()),
        ("worker", pa.string()),
        ("finished_at", _TIMESTAMP),
        ("requested_height", pa.int32()),
        ("requested_width", pa.int32()),
        ("row_hash", pa.string()),
    ]
)
"""One row a requested image; a faulty row as a whole has a null ``image_index``."""

FAILURES_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("row", pa.int64()),
        ("image_index", pa.int32()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("column", pa.string()),
        ("value", pa.string()),
        ("reason", pa.string()),
        ("error_type", pa.string()),
    ]
)
"""Quarantined rows and failed images; ``image_index`` is null for a row as a whole."""


def images_schema(carried: pa.Schema) -> pa.Schema:
    """The schema of the images table: our columns, then the carried ones.

    ``datasets`` reads its features from the schema's metadata, so ``image`` opens as an ``Image``.

    Args:
        carried: The manifest's other columns. Features of its own in its metadata are kept.
    """
    fields = [pa.field(name, type_) for name, type_ in _IMAGE_FIELDS]
    for name, field in zip(carried_names(carried), carried, strict=True):
        fields.append(pa.field(name, _loadable(field.type), metadata=field.metadata))
    schema = pa.schema(fields)
    info = {"info": {"features": _features(schema, carried)}}
    return schema.with_metadata({b"huggingface": json.dumps(info).encode()})


def carried_names(carried: pa.Schema) -> list[str]:
    """Names of the carried columns in the images table.

    A name that one of our own columns has gets ``manifest_`` before it.
    """
    taken = set(IMAGE_COLUMNS) | (set(carried.names) - set(IMAGE_COLUMNS))
    names = []
    for original in carried.names:
        name = original
        while original in IMAGE_COLUMNS and name in taken:
            name = f"manifest_{name}"
        taken.add(name)
        names.append(name)
    return names


def _loadable(type_: pa.DataType) -> pa.DataType:
    """The type in which Parquet and ``datasets`` can hold a carried column: text as the last resort."""
    import datasets

    plain = _without_maps(type_)
    schema = pa.schema([("column", plain)])
    try:
        datasets.Features.from_arrow_schema(schema)
        pq.write_table(schema.empty_table(), io.BytesIO())
    except (ValueError, NotImplementedError, pa.ArrowException):
        return pa.string()
    return plain


def _without_maps(type_: pa.DataType) -> pa.DataType:
    """``datasets`` has no maps: they become lists of their pairs."""
    if pa.types.is_map(type_):
        pair = [("key", _without_maps(type_.key_type)), ("value", _without_maps(type_.item_type))]
        return pa.list_(pa.struct(pair))
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, _without_maps(field.type)) for field in type_])
    if pa.types.is_list(type_):
        return pa.list_(_without_maps(type_.value_type))
    return type_


def _features(schema: pa.Schema, carried: pa.Schema) -> dict[str, Any]:
    import datasets

    features = datasets.Features.from_arrow_schema(schema)
    names = zip(carried_names(carried), carried, strict=True)
    kept = {name: field for name, field in names if schema.field(name).type == field.type}
    given = datasets.Features.from_arrow_schema(pa.schema(list(kept.values()), metadata=carried.metadata))
    features.update({name: given[field.name] for name, field in kept.items()})
    features["image"] = datasets.Image()
    return dict(features.to_dict())


def schema_to_text(schema: pa.Schema) -> str:
    """A schema as base64 of its Arrow IPC message, for JSON."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode("ascii")


def schema_from_text(text: str) -> pa.Schema:
    """The schema that ``schema_to_text`` wrote."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
