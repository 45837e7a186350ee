"""Manifests on object storage whose requests fail: against a real S3 server."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from manifest_fakes import opened
from s3_server import BUCKET, Fault, S3Request, S3Server

from offline_diffusion.cli.main import main
from offline_diffusion.data.manifest import same_manifest
from offline_diffusion.data.readers import files
from offline_diffusion.data.requests_again import RequestsAgain
from offline_diffusion.data.row_reader import RowReader
from offline_diffusion.errors import JobInterrupted, ManifestError

NUM_ROWS = 300
PROMPTS = [f"a red cup, view {n}" for n in range(NUM_ROWS)]
JSONL = b"".join(json.dumps({"prompt": prompt}).encode() + b"\n" for prompt in PROMPTS)


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": PROMPTS}), sink, row_group_size=100)
    return sink.getvalue()


SOURCES: dict[str, tuple[str, Callable[[], dict[str, bytes]]]] = {
    "jsonl": ("m.jsonl", lambda: {"m.jsonl": JSONL}),
    "gzip": ("m.jsonl.gz", lambda: {"m.jsonl.gz": gzip.compress(JSONL)}),
    "parquet": ("m.parquet", lambda: {"m.parquet": parquet()}),
    "folder": ("set", lambda: {"set/a.jsonl": JSONL[: JSONL.index(b"\n") + 1], "set/b.parquet": parquet()}),
    "glob": ("set/*.jsonl", lambda: {"set/a.jsonl": JSONL, "set/b.csv": b"prompt\nno\n"}),
    "prompt files": ("texts", lambda: {f"texts/{n:03d}.txt": b"a red cup" for n in range(2)}),
}


def url(name: str) -> str:
    return f"s3://{BUCKET}/{name}"


def fail_twice(s3: S3Server) -> Counter[S3Request]:
    """Each request fails in two ways before it succeeds."""
    seen: Counter[S3Request] = Counter()

    def fault(request: S3Request) -> Fault | None:
        seen[request] += 1
        faults: dict[int, Fault] = {1: "busy", 2: "lost"}
        return faults.get(seen[request])

    s3.fault = fault
    return seen


@pytest.mark.parametrize("kind", list(SOURCES))
def test_requests_that_fail_are_made_again(s3: S3Server, kind: str) -> None:
    """Opening, listing, ranges and stamps: catches any of them without patience, and rows lost or twice."""
    source, content = SOURCES[kind]
    for key, value in content().items():
        s3.put(key, value)
    whole = [row.prompt for row in opened(url(source)).read()]  # type: ignore[union-attr]
    seen = fail_twice(s3)
    said: list[str] = []
    manifest = opened(url(source), requests=RequestsAgain(say=said.append))
    assert [row.prompt for row in manifest.read()] == whole  # type: ignore[union-attr]
    assert same_manifest(manifest.fingerprint(), manifest) == []
    assert max(seen.values()) > 2
    assert len(whole) == {"folder": NUM_ROWS + 1, "prompt files": 2}.get(kind, NUM_ROWS)
    assert any(line.endswith("trying again, for at most 300 s") for line in said), said


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_fault_in_mid_file(s3: S3Server, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Rows from a stream that is opened anew where it broke, not from the beginning."""
    source, content = SOURCES[kind]
    for key, value in content().items():
        s3.put(key, value)
    monkeypatch.setattr("s3fs.S3FileSystem.default_block_size", 2_000)
    monkeypatch.setattr(files, "BUFFER_BYTES", 500)
    manifest = opened(url(source))
    num_reads = 0

    def fault(request: S3Request) -> Fault | None:
        nonlocal num_reads
        num_reads += request.verb == "GET"
        return "busy" if request.verb == "GET" and num_reads % 3 else None

    s3.fault = fault
    assert [row.prompt for row in manifest.read()] == PROMPTS  # type: ignore[union-attr]
    assert num_reads >= 6


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "prompt files"])
@pytest.mark.parametrize("when", ["open", "read", "stamp"])
def test_an_outage_ends_in_good_order(s3: S3Server, kind: str, when: str) -> None:
    source, content = SOURCES[kind]
    for key, value in content().items():
        s3.put(key, value)
    said: list[str] = []
    requests = RequestsAgain(say=said.append, give_up_after_s=0.3)
    manifest = opened(url(source), requests=requests)
    actions: dict[str, Callable[[], Any]] = {
        "open": lambda: opened(url(source), requests=requests),
        "read": lambda: list(manifest.read()),
        "stamp": manifest.fingerprint,
    }
    s3.fault = lambda request: "busy" if when != "read" or request.verb == "GET" else None
    with pytest.raises(JobInterrupted, match=r"cannot be reached: .*\nhint: the same command goes") as caught:
        actions[when]()
    assert caught.value.exit_code == 75
    assert [line for line in said if line.startswith(url(source)) and "for at most 0 s" in line]


