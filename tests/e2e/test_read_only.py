"""An output on a disk that is read-only, or becomes so: exit code 1, a reason, and nothing is corrupt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job_fakes import Runner, contents, make_rows, write_jsonl
from mounts import make_image, memory_disk, mount, unmount
from processes import Process, offdiff

FLAGS = (
    *("--model=tiny", "--shard-size=3", "--max-num-seqs=2"),
    *("--height=48", "--width=48", "--checkpoint-interval=0.2"),
)
OPTIONS = {"shard_size": 3, "max_num_seqs": 2, "height": 48, "width": 48}
HINT = "hint: the file system is mounted read-only; make it writable or choose another folder"


def test_a_read_only_disk_is_told_at_the_start(tmp_path: Path) -> None:
    """Catches a traceback, and any of the folders that are made before the first image."""
    manifest, disk = write_jsonl(tmp_path / "m.jsonl", make_rows(2)), tmp_path / "disk"
    with memory_disk(disk, 2**20):
        mount("-o", "remount,ro", disk)
        result = offdiff("run", manifest, "--out", disk / "out", *FLAGS)
        expected = f"Error: cannot write {disk}/out: Read-only file system\n{HINT}\n"
        assert (result.returncode, result.stderr) == (1, expected)
        assert list(disk.iterdir()) == []


@pytest.fixture
def disk_image(tmp_path: Path) -> Iterator[Path]:
    """A file system in a file, mounted in the folder ``disk`` beside it."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    make_image(image, 64 * 2**20)
    disk.mkdir()
    mount("-o", "loop", image, disk)
    yield image
    unmount(disk)


@pytest.mark.slow
def test_a_disk_that_becomes_read_only_ends_the_job_and_it_goes_on_later(
    disk_image: Path, tmp_path: Path
) -> None:
    """As a system does it whose disk fails: no file can be written to any more, also none that is open, and
    what is not in the journal is gone. Catches a shard that is published before its files are safe."""
    manifest, disk = write_jsonl(tmp_path / "m.jsonl", make_rows(9)), tmp_path / "disk"
    out, flags = disk / "out", (*FLAGS, "--num-inference-steps=150")
    process = Process("run", manifest, "--out", out, *flags)
    assert process.wait_until(lambda: (out / "images/shard-00001.parquet").exists())
    mount("-o", "remount,abort", disk)
    code = process.wait()
    assert (code, process.lines[-1]) == (1, HINT), process.stderr
    assert "Read-only file system" in process.lines[-2]
    assert "Traceback" not in process.stderr
    unmount(disk)
    mount("-o", "loop", disk_image, disk)
    assert offdiff("verify", out).returncode == 3, "sound, but unfinished"
    again = Process("run", manifest, "--out", out, *flags)
    assert again.wait() == 0, again.stderr
    assert offdiff("verify", out).returncode == 0
    Runner().run(manifest, tmp_path / "whole", num_inference_steps=150, **OPTIONS)
    assert contents(out) == contents(tmp_path / "whole")
