"""Which column is read as what."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pyarrow as pa
import pytest

from offline_diffusion.data.columns import (
    KNOWN_COLUMNS,
    MAX_CARRIED_COLUMNS,
    OUTPUT_COLUMNS,
    RowBuilder,
    check_column_map,
    content_hash,
    flatten_openai_schema,
    make_plan,
)
from offline_diffusion.data.readers.base import Record
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.errors import ManifestError
from offline_diffusion.request import SamplingParams


def read_as(columns: list[str], column_map: dict[str, str] | None = None) -> dict[str, str]:
    """Our name to the file's, for every column that is not carried."""
    plan = make_plan(columns, column_map or {})
    found = {"prompt": plan.prompt, "id": plan.id, "size": plan.size}
    found |= {name: column for column, name, _ in plan.params}
    return {ours: theirs for ours, theirs in found.items() if theirs is not None}


def build(values: Any, notes: list[str] | None = None) -> ManifestRow | tuple[RowFault, ...]:
    return RowBuilder({}, [] if notes is None else notes).build("f.jsonl", Record(3, 4, values))


@pytest.mark.parametrize("alias", ["Prompt", "Prompts", "prompts", "text", "TEXT", "caption", "Caption", "p"])
def test_prompt_aliases_in_any_case(alias: str) -> None:
    assert read_as([alias, "other"]) == {"prompt": alias}


@pytest.mark.parametrize(
    ("alias", "ours"),
    [
        ("steps", "num_inference_steps"),
        ("step", "num_inference_steps"),
        ("st", "num_inference_steps"),
        ("cfg", "true_cfg_scale"),
        ("cfg_scale", "true_cfg_scale"),
        ("c", "true_cfg_scale"),
        ("se", "seed"),
        ("n", "num_images_per_prompt"),
        ("custom_id", "id"),
    ],
)
def test_other_aliases_give_way_to_the_full_name(alias: str, ours: str) -> None:
    assert read_as(["prompt", alias])[ours] == alias
    assert read_as(["prompt", alias, ours])[ours] == ours
    assert dict(make_plan(["prompt", alias, ours], {}).carried) == {alias: alias}


def test_every_known_column_is_read_under_its_own_name() -> None:
    assert read_as(list(KNOWN_COLUMNS)) == {name: name for name in KNOWN_COLUMNS}


def test_the_alias_listed_first_wins_and_the_loser_is_told() -> None:
    plan = make_plan(["p", "caption", "text"], {})
    assert plan.prompt == "text"
    assert dict(plan.carried) == {"p": "p", "caption": "caption"}
    assert any("'caption'" in note and "prompt" in note for note in plan.notes)


def test_map_wins_over_aliases_and_a_name_wins_over_map() -> None:
    assert read_as(["text", "long"], {"long": "prompt"}) == {"prompt": "long"}
    assert read_as(["prompt", "long"], {"long": "prompt"}) == {"prompt": "prompt"}
    assert read_as(["text", "cfg"], {"text": "negative_prompt"}) == {
        "negative_prompt": "text",
        "true_cfg_scale": "cfg",
    }


def test_an_empty_map_sets_a_column_aside() -> None:
    plan = make_plan(["prompt", "long", "n"], {"prompt": "", "long": "prompt", "n": ""})
    assert plan.prompt == "long"
    assert dict(plan.carried) == {"prompt": "prompt_carried", "n": "n"}


def test_size_is_taken_unless_there_are_height_and_width() -> None:
    assert read_as(["prompt", "size"])["size"] == "size"
    found = read_as(["prompt", "size", "width", "height"])
    assert found == {"prompt": "prompt", "width": "width", "height": "height"}


def test_a_carried_column_gives_way_to_the_output_s_own() -> None:
    plan = make_plan(["prompt", "image", "row", "image_carried", "sha256"], {})
    names = [name for _, name in plan.carried]
    assert len(set(names)) == len(names) == 4
    assert not set(names) & OUTPUT_COLUMNS
    assert dict(plan.carried)["row"] == "row_carried"
    assert dict(plan.carried)["image_carried"] == "image_carried"
    assert any("'row_carried'" in note for note in plan.notes)


def test_a_misspelt_option_is_carried_with_a_hint() -> None:
    notes = make_plan(["prompt", "heigth", "category", "Seed"], {}).notes
    assert "column 'heigth' is carried; did you mean height?" in notes
    assert "column 'Seed' is carried; did you mean seed?" in notes
    assert not any("category" in note for note in notes)
    assert not make_plan(["prompt", "height", "weight"], {}).notes


def test_map_to_an_unknown_column_is_refused() -> None:
    check_column_map({"a": "prompt", "b": "size", "c": ""})
    with pytest.raises(ManifestError, match="did you mean a=prompt"):
        check_column_map({"a": "promt"})
    with pytest.raises(ManifestError, match="known: id, prompt"):
        check_column_map({"a": "zzzz"})


def test_a_row_of_everything() -> None:
    row = build(
        {
            "id": 7,
            "prompt": "a cup",
            "negative_prompt": "",
            "height": 512,
            "width": "768",
            "num_inference_steps": 20.0,
            "true_cfg_scale": 4,
            "guidance_scale": 3.5,
            "seed": 2**64 - 1,
            "num_images_per_prompt": 2,
            "lora": "style",
            "lora_scale": -0.5,
            "note": None,
            "tags": ["a"],
        }
    )
    assert isinstance(row, ManifestRow)
    assert (row.row, row.line, row.id, row.prompt) == (3, 4, "7", "a cup")
    assert row.params == SamplingParams(
        height=512,
        width=768,
        num_inference_steps=20,
        true_cfg_scale=4.0,
        guidance_scale=3.5,
        negative_prompt="",
        seed=2**64 - 1,
        num_images_per_prompt=2,
        lora="style",
        lora_scale=-0.5,
    )
    assert row.carried == {"note": None, "tags": ["a"]}