def num_requests(s3: S3Server, action: Callable[[], Any]) -> int:
    s3.requests.clear()
    action()
    return len(s3.requests)


def test_what_is_not_there_or_denied_is_told_at_once(s3: S3Server) -> None:
    s3.put("m.jsonl", JSONL)
    for missing in ("nothing.jsonl", "set/*.csv"):
        with pytest.raises(ManifestError, match=r"is not there\nhint: check the address"):
            opened(url(missing))
    with pytest.raises(ManifestError, match="is not there"):
        opened("s3://no-such-bucket/m.jsonl")
    manifest = opened(url("m.jsonl"))
    s3.fault = lambda _: "denied"
    s3.requests.clear()
    for action in (lambda: opened(url("m.jsonl")), lambda: list(manifest.read()), manifest.fingerprint):
        with pytest.raises(ManifestError, match=r"m\.jsonl: cannot be read: (made up|Forbidden)") as caught:
            action()
        assert "AWS_PROFILE" in (caught.value.hint or "")
    assert len(s3.requests) <= 6


def test_a_file_that_changes_or_goes(s3: S3Server) -> None:
    """Of the same size. Catches stamps from a cache of what was listed."""
    for key, value in {"set/a.jsonl": JSONL, "set/b.jsonl": JSONL}.items():
        s3.put(key, value)
    manifest = opened(url("set"))
    list(manifest.read())
    manifest.fingerprint()
    reader = RowReader(manifest)
    assert len(reader.read(range(3))) == 3
    s3.put("set/a.jsonl", JSONL.replace(b"red", b"tea"))
    with pytest.raises(ManifestError, match=r"a\.jsonl: has changed since this run began"):
        reader.read(range(3, 6))
    assert len(reader.read(range(NUM_ROWS, NUM_ROWS + 3))) == 3
    s3.delete("set/b.jsonl")
    with pytest.raises(ManifestError, match=r"b\.jsonl: cannot be read: it is not there"):
        reader.read(range(NUM_ROWS + 3, NUM_ROWS + 6))


def test_a_folder_of_prompt_files_is_looked_at_by_listing_it(s3: S3Server) -> None:
    """Not by a request for each file, and none is read again at a later start."""
    for n in range(12):
        s3.put(f"texts/{n:03d}.txt", b"a red cup")
    before = json.loads(json.dumps(opened(url("texts")).fingerprint()))
    again = opened(url("texts"))
    s3.requests.clear()
    assert same_manifest(before, again) == []
    assert {request.verb for request in s3.requests} == {"LIST"}
    assert len(s3.requests) <= 2
    reader = RowReader(again)
    s3.put("texts/004.txt", b"a tea cup")
    assert len(reader.read(range(4))) == 4
    with pytest.raises(ManifestError, match=r"004\.txt: has changed"):
        reader.read(range(4, 8))


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_commands_wait_too(s3: S3Server, tiny_model: Any, command: str) -> None:
    s3.put("m.jsonl", JSONL)
    fail_twice(s3)
    done = CliRunner().invoke(main, [command, url("m.jsonl")])
    assert done.exit_code == 0, done.output
    waits = [line for line in done.stderr.splitlines() if line.endswith("trying again, for at most 300 s")]
    assert waits
    assert all(line.startswith(f"{url('m.jsonl')}: ") for line in waits)
    assert "300" in done.output
