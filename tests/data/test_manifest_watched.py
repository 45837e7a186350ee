"""Manifests that change while they are read, and what a later start reads of those that have not."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from manifest_fakes import opened, write_jsonl

from offline_diffusion.data.manifest import Manifest, same_manifest
from offline_diffusion.data.readers.files import DataFile
from offline_diffusion.data.row_reader import RowReader
from offline_diffusion.errors import ManifestError


def ids(reader: RowReader, wanted: range) -> list[str | None]:
    return [row.id for row in reader.read(wanted)]


def watched(*sources: Path | str) -> RowReader:
    """A reader of what a job has read through once."""
    manifest = opened(*sources)
    list(manifest.read())
    manifest.fingerprint()
    return RowReader(manifest)


def rows(letter: str, count: int = 10) -> list[dict[str, str]]:
    return [{"id": f"{letter}{n}", "prompt": "a red cup"} for n in range(count)]


def rewrite(path: Path, content: bytes) -> None:
    """In place: the file stays the same one, and whoever has it open sees the new content."""
    with path.open("r+b") as stream:
        stream.write(content)
        stream.truncate()
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))  # clocks of file systems may be coarse


# --- while rows are read ----------------------------------------------------------------------


def test_a_file_rewritten_in_place(tmp_path: Path) -> None:
    """Of the same size, with the same rows: catches a look at the row count or the size alone."""
    path = Path(write_jsonl(tmp_path / "m.jsonl", rows("a")))
    reader = watched(path)
    assert ids(reader, range(3)) == ["a0", "a1", "a2"]
    rewrite(path, path.read_bytes().replace(b'"a', b'"b'))
    with pytest.raises(ManifestError, match=r"m\.jsonl: has changed since this run began\nhint: ") as caught:
        reader.read(range(3, 6))
    assert "--allow-manifest-change" in (caught.value.hint or "")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_touch_ends_nothing(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read through once, and what comes after it still counts."""
    path = Path(write_jsonl(tmp_path / "m.jsonl", rows("a"))) if kind == "file" else tmp_path / "a4.txt"
    if kind == "folder":
        for n in range(10):
            (tmp_path / f"a{n}.txt").write_text("a red cup")
    reader = watched(path if kind == "file" else tmp_path)
    digests: list[str] = []
    real = DataFile.open
    monkeypatch.setattr(DataFile, "open", lambda file: digests.append(file.name) or real(file))
    ids(reader, range(3, 6))
    num_reads = len(digests)
    rewrite(path, path.read_bytes())
    assert ids(reader, range(3, 6)) == ["a3", "a4", "a5"]
    assert len(digests) > num_reads + (1 if kind == "file" else 3)  # a look at the content
    del digests[:]
    assert ids(reader, range(3, 6)) == ["a3", "a4", "a5"]
    assert len(digests) <= num_reads
    rewrite(path, path.read_bytes().replace(b"red", b"tea"))
    with pytest.raises(ManifestError, match="has changed"):
        reader.read(range(3, 6))


def test_a_file_rewritten_while_a_range_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a look before the reading alone."""
    path = Path(write_jsonl(tmp_path / "m.jsonl", rows("a")))
    reader = watched(path)
    real = Manifest.walk

    def walk(manifest: Manifest, cursor: Any) -> Any:
        rewrite(path, path.read_bytes().replace(b'"a', b'"b'))
        return real(manifest, cursor)

    monkeypatch.setattr(Manifest, "walk", walk)
    with pytest.raises(ManifestError, match="has changed"):
        reader.read(range(3))


def test_only_what_the_rows_come_from_is_looked_at(tmp_path: Path) -> None:
    """With thousands of files a look at each, for every shard, would take its time."""
    for letter in "abc":
        write_jsonl(tmp_path / f"{letter}.jsonl", rows(letter))
    reader = watched(tmp_path)
    rewrite(tmp_path / "b.jsonl", (tmp_path / "b.jsonl").read_bytes().replace(b'"b', b'"x'))
    assert ids(reader, range(8, 10)) == ["a8", "a9"]
    assert ids(reader, range(20, 22)) == ["c0", "c1"]
    for wanted in (range(9, 11), range(10, 12), range(19, 20), range(18, 21)):
        with pytest.raises(ManifestError, match=r"b\.jsonl: has changed"):
            reader.read(wanted)


def test_a_prompt_file_of_a_folder(tmp_path: Path) -> None:
    for n in range(6):
        (tmp_path / f"p{n}.txt").write_text("a red cup")
    reader = watched(tmp_path)
    rewrite(tmp_path / "p3.txt", b"a tea cup")
    assert ids(reader, range(3)) == ["p0", "p1", "p2"]
    assert ids(reader, range(4, 6)) == ["p4", "p5"]
    with pytest.raises(ManifestError, match=r"p3\.txt: has changed"):
        reader.read(range(2, 4))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_that_is_gone(tmp_path: Path, kind: str) -> None:
    """Also one that a reader still has open, of which it could read on."""
    if kind == "file":
        path = Path(write_jsonl(tmp_path / "m.jsonl", rows("a")))
        reader = watched(path)
    else:
        for n in range(10):
            (tmp_path / f"a{n}.txt").write_text("a red cup")
        path, reader = tmp_path / "a4.txt", watched(tmp_path)
    assert ids(reader, range(3)) == ["a0", "a1", "a2"]
    kept = path.rename(tmp_path / "kept")
    with pytest.raises(
        ManifestError, match=rf"{path.name}: cannot be read: it is not there\nhint: once it is"
    ):
        reader.read(range(3, 6))
    kept.rename(path)
    assert ids(reader, range(3, 6)) == ["a3", "a4", "a5"]


# --- what a later start reads -----------------------------------------------------------------


@pytest.fixture
def num_opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many files were opened since the last call."""
    count, real = 0, DataFile.open

    def counting(file: DataFile) -> Any:
        nonlocal count
        count += 1
        return real(file)

    def since() -> int:
        nonlocal count
        before, count = count, 0
        return before

    monkeypatch.setattr(DataFile, "open", counting)
    return since


