"""JSON lists and JSON objects."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifest_fakes import good_rows, items, opened, prompts

from offline_diffusion.data.readers import document
from offline_diffusion.data.readers.base import DamagedError
from offline_diffusion.data.readers.document import ElementSplitter
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.errors import ManifestError

texts = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)


def split(text: bytes) -> list[tuple[int, bytes]]:
    return list(ElementSplitter(io.BufferedReader(io.BytesIO(text))))  # type: ignore[arg-type]


@given(st.lists(json_values), st.sampled_from([None, 0, 2]), st.booleans(), st.integers(1, 9))
def test_a_list_splits_into_its_elements(
    values: list[Any], indent: int | None, ascii_: bool, size: int
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "CHUNK_BYTES", size)
        parts = split(text)
    assert [json.loads(raw) for _, raw in parts] == values
    lines = text.split(b"\n")
    assert all(raw.split(b"\n")[0] in lines[line - 1] for line, raw in parts)


@given(st.dictionaries(texts, json_values), st.integers(1, 9))
def test_an_object_splits_into_its_entries(values: dict[str, Any], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "CHUNK_BYTES", size)
        parts = split(json.dumps(values, indent=1).encode())
    assert [json.loads(b"{" + raw + b"}") for _, raw in parts] == [
        {key: value} for key, value in values.items()
    ]


@pytest.mark.parametrize("text", [b'["a", "b"', b'["a', b"[", b'["a"] trailing', b'{"a": 1', b'["a\\'])
def test_a_document_that_breaks_off_is_damaged(text: bytes) -> None:
    with pytest.raises(DamagedError):
        split(text)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows"])
def test_a_list_of_prompts(tmp_path: Path, indent: int | None, name: str) -> None:
    path = tmp_path / name
    values = ["a cat", "a dog, [sitting]", 'say "hi" \\ {x}', "ünï"]
    path.write_text(json.dumps(values, indent=indent))
    assert prompts(path) == values


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_rows(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "a", "seed": 2**63, "k": [1]}, {"caption": "b"}], indent=indent))
    first, second = good_rows(path)
    assert (first.prompt, first.params.seed, first.carried) == ("a", 2**63, {"k": [1]})
    assert second.prompt == "b"


def test_a_list_with_a_row_a_line(tmp_path: Path) -> None:
    for name in ("rows.json", "rows.jsonl", "rows.txt"):
        path = tmp_path / name
        path.write_text('[\n{"prompt": "a"},\n{"prompt": "b"}\n]\n')
        assert [(row.prompt, row.line) for row in good_rows(path)] == [("a", 2), ("b", 3)]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_of_ids_to_rows(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "meta.json"
    values = {"0a1": {"category": "food", "prompt": "a pie"}, "0b2": {"category": "art", "prompt": "a vase"}}
    path.write_text(json.dumps(values, indent=indent))
    assert [(row.id, row.prompt, row.carried["category"]) for row in good_rows(path)] == [
        ("0a1", "a pie", "food"),
        ("0b2", "a vase", "art"),
    ]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_of_ids_to_prompts(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"one": "a pie", "two": "a vase"}, indent=indent))
    assert [(row.id, row.prompt) for row in good_rows(path)] == [("one", "a pie"), ("two", "a vase")]


def test_short_names_of_parameters_by_image(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    path.write_text(json.dumps({"x.png": {"p": "a fox", "se": 38753269, "c": 12.0, "st": 50, "sa": "k_lms"}}))
    [row] = good_rows(path)
    assert (row.id, row.prompt, row.carried) == ("x.png", "a fox", {"sa": "k_lms"})
    params = row.params
    assert (params.seed, params.true_cfg_scale, params.num_inference_steps) == (38753269, 12.0, 50)


def test_an_id_inside_is_carried_when_the_key_is_the_id(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"k1": {"id": 5, "prompt": "a"}, "k2": {"id": 5, "prompt": "b"}}))
    assert [(row.id, row.carried) for row in good_rows(path)] == [
        ("k1", {"id_carried": 5}),
        ("k2", {"id_carried": 5}),
    ]


BROKEN_ELEMENTS = {
    "a number": "1",
    "null": "null",
    "a list": '["a"]',
    "NaN": '{"prompt": "a", "seed": NaN}',
    "a key twice": '{"prompt": "a", "prompt": "b"}',
    "deep": "[" * 200_000 + "]" * 200_000,
    "digits": '{"prompt": "a", "seed": ' + "9" * 5000 + "}",
    "nothing": "",
    "no JSON": "{prompt: a}",
    "blank": '" "',
    "half a surrogate pair": r'"\udc00"',
}


@pytest.mark.parametrize("name", BROKEN_ELEMENTS)
def test_a_broken_element_costs_only_its_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(f'["before",\n{BROKEN_ELEMENTS[name]},\n"after"]')
    before, fault, after = items(path)
    assert isinstance(before, ManifestRow)
    assert isinstance(fault, RowFault)
    assert isinstance(after, ManifestRow)
    assert (fault.row, after.row, after.line) == (1, 2, 3)
    path.write_text(f'{{"a": "before",\n"b": {BROKEN_ELEMENTS[name]},\n"c": "after"}}')
    assert [isinstance(item, RowFault) for item in items(path)] == [False, True, False]


def test_bytes_that_are_not_utf8_cost_only_their_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'["a", "caf\xe9", "b"]')
    assert [isinstance(item, RowFault) for item in items(path)] == [False, True, False]


def test_an_element_without_end_is_a_fault_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'["a", "' + b"x" * (40 * 2**20) + b'\n", "b"]')
    first, fault, last = items(path)
    assert isinstance(first, ManifestRow)
    assert isinstance(fault, RowFault)
    assert "bytes long" in fault.reason
    assert isinstance(last, ManifestRow)


def test_a_cut_off_document_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([f"prompt {n}" for n in range(1000)])[:-20])
    with pytest.raises(ManifestError, match=r"cannot be read beyond about row 99\d of it.*cut off"):
        items(path)


def test_other_json_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"prompt": "a", "seed": 1}, indent=1))
    with pytest.raises(ManifestError, match="one row written over several lines"):
        opened(path)
    path.write_text(json.dumps({"data": [{"prompt": "a"}]}, indent=1))
    with pytest.raises(ManifestError, match=r"one\.json"):
        opened(path)
    path.write_text("[]")
    with pytest.raises(ManifestError, match="holds no rows"):
        opened(path)
    path.write_text('"only a string"')
    with pytest.raises(ManifestError, match="no JSON list or object"):
        opened(path)


def test_one_row_on_one_line_is_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"prompt": "a", "seed": 1}))
    [row] = good_rows(path)
    assert (row.prompt, row.params.seed) == ("a", 1)


def test_hpsv2_style_list_in_one_long_line(tmp_path: Path) -> None:
    values = [f"Prompt number {n}, with a comma and some length to it" for n in range(20_000)]
    path = tmp_path / "anime.json"
    path.write_text(json.dumps(values))
    manifest = opened(path)
    assert [row.prompt for row in manifest.read() if isinstance(row, ManifestRow)] == values
    assert [row.row for row in manifest.read([range(5), range(19_999, 30_000)])] == [0, 1, 2, 3, 4, 19_999]