def test_null_is_absent() -> None:
    row = build(dict.fromkeys(KNOWN_COLUMNS) | {"prompt": "x", "size": None})
    assert isinstance(row, ManifestRow)
    assert row.id == "00000003"
    assert row.params == SamplingParams()


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n"}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"text": 5}, "text"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x" * (2**20 + 1)}, "prompt"),
        ({"prompt": "x", "id": ""}, "id"),
        ({"prompt": "x", "id": True}, "id"),
        ({"prompt": "x", "height": 0}, "height"),
        ({"prompt": "x", "width": True}, "width"),
        ({"prompt": "x", "step": 1.5}, "step"),
        ({"prompt": "x", "cfg": -1}, "cfg"),
        ({"prompt": "x", "guidance_scale": "high"}, "guidance_scale"),
        ({"prompt": "x", "seed": -1}, "seed"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 10**12}, "n"),
        ({"prompt": "x", "size": "big"}, "size"),
        ({"prompt": "x", "negative_prompt": 1}, "negative_prompt"),
        ({"prompt": "x", "lora": " "}, "lora"),
        ({"prompt": "x", "lora_scale": float("nan")}, "lora_scale"),
        ({"prompt": "x", "note": "\udfff"}, "note"),
        ({"prompt": "x", "note": {"deep": ["\udfff"]}}, "note"),
        ({"custom_id": "a", "body": "text"}, "body"),
        ({"custom_id": "a", "body": None}, "body"),
        ({"custom_id": "a", "body": {"n": 1}}, "prompt"),
    ],
)
def test_a_faulty_value_names_its_column(values: dict[str, Any], column: str) -> None:
    faults = build(values)
    assert isinstance(faults, tuple)
    assert [fault.column for fault in faults] == [column]
    assert all(fault.reason and fault.value.isprintable() for fault in faults)


def test_a_row_tells_all_its_faults() -> None:
    faults = build({"id": "a", "prompt": " ", "seed": "x", "width": -5})
    assert isinstance(faults, tuple)
    assert {(fault.column, fault.value) for fault in faults} == {
        ("prompt", " "),
        ("seed", "x"),
        ("width", "-5"),
    }
    assert {fault.id for fault in faults} == {"a"}


def test_openai_batch_line() -> None:
    notes: list[str] = []
    row = build(
        {
            "custom_id": "req-1",
            "method": "POST",
            "url": "/v1/images/generations",
            "body": {"prompt": "a dog", "n": 2, "size": "1024x768", "model": "m", "url": "twice"},
        },
        notes,
    )
    assert isinstance(row, ManifestRow)
    assert (row.id, row.prompt) == ("req-1", "a dog")
    assert row.params == SamplingParams(width=1024, height=768, num_images_per_prompt=2)
    assert row.carried == {
        "method": "POST",
        "url": "/v1/images/generations",
        "model": "m",
        "body.url": "twice",
    }
    assert any("OpenAI" in note for note in notes)


def test_openai_schema_is_flattened_like_its_rows() -> None:
    body = pa.struct([("prompt", pa.string()), ("n", pa.int64())])
    schema = pa.schema([("custom_id", pa.string()), ("body", body), ("url", pa.string())])
    flat = flatten_openai_schema(schema)
    assert flat.names == ["custom_id", "url", "prompt", "n"]
    assert flat.field("n").type == pa.int64()


def test_content_hash_is_over_values_not_place() -> None:
    expected = json.dumps(["a cup", {"seed": 1}, {"k": "ü"}], ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.blake2b(expected.encode(), digest_size=8).hexdigest()
    assert content_hash("a cup", {"seed": 1}, {"k": "ü"}) == digest

    first = build({"prompt": "a cup", "seed": 1, "k": "ü", "id": "a"})
    second = build({"k": "ü", "id": "b", "seed": "1", "prompt": "a cup"})
    changed = build({"k": "u", "id": "b", "seed": "1", "prompt": "a cup"})
    assert isinstance(first, ManifestRow)
    assert isinstance(second, ManifestRow)
    assert isinstance(changed, ManifestRow)
    assert first.content_hash == second.content_hash == digest != changed.content_hash


def test_a_faulty_row_has_a_hash_too() -> None:
    [one], [two] = build({"prompt": "", "k": 1}), build({"prompt": "", "k": 2})
    assert isinstance(one, RowFault)
    assert isinstance(two, RowFault)
    assert len(one.content_hash) == 16
    assert one.content_hash != two.content_hash


def test_a_flood_of_columns_is_refused_and_memory_stays_bounded() -> None:
    builder = RowBuilder({}, notes := [])
    for index in range(MAX_CARRIED_COLUMNS):
        builder.build("f", Record(index, index, {"prompt": "x", f"seed{index}": 1}))
    with pytest.raises(ManifestError, match="different columns"):
        builder.build("f", Record(0, 0, {"prompt": "x", "one more": 1}))
    assert len(notes) <= 100
