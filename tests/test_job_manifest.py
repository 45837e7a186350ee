"""Manifests that change, vanish or cannot be reached while a job runs: nothing is lost, nothing mixed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_fakes import SMALL, Runner, at_step, make_rows, pixels_by_key, read_table, write_jsonl

from offline_diffusion import draw_loop
from offline_diffusion.data.readers.files import DataFile
from offline_diffusion.data.verify import verify
from offline_diffusion.errors import JobInterrupted, ManifestError
from offline_diffusion.progress import StopFlag

NUM_ROWS = 12
OPTIONS: dict[str, Any] = {"shard_size": 3, "max_num_seqs": 2, "device": "cpu"} | SMALL

Change = Callable[[Path], Any]


@pytest.fixture(autouse=True)
def little_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read shortly before they are drawn, as in a manifest of many."""
    monkeypatch.setattr(draw_loop, "LOOK_AHEAD", 2)


def make_manifest(path: Path) -> Path:
    return write_jsonl(path, make_rows(NUM_ROWS))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("whole")
    Runner().run(make_manifest(folder / "m.jsonl"), folder / "out", **OPTIONS)
    return pixels_by_key(folder / "out")


def rewrite(path: Path) -> None:
    """In place, with as many rows and bytes."""
    content = path.read_bytes().replace(b"red cup", b"tin pot")
    with path.open("r+b") as stream:
        stream.write(content)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))  # clocks of file systems may be coarse


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"red cup", b"tin pot"))
    os.replace(other, path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))


@pytest.mark.parametrize("change", [rewrite, replace])
def test_a_manifest_that_changes(tmp_path: Path, whole: dict[Any, Any], change: Change) -> None:
    """Catches shards of two manifests in one dataset, which nothing would tell afterwards."""
    manifest, out = make_manifest(tmp_path / "m.jsonl"), tmp_path / "out"
    kept = Path(shutil.copy(manifest, tmp_path / "kept"))
    first = Runner()
    first.on_step = at_step(3, lambda: change(manifest))
    with pytest.raises(ManifestError, match=r"m\.jsonl: has changed since this run began\nhint: ") as caught:
        first.run(manifest, out, **OPTIONS)
    assert caught.value.exit_code == 1
    assert first.finished, "what was drawn before is kept"
    assert all("red cup" in prompt for prompt in first.finished)
    assert sum(first.finished.values()) < NUM_ROWS
    assert not any("tin pot" in row["prompt"] for row in read_table(out, "images"))
    assert verify(out).problems == []

    kept.replace(manifest)
    second = Runner()
    second.run(manifest, out, **OPTIONS)
    assert not set(first.finished) & set(second.finished)
    assert pixels_by_key(out) == whole


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.rename(path.with_name("away"))])
def test_a_manifest_that_is_gone(tmp_path: Path, whole: dict[Any, Any], change: Change) -> None:
    """Deleted for real: the reader has it open and could read on for ever."""
    manifest, out = make_manifest(tmp_path / "m.jsonl"), tmp_path / "out"
    content = manifest.read_bytes()
    first = Runner()
    first.on_step = at_step(3, lambda: change(manifest))
    with pytest.raises(ManifestError, match=r"m\.jsonl: cannot be read: it is not there\n") as caught:
        first.run(manifest, out, **OPTIONS)
    assert caught.value.exit_code == 1
    assert 0 < sum(first.finished.values()) < NUM_ROWS

    manifest.write_bytes(content)
    second = Runner()
    second.run(manifest, out, **OPTIONS)
    assert first.engine is not None
    assert second.engine is not None
    assert not set(first.finished) & set(second.finished)
    assert first.engine.num_image_steps + second.engine.num_image_steps == NUM_ROWS * 2, "a step was lost"
    assert pixels_by_key(out) == whole


def test_a_manifest_on_storage_that_is_away(
    s3: Any, tmp_path: Path, whole: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for, in a line; a request to stop ends that with 75, and the same command goes on."""
    from s3_server import BUCKET

    monkeypatch.setattr("offline_diffusion.data.requests_again.STOPPING_S", 0.2)
    s3.put("m.jsonl", make_manifest(tmp_path / "m.jsonl").read_bytes())
    source, out, lines = f"s3://{BUCKET}/m.jsonl", tmp_path / "out", list[str]()
    first, stop = Runner(), StopFlag()

    def say(line: str) -> None:
        lines.append(line)
        if "trying again" in line:
            stop.request("SIGTERM")

    first.on_step = at_step(3, lambda: setattr(s3, "fault", lambda _: "busy"))
    with pytest.raises(JobInterrupted, match=r"m\.jsonl cannot be reached: .*Service Unavailable") as caught:
        first.run(source, out, stop=stop, say=say, **OPTIONS)
    assert caught.value.exit_code == 75
    assert [line for line in lines if line.startswith(source) and "trying again, for at most 300 s" in line]
    assert 0 < sum(first.finished.values()) < NUM_ROWS

    failing: dict[Any, int] = {}

    def first_try(request: Any) -> str | None:
        failing[request] = failing.get(request, 0) + 1
        return "busy" if failing[request] == 1 else None

    s3.fault = first_try
    second = Runner()
    second.run(source, out, **OPTIONS)
    assert failing
    assert not set(first.finished) & set(second.finished)
    assert pixels_by_key(out) == whole


def test_a_manifest_that_was_only_touched_is_read_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an index that keeps the old time: every start would read the manifest through."""
    manifest, out = make_manifest(tmp_path / "m.jsonl"), tmp_path / "out"
    num_digests, real = 0, DataFile.digest

    def counting(file: DataFile) -> str:
        nonlocal num_digests
        num_digests += 1
        return real(file)

    monkeypatch.setattr(DataFile, "digest", counting)
    counts = []
    for is_touched in (False, False, True, False):
        if is_touched:
            os.utime(manifest, ns=(1, 1))
        assert Runner().run(manifest, out, **OPTIONS).num_ok == NUM_ROWS
        counts.append(num_digests)
    assert counts == [1, 1, 2, 2]
