"""What a run sees of broken shards before it begins, and what the look costs."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from output_fakes import contents, make_rows, open_ledger, run_job

from offline_diffusion.data import quick_check
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.publication import Publications
from offline_diffusion.data.quick_check import broken_lines, find_broken
from offline_diffusion.errors import JobError

ROWS = make_rows(6, images=2, faults=(4,))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    run_job(open_ledger(tmp_path, 6, 3), ROWS, failing={(1, 1): "nan"})
    return open_ledger(tmp_path, 6, 3)


def find(ledger: Ledger) -> dict[int, str]:
    return find_broken(ledger, ledger.shards)


def test_what_is_whole_is_not_broken(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a look that reads whole files: without a touched file no checksum is made."""
    monkeypatch.setattr(quick_check, "file_sha256", None)
    assert find(ledger) == {}
    assert ledger.published() == {0, 1}


def test_a_footer_that_cannot_be_read_is_seen(ledger: Ledger) -> None:
    path = ledger.out / "images" / "shard-00001.parquet"
    data = bytearray(path.read_bytes())
    data[-300:-8] = bytes(292)
    path.write_bytes(data)
    assert find(ledger)[1].startswith("the footer of images/shard-00001.parquet cannot be read")
    assert ledger.published() == set(ledger.markers()) == {0}
    assert ledger.marker(ledger.shards[1]) is None


def test_other_rows_are_seen(ledger: Ledger) -> None:
    path = ledger.marker_path(ledger.shards[0])
    values = json.loads(path.read_text())
    values["files"][1]["num_rows"] = 7
    path.write_text(json.dumps(values))
    assert find(ledger) == {0: "metrics/shard-00000.parquet has 6 rows, published were 7"}


def test_a_copy_is_read_once(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied dataset has other times: its checksums are made at the first start, not at every one."""
    for path in ledger.out.glob("*/*.parquet"):
        os.utime(path)
    read: list[str] = []
    real = quick_check.file_sha256

    def count(path: Path) -> str:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(quick_check, "file_sha256", count)
    assert find(ledger) == {}
    assert len(read) == 6
    assert find(ledger) == {}
    assert len(read) == 6


def test_an_unreadable_disk_is_no_broken_shard(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a job that makes everything again because a mount went away for a moment."""

    def stale(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(pq, "read_metadata", stale)
    with pytest.raises(JobError, match="Stale file handle"):
        find(ledger)
    assert ledger.published() == {0, 1}


def test_files_that_are_on_their_way_are_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner is at work, or died after this process had opened the folder."""
    ledger = open_ledger(tmp_path, 6, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Publications, "move", lambda *_: None)
        run_job(open_ledger(tmp_path, 6, 3), ROWS)
    assert find(ledger) == {}
    assert len(list((tmp_path / "images").iterdir())) == 2


def test_a_broken_shard_is_made_again_as_the_next_publication(ledger: Ledger, tmp_path: Path) -> None:
    expected = contents(ledger.out)
    for name in ("failures/shard-00001.parquet", "images/shard-00000.parquet"):
        path = ledger.out / name
        path.write_bytes(path.read_bytes()[:-4])
    shutil.copy(ledger.out / "metrics/shard-00000.parquet", ledger.out / "images/shard-00000.part001.parquet")
    assert find(ledger).keys() == {0, 1}
    drawn: list[tuple[int, int]] = []
    run_job(ledger, ROWS, failing={(1, 1): "nan"}, drawn=drawn)
    assert len(drawn) == 10
    assert contents(ledger.out) == expected
    assert [path.name for path in (ledger.out / "images").glob("*.part*")] == []
    assert find(Ledger(ledger.out)) == {}
    assert ledger.published() == {0, 1}


def test_thousands_of_broken_shards_are_said_in_few_lines() -> None:
    lines = list(broken_lines(dict.fromkeys(range(5000), "is missing")))
    assert lines[0] == "shard 0 is made again: is missing"
    assert (len(lines), lines[-1]) == (21, "and 4,980 more broken shards are made again")


def make_many(out: Path, num_shards: int) -> Ledger:
    """A folder with so many published shards, by links to one."""
    run_job(open_ledger(out.with_name("one"), 1, 1), make_rows(1))
    one, ledger = out.with_name("one"), open_ledger(out, num_shards, 1)
    values = json.loads((one / "_state" / "shards" / "shard-00000.json").read_text())
    for shard in ledger.shards:
        files = []
        for file in values["files"]:
            path = file["path"].replace("shard-00000", shard.stem)
            os.link(one / file["path"], out / path)
            files.append(file | {"path": path})
        marker = values | {"shard": shard.index, "start": shard.start, "stop": shard.stop, "files": files}
        ledger.marker_path(shard).write_text(json.dumps(marker))
    return ledger


@pytest.mark.parametrize("num_shards", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_the_look_at_many_shards_is_quick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_shards: int
) -> None:
    ledger = make_many(tmp_path / "many", num_shards)
    started = time.perf_counter()
    assert find(ledger) == {}
    seconds = time.perf_counter() - started
    with capsys.disabled():
        print(f"\n{num_shards} published shards: checked in {seconds:.2f} s")
    assert seconds < 60