def fingerprint(manifest: Manifest) -> dict[str, Any]:
    """As an index keeps it."""
    return dict(json.loads(json.dumps(manifest.fingerprint())))


@pytest.mark.parametrize("kind", ["prompt files", "jsonl"])
def test_what_has_not_changed_is_not_read_again(
    tmp_path: Path, num_opened: Callable[[], int], kind: str
) -> None:
    for n in range(30):
        name, content = (f"{n}.txt", "a cup") if kind == "prompt files" else (f"{n}.jsonl", '{"prompt": "a"}')
        (tmp_path / name).write_text(content)
    before = fingerprint(opened(tmp_path))
    again = opened(tmp_path)
    num_opened()
    assert same_manifest(before, again) == []
    assert num_opened() == 0


@pytest.mark.parametrize("kind", ["prompt files", "jsonl"])
def test_what_was_only_touched_is_read_through_once(
    tmp_path: Path, num_opened: Callable[[], int], kind: str
) -> None:
    """Catches an index that keeps the old time: each start would read everything."""
    suffix, content = (".txt", "a cup") if kind == "prompt files" else (".jsonl", '{"prompt": "a"}')
    path = tmp_path / f"a{suffix}"
    path.write_text(content)
    before = fingerprint(opened(tmp_path))
    os.utime(path, ns=(1, 1))
    touched = opened(tmp_path)
    num_opened()
    assert same_manifest(before, touched) == []
    assert num_opened() > 0
    now = touched.known_fingerprint()
    assert [file["digest"] for file in now["files"]] == [file["digest"] for file in before["files"]]
    last = opened(tmp_path)
    num_opened()
    assert same_manifest(now, last) == []
    assert num_opened() == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: rewrite(folder / "1.txt", b"a pot"),
        lambda folder: (folder / "1.txt").rename(folder / "9.txt"),
        lambda folder: (folder / "9.txt").write_text("a pot"),
        lambda folder: (folder / "1.txt").unlink(),
    ],
    ids=["rewritten", "renamed", "new", "gone"],
)
def test_a_folder_of_prompt_files_that_has_changed(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text("a cup")
    before = fingerprint(opened(tmp_path))
    change(tmp_path)
    assert same_manifest(before, opened(tmp_path)) == [f"{tmp_path}: its content has changed"]


# --- over HTTP --------------------------------------------------------------------------------


class WebServer(ThreadingHTTPServer):
    """Serves one file; ``headers`` go with it, ``num_bodies`` counts how often some of it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content, self.headers, self.num_bodies = b"", dict[str, str](), 0
        self.failing: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_port}/m.jsonl"


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        status, content = 200, self.server.content
        if self.server.failing:
            status, content = self.server.failing.pop(), b"made up"
        elif asked := self.headers.get("Range"):
            start, stop = asked.removeprefix("bytes=").split("-")
            status, content = 206, content[int(start) : int(stop) + 1]
        self.send_response(status)
        for name, value in (self.server.headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.server.num_bodies += 1
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[WebServer]:
    pytest.importorskip("aiohttp", reason="comes with the extra s3")
    server = WebServer()
    server.content = b"".join(json.dumps(row).encode() + b"\n" for row in rows("a"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "headers", [{"ETag": '"one"'}, {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}, {}], ids=str
)
def test_a_file_over_http_is_read_again_only_where_the_server_tells_no_version(
    web: WebServer, headers: dict[str, str]
) -> None:
    web.headers = headers
    before = fingerprint(opened(web.url))
    again = opened(web.url)
    web.num_bodies = 0
    assert same_manifest(before, again) == []
    assert (web.num_bodies == 0) == bool(headers)
    web.content = web.content.replace(b'"a', b'"b')
    web.headers = {name: value.replace("o", "0").replace("5", "6") for name, value in headers.items()}
    assert same_manifest(before, opened(web.url)) == [f"{web.url}: its content has changed"]


def test_a_file_over_http_that_changes(web: WebServer) -> None:
    web.headers = {"ETag": '"one"'}
    reader = watched(web.url)
    assert ids(reader, range(3)) == ["a0", "a1", "a2"]
    web.headers = {"ETag": '"two"'}  # by another server of the same farm
    assert ids(reader, range(3, 6)) == ["a3", "a4", "a5"]
    web.content = web.content.replace(b'"a', b'"b')
    web.headers = {"ETag": '"three"'}
    with pytest.raises(ManifestError, match=r"m\.jsonl: has changed"):
        reader.read(range(3, 6))


def test_a_web_server_that_is_busy_for_a_while(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec calls every failure there a file that is not found."""
    monkeypatch.setattr("offline_diffusion.data.requests_again.FIRST_PAUSE_S", 0.01)
    web.failing = [503] * 5
    assert len(list(opened(web.url).read())) == 10
    assert web.failing == []


@pytest.mark.parametrize("status", [404, 403])
def test_a_file_that_a_web_server_does_not_have(web: WebServer, status: int) -> None:
    web.failing = [status] * 4
    with pytest.raises(ManifestError, match=r"m\.jsonl: is not there\nhint: check the address"):
        opened(web.url)
    assert len(web.failing) >= 2, "asked again"
