import datasets
import pyarrow as pa
import pytest

from offline_diffusion.data.schemas import (
    FAILURES_SCHEMA,
    IMAGE_COLUMNS,
    METRICS_SCHEMA,
    carried_names,
    images_schema,
    schema_from_text,
    schema_to_text,
)

# The contract's words, typed here by hand.
IMAGES = """
    id, row, image_index, prompt, negative_prompt, seed, width, height, num_inference_steps,
    true_cfg_scale, guidance_scale, image, sha256
"""
METRICS = """
    id, row, image_index, status, error_type, error, attempts, cfg_active, num_tokens, prompt_tokens,
    truncated_tokens, steps_run, queue_s, encode_s, denoise_s, device_s, decode_s, write_s, total_s,
    mean_batch_seqs, peak_memory_bytes, task, worker, finished_at
"""


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def test_columns_are_those_of_the_contract_in_its_order() -> None:
    schema = images_schema(pa.schema([("tag", pa.string())]))
    assert schema.names == [*words(IMAGES), "tag"]
    extension = ["requested_height", "requested_width", "row_hash"]
    assert METRICS_SCHEMA.names == [*words(METRICS), *extension]
    assert FAILURES_SCHEMA.names[:3] == ["id", "row", "image_index"]
    assert {"file", "line", "column", "value", "reason"} <= set(FAILURES_SCHEMA.names)


def test_seeds_take_64_bits_without_a_sign() -> None:
    assert images_schema(pa.schema([])).field("seed").type == pa.uint64()


def test_datasets_reads_an_image_feature_from_the_schema() -> None:
    features = datasets.Features.from_arrow_schema(images_schema(pa.schema([("tag", pa.large_string())])))
    assert features["image"] == datasets.Image()
    assert features["tag"] == datasets.Value("large_string")
    assert features["seed"] == datasets.Value("uint64")


def test_features_of_carried_columns_survive() -> None:
    given = datasets.Features({"label": datasets.ClassLabel(names=["cat", "dog"]), "ref": datasets.Image()})
    features = datasets.Features.from_arrow_schema(images_schema(given.arrow_schema))
    assert features["label"].names == ["cat", "dog"]
    assert features["ref"] == datasets.Image()


def test_a_carried_column_with_one_of_our_names_gets_another() -> None:
    carried = pa.schema([("image", pa.int64()), ("manifest_image", pa.string()), ("tag", pa.string())])
    names = carried_names(carried)
    assert names == ["manifest_manifest_image", "manifest_image", "tag"]
    schema = images_schema(carried)
    assert schema.names[len(IMAGE_COLUMNS) :] == names
    assert schema.field("manifest_manifest_image").type == pa.int64()
    assert len(set(schema.names)) == len(schema.names)


@pytest.mark.parametrize("type_", [pa.decimal128(10, 2), pa.null(), pa.list_(pa.struct([("a", pa.int64())]))])
def test_unusual_carried_types_keep_their_type(type_: pa.DataType) -> None:
    assert images_schema(pa.schema([("x", type_)])).field("x").type == type_


def test_maps_become_lists_of_pairs_which_datasets_has() -> None:
    nested = pa.struct([("m", pa.list_(pa.map_(pa.string(), pa.int32())))])
    schema = images_schema(pa.schema([("x", pa.map_(pa.string(), pa.int32())), ("y", nested)]))
    pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.int32())]))
    assert schema.field("x").type == pairs
    assert schema.field("y").type == pa.struct([("m", pa.list_(pairs))])
    assert datasets.Features.from_arrow_schema(schema)["image"] == datasets.Image()


@pytest.mark.parametrize("type_", [pa.month_day_nano_interval(), pa.dense_union([pa.field("a", pa.int32())])])
def test_types_that_no_dataset_holds_become_text(type_: pa.DataType) -> None:
    assert images_schema(pa.schema([("x", type_)])).field("x").type == pa.string()


def test_a_schema_goes_through_text() -> None:
    schema = images_schema(pa.schema([pa.field("tag", pa.string(), metadata={"a": "b"})]))
    assert schema_from_text(schema_to_text(schema)).equals(schema, check_metadata=True)
