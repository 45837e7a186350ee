"""Folders, globs, URLs, standard input."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry
from manifest_fakes import good_rows, items, opened, prompts, write_jsonl

from offline_diffusion.errors import ManifestError


def test_sources_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "z.jsonl", [{"prompt": "z"}, {"prompt": "y"}])
    pq.write_table(pa.table({"caption": ["p"]}), tmp_path / "a.parquet")
    (tmp_path / "m.txt").write_text("m\n")
    rows = good_rows(tmp_path / "z.jsonl", tmp_path / "a.parquet", tmp_path / "m.txt")
    assert [(row.row, row.id, row.prompt, row.line) for row in rows] == [
        (0, "00000000", "z", 1),
        (1, "00000001", "y", 2),
        (2, "00000002", "p", 1),
        (3, "00000003", "m", 1),
    ]
    assert [Path(row.file).name for row in rows] == ["z.jsonl", "z.jsonl", "a.parquet", "m.txt"]


def test_a_folder_is_all_its_data_files_sorted(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    write_jsonl(folder / "2.jsonl", [{"prompt": "2"}])
    pq.write_table(pa.table({"prompt": ["1"]}), folder / "1.parquet")
    (folder / "3.csv").write_text("prompt\n3\n")
    (folder / "b" / "4.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "4"}\n'))
    (folder / ".git" / "x.json").write_text("no")
    (folder / "_SUCCESS").write_text("")
    (folder / "README.md").write_text("about")
    (folder / "empty.jsonl").write_text("")
    manifest = opened(folder)
    assert [getattr(row, "prompt", row) for row in manifest.read()] == ["1", "2", "3", "4"]
    assert f"{folder}: left out README.md: no data files" in manifest.notes
    assert f"{folder / 'empty.jsonl'}: is empty and left out" in manifest.notes


def test_a_glob(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.json"):
        write_jsonl(tmp_path / name, [{"prompt": name}])
    (tmp_path / "d.jsonl").mkdir()
    assert prompts(tmp_path / "*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert prompts(tmp_path / "**" / "c.*") == ["c.json"]
    write_jsonl(tmp_path / "x[1].jsonl", [{"prompt": "literal"}])
    assert prompts(tmp_path / "x[1].jsonl") == ["literal"]


def test_what_is_not_there(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a"}])
    with pytest.raises(ManifestError, match=r"no such file or folder\nhint: did you mean .*prompts\.jsonl"):
        opened(tmp_path / "promts.jsonl")
    with pytest.raises(ManifestError, match=r"no file matches\nhint:"):
        opened(tmp_path / "*.parquet")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "picture.png").write_bytes(b"x")
    with pytest.raises(ManifestError, match=r"holds no data files\nhint: looked for: \.parquet"):
        opened(tmp_path / "none")
    (tmp_path / "empties").mkdir()
    (tmp_path / "empties" / "a.jsonl").write_text("")
    with pytest.raises(ManifestError, match="is empty, and so are all files beside it"):
        opened(tmp_path / "empties")
    with pytest.raises(ManifestError, match="no manifest is named"):
        opened()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"prompt": "a"}])
    path.chmod(0)
    with pytest.raises(ManifestError, match=r"a\.jsonl: cannot be opened"):
        opened(path)


def test_a_file_that_vanishes_before_it_is_read(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.parquet", "c.csv"):
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
        pq.write_table(pa.table({"prompt": ["b"]}), tmp_path / "b.parquet")
        (tmp_path / "c.csv").write_text("prompt\nc\n")
        manifest = opened(tmp_path / name)
        (tmp_path / name).unlink()
        with pytest.raises(ManifestError, match=name):
            list(manifest.read())


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def test_urls_of_any_file_system(memory: fsspec.AbstractFileSystem) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["p0", "p1"]}), sink)
    memory.pipe("/set/a.parquet", sink.getvalue())
    memory.pipe("/set/b.jsonl.gz", gzip.compress(b'{"prompt": "j0"}\n'))
    memory.pipe("/texts/x.txt", b"one prompt")
    assert prompts("memory://set/a.parquet") == ["p0", "p1"]
    assert prompts("memory://set") == ["p0", "p1", "j0"]
    assert prompts("memory://set/*.gz") == ["j0"]
    [row] = good_rows("memory://texts")
    assert (row.id, row.prompt) == ("x", "one prompt")
    assert row.file == "memory:///texts/x.txt"
    for missing in ("memory://nothing", "memory://set/*.csv"):
        with pytest.raises(ManifestError, match="is not there"):
            opened(missing)


def test_fingerprint_of_a_url(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe("/a.jsonl", b'{"prompt": "a"}\n')
    [entry] = opened("memory://a.jsonl").fingerprint()["files"]
    assert entry["size"] == 16
    assert entry["version"] is not None


def test_a_file_url_and_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    assert prompts(f"file://{path}") == ["a"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prompts("~/a.jsonl") == ["a"]


def test_file_systems_that_are_not_there() -> None:
    with pytest.raises(ManifestError, match="nosuch://a: cannot be opened"):
        opened("nosuch://a")


def test_a_missing_driver_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)  # where it was in use before
    with pytest.raises(ManifestError, match=r"s3://bucket/a\.jsonl: .*\nhint: pip install s3fs"):
        opened("s3://bucket/a.jsonl")


class Stdin:
    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input_can_be_read_as_often_as_needed(
    monkeypatch: pytest.MonkeyPatch, pack: type[bytes]
) -> None:
    content = "".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(1000)).encode()
    monkeypatch.setattr(sys, "stdin", Stdin(pack(content)))
    manifest = opened("-")
    for _ in range(2):
        assert [getattr(row, "prompt", row) for row in manifest.read()] == [f"p{n}" for n in range(1000)]
    [entry] = manifest.fingerprint()["files"]
    assert entry["name"] == "-"


def test_standard_input_is_jsonl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"a cup of coffee\n"))
    with pytest.raises(ManifestError, match=r'-: none of its first rows can be read.*\nhint: .*{"prompt"'):
        opened("-")
    monkeypatch.setattr(sys, "stdin", Stdin(b""))
    with pytest.raises(ManifestError, match="-: is empty"):
        opened("-")
    with pytest.raises(ManifestError, match="only once"):
        opened("-", "-")


def test_a_pipe_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b'{"prompt": "a"}\n{"prompt": "b"}\n',))
    writer.start()
    manifest = opened(path)
    writer.join()
    assert [len(list(manifest.read())) for _ in range(2)] == [2, 2]


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/set"
    os.mkdir(folder)
    with open(folder + b"/caf\xe9.jsonl", "wb") as stream:
        stream.write(b'{"prompt": "a"}\n')
    [row] = items(tmp_path / "set")
    assert row.file.encode().endswith(rb"caf\xe9.jsonl")
