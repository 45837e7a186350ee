"""What a file is, told by its content."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manifest_fakes import good_rows, opened, prompts

from offline_diffusion.data.readers.sniff import suffix_of
from offline_diffusion.errors import ManifestError


def kind(path: Path, content: bytes | str) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return type(opened(path).files[0]).__name__


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("a.JSONL", ".jsonl"),
        ("a.csv.gz", ".csv"),
        ("a.b/c.txt.zst", ".txt"),
        ("x", ""),
        ("a.gz", ""),
        ("a.xyz", ".xyz"),
    ],
)
def test_suffixes(name: str, suffix: str) -> None:
    assert suffix_of(name) == suffix


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"prompt": "a"}\n', "JsonLinesReader"),
        ("a.json", '{"prompt": "a"}\n{"prompt": "b"}\n', "JsonLinesReader"),
        ("a.csv", '{"prompt": "a"}\n{"prompt": "b"}\n', "JsonLinesReader"),
        ("a.jsonl", 'oops\n{"prompt": "a"}\n', "JsonLinesReader"),
        ("a.jsonl", '{"prompt": "cut",\n{"prompt": "a"}\n', "JsonLinesReader"),
        ("a.jsonl", '[1, 2]\n{"prompt": "a"}\n', "JsonLinesReader"),
        ("a.jsonl", '[[[[\n{"prompt": "a"}\n{"prompt": "b"}\n', "JsonLinesReader"),
        ("a.jsonl", '{"prompt": "a"}\noops\noops\noops\n', "JsonLinesReader"),
        ("a.jsonl", '{"a": {"prompt": "x"}}\n', "JsonDocumentReader"),
        ("a.jsonl", '["a", "b"]', "JsonDocumentReader"),
        ("a.txt", '["a", "b"]', "JsonDocumentReader"),
        ("a.json", '{"a": "x"}\n', "JsonDocumentReader"),
        ("a.txt", "a cat\na dog\n", "PromptLinesReader"),
        ("a", "a cat\na dog\n", "PromptLinesReader"),
        ("a.txt", "prompt, with, commas\n", "PromptLinesReader"),
        ("a.txt", "[cat|dog] in a hat\n", "PromptLinesReader"),
        ("a.txt", "{cat|dog} in a hat\n", "PromptLinesReader"),
        ("a.txt", '"a" cat\n', "PromptLinesReader"),
        ("a.txt", 'a\n{"prompt": "b"}\nc\n', "PromptLinesReader"),
        ("a.csv", "prompt,seed\na,1\n", "DelimitedReader"),
        ("a.json", "prompt,seed\na,1\n", "DelimitedReader"),
    ],
)
def test_text_formats(tmp_path: Path, name: str, content: str, expected: str) -> None:
    assert kind(tmp_path / name, content) == expected
    assert kind(tmp_path / name, b"\xef\xbb\xbf" + content.encode()) == expected
    assert kind(tmp_path / name, gzip.compress(content.encode())) == expected


def parquet_bytes() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": ["a"]}), sink)
    return sink.getvalue().to_pybytes()


def arrow_bytes() -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("prompt", pa.string())])) as writer:
        writer.write_table(pa.table({"prompt": ["a"]}))
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\r\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        ("a cat\n".encode("utf-16"), "is UTF-16"),
        (b"\x00\x01\x02\x03" * 100, "neither text nor Parquet"),
        (b"PK\x03\x04" + bytes(50), "zip archive or a spreadsheet"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html>\n<html></html>", "is a web page"),
        (gzip.compress(parquet_bytes(), mtime=0), "compressed Parquet"),
        (arrow_bytes(), "is an Arrow file"),
        (b"ARROW1\0\0" + bytes(50), "is an Arrow file"),
        (b"PARE" + bytes(50), "encrypted Parquet"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt", "rows.parquet"])
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ManifestError, match=message) as caught:
        opened(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))


@pytest.mark.parametrize("name", ["notes.md", "rows.parquet", "rows.json"])
def test_text_under_a_name_that_promises_more_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a cat\na dog\n")
    with pytest.raises(ManifestError, match=r"\nhint: known are Parquet"):
        opened(tmp_path / name)


LONG = "x" * 400_000


@pytest.mark.parametrize(
    "text",
    [
        f'{{"prompt": "{LONG}"}}\n{{"prompt": "b"}}\n',
        f'{{"id": "1", "prompt": "{LONG}"}}\n{{"id": "2", "prompt": "b"}}\n',
        f'["{LONG}", "b"]',
        f'[{{"prompt": "{LONG}"}},\n{{"prompt": "b"}}]',
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_first_row_longer_than_what_is_looked_at(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert prompts(tmp_path / name) == [LONG, "b"]


@pytest.mark.parametrize("name", ["meta.json", "meta.jsonl"])
def test_a_long_object_of_ids_in_one_line(tmp_path: Path, name: str) -> None:
    rows = {f"id{n}": {"category": "art", "prompt": f"a vase {n}"} for n in range(10_000)}
    (tmp_path / name).write_text(json.dumps(rows))
    found = good_rows(tmp_path / name)
    assert [(row.id, row.prompt) for row in found] == [(key, row["prompt"]) for key, row in rows.items()]
