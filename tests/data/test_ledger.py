import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from output_fakes import CARRIED, contents, make_rows, open_ledger, run_job

from offline_diffusion.data import publication
from offline_diffusion.data.files import move_away
from offline_diffusion.data.layout import staged_folders
from offline_diffusion.data.ledger import Ledger, make_shards
from offline_diffusion.data.process import pid_space
from offline_diffusion.data.publication import Publications
from offline_diffusion.data.verify import verify
from offline_diffusion.errors import JobError, JobMismatchError


@given(num_rows=st.integers(0, 3_000), shard_size=st.integers(1, 700))
def test_shards_cover_every_row_once(num_rows: int, shard_size: int) -> None:
    shards = list(make_shards(num_rows, shard_size))
    assert [row for shard in shards for row in range(shard.start, shard.stop)] == list(range(num_rows))
    assert all(0 < shard.num_rows <= shard_size for shard in shards)
    assert [shard.index for shard in shards] == list(range(len(shards)))


@pytest.mark.parametrize(
    ("num_rows", "last"), [(1, "shard-00000"), (100_000, "shard-99999"), (100_001, "shard-100000")]
)
def test_file_names_sort_as_the_shards_do(num_rows: int, last: str) -> None:
    shards = make_shards(num_rows, 1)
    assert shards[-1].stem == last
    assert len(shards[0].stem) == len(last)


def test_job_json_says_what_the_folder_is(tmp_path: Path) -> None:
    open_ledger(tmp_path / "out", 10, 4)
    job = json.loads((tmp_path / "out" / "job.json").read_text())
    assert job["num_rows"] == 10
    assert job["shard_size"] == 4
    assert job["model"]["model"] == "dummy"
    assert job["options"]["image_format"] == "png"
    assert job["carried"]["columns"] == {"tag": "string", "weight": "double", "scores": "list<item: int64>"}
    assert job["versions"]["pyarrow"] == pa.__version__


def test_the_same_job_opens_again(tmp_path: Path) -> None:
    first = open_ledger(tmp_path, 10, 4)
    before = (tmp_path / "job.json").read_bytes()
    second = open_ledger(tmp_path, 10, 4)
    assert (tmp_path / "job.json").read_bytes() == before
    assert second.job == first.job
    assert second.job.identity.carried_schema == CARRIED


def test_every_difference_is_named_with_old_and_new(tmp_path: Path) -> None:
    open_ledger(tmp_path, 10, 4)
    options = {"seed": 7, "dtype": "auto", "image_format": "webp", "limit": None, "extra": [1, 2]}
    with pytest.raises(JobMismatchError) as caught:
        open_ledger(
            tmp_path,
            10,
            4,
            options=options,
            model={"model": "dummy", "revision": "v2", "config_sha256": "def"},
        )
    lines = caught.value.message.splitlines()[1:]
    assert sorted(line.strip() for line in lines) == [
        "model.config_sha256: abc -> def",
        "model.revision: null -> v2",
        "options.extra.0: (none) -> 1",
        "options.extra.1: (none) -> 2",
        "options.image_format: png -> webp",
        "options.seed: 0 -> 7",
    ]
    assert "another --out" in (caught.value.hint or "")


def test_a_changed_manifest_is_refused_with_the_way_out(tmp_path: Path) -> None:
    open_ledger(tmp_path, 10, 4)
    with pytest.raises(JobMismatchError, match=r"manifest\.sha256: 123 -> 456") as caught:
        open_ledger(tmp_path, 11, 4, manifest={"sha256": "456", "files": []})
    assert "--allow-manifest-change" in (caught.value.hint or "")


def test_pixel_options_are_refused_even_when_the_manifest_may_change(tmp_path: Path) -> None:
    open_ledger(tmp_path, 10, 4)
    with pytest.raises(JobMismatchError, match=r"options\.seed"):
        open_ledger(tmp_path, 10, 4, options={"seed": 1}, allow_manifest_change=True)


def test_many_differences_are_cut(tmp_path: Path) -> None:
    open_ledger(tmp_path, 10, 4, manifest={"files": list(range(100))})
    with pytest.raises(JobMismatchError, match="and 80 more"):
        open_ledger(tmp_path, 10, 4, manifest={"files": list(range(1, 101))})


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(JobError, match=r"not empty.*thesis.tex"):
        open_ledger(tmp_path, 10, 4)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("content", ["{}", "[]", "not json", '{"version": 99}', '{"version": 1}'])
def test_a_job_json_of_somebody_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "job.json").write_text(content)
    with pytest.raises(JobError, match=r"job\.json"):
        open_ledger(tmp_path, 10, 4)
    assert (tmp_path / "job.json").read_text() == content


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(JobError, match="cannot write"):
        open_ledger(tmp_path / "out", 10, 4)
    with pytest.raises(JobError, match="cannot write"):
        open_ledger(tmp_path / "out" / "deeper", 10, 4)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(JobError, match="Permission denied"):
        open_ledger(tmp_path / "out", 10, 4)


def test_readers_refuse_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not an output folder of offdiff"):
        _ = Ledger(tmp_path).job
    with pytest.raises(JobError, match="not an output folder of offdiff"):
        _ = Ledger(tmp_path / "nowhere").job


def test_a_damaged_marker_counts_as_none(tmp_path: Path) -> None:
    rows = make_rows(8)
    ledger = open_ledger(tmp_path, 8, 4)
    run_job(ledger, rows)
    ledger.marker_path(ledger.shards[0]).write_text('{"files": [')
    assert list(ledger.markers()) == [1]
    assert ledger.marker(ledger.shards[0]) is None
    assert ledger.next_number(ledger.shards[0]) == 1


def test_the_newest_publication_is_the_valid_one(tmp_path: Path) -> None:
    """Catches an order by name: r10 sorts before r9."""
    ledger = open_ledger(tmp_path, 4, 4)
    run_job(ledger, make_rows(4))
    first = json.loads(ledger.marker_path(ledger.shards[0]).read_text())
    for number in range(1, 11):
        path = tmp_path / "_state" / "shards" / f"shard-00000.r{number}.json"
        path.write_text(json.dumps(first | {"num_ok": number}))
    marker = ledger.marker(ledger.shards[0])
    assert marker is not None
    assert marker.num_ok == ledger.markers()[0].num_ok == 10
    assert ledger.published() == {0}
    assert ledger.next_number(ledger.shards[0]) == 11


def test_what_others_publish_after_the_last_listing_is_seen(tmp_path: Path) -> None:
    """Catches numbers that are only remembered: a shard would be made twice."""
    ledger = open_ledger(tmp_path, 8, 4)
    assert ledger.published() == set()
    run_job(open_ledger(tmp_path, 8, 4), make_rows(8))
    again = ledger.marker_path(ledger.shards[1], 1)
    again.write_bytes(ledger.marker_path(ledger.shards[1]).read_bytes())
    assert [ledger.next_number(shard) for shard in ledger.shards] == [1, 2]
    assert all(ledger.marker(shard) is not None for shard in ledger.shards)


def test_when_the_state_is_deleted_nothing_is_made_again(tmp_path: Path) -> None:
    rows = make_rows(10, images=2, faults=(3,))
    failing = {(5, 1): "nan"}
    run_job(open_ledger(tmp_path, 10, 4), rows, failing=failing)
    before, markers = contents(tmp_path), open_ledger(tmp_path, 10, 4).markers()
    shutil.rmtree(tmp_path / "_state")
    for table, stem in (("metrics", "shard-00001"), ("images", "shard-00002")):
        os.rename(tmp_path / table / f"{stem}.parquet", tmp_path / f".{stem}")
    assert set(Ledger(tmp_path).markers()) == {0}
    os.rename(tmp_path / ".shard-00001", tmp_path / "metrics" / "shard-00001.parquet")
    drawn: list[tuple[int, int]] = []
    ledger = open_ledger(tmp_path, 10, 4)
    assert ledger.published() == {0, 1}
    found = ledger.markers()[1]
    assert (found.num_ok, found.num_failed, found.num_invalid_rows) == (7, 1, 0)
    assert [(file.path, file.num_rows) for file in found.files] == [
        (file.path, file.num_rows) for file in markers[1].files
    ]
    run_job(ledger, rows, failing=failing, drawn=drawn)
    assert drawn == [(8, 0), (8, 1), (9, 0), (9, 1)]
    assert contents(tmp_path) == before


def test_scanning_2000_markers_is_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_rows(1)
    run_job(open_ledger(tmp_path / "one", 1, 1), rows)
    ledger = open_ledger(tmp_path / "many", 2_000 * 500, 500)
    marker = json.loads((tmp_path / "one" / "_state" / "shards" / "shard-00000.json").read_text())
    for shard in ledger.shards:
        values = marker | {"shard": shard.index, "start": shard.start, "stop": shard.stop}
        ledger.marker_path(shard).write_text(json.dumps(values))
    started = time.perf_counter()
    assert len(ledger.published()) == 2_000
    listed = time.perf_counter()
    assert list(ledger.markers()) == list(range(2_000))
    with capsys.disabled():
        print(
            f"\n2000 markers: listed in {listed - started:.3f} s, "
            f"read in {time.perf_counter() - listed:.3f} s"
        )


def test_leftovers_are_deleted_but_nothing_that_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a clean-up that takes the files of a winner that has not moved them yet."""
    rows = make_rows(4)
    run_job(open_ledger(tmp_path, 4, 2), rows, failing={(0, 0): "nan"})
    ledger = open_ledger(tmp_path, 4, 2)
    for name in ("shard-00000.r1.000003-0a1b2c3d", "shard-00001.r1.000003-0a1b2c3d"):
        (ledger.publications.staged / name).mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Publications, "move", lambda *_: None)
        run_job(ledger, rows, retry_failed=True)
    (ledger.partials / "shard-00001.000003-0a1b2c3d.arrows").touch()
    ledger.clear_leftovers(ledger.shards, ledger.leftovers())
    assert verify(tmp_path, num_threads=1).ok, "what was committed is moved"
    (kept,) = ledger.publications.staged.iterdir()
    assert kept.name.startswith("shard-00001.r1."), "not committed yet: its owner may be at work"
    assert list(ledger.scratch.iterdir()) == list(ledger.partials.iterdir()) == []


def test_a_clear_up_takes_nothing_from_a_winner_that_moves_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a clear-up that takes the staged folder away, if only to look whether it was committed: the
    winner takes missing files for moved, and deletes the folder when it is back."""
    ledger, late = open_ledger(tmp_path, 2, 2), list[tuple[Any, ...]]()
    move, others, is_committed = Publications.move, Publications._others, Publications.is_committed
    with monkeypatch.context() as patch:
        patch.setattr(Publications, "move", lambda *arguments: late.append(arguments))
        run_job(ledger, make_rows(2))
    is_moving, may_rename, has_renamed, may_delete = (threading.Event() for _ in range(4))
    winner = threading.Thread(target=lambda: move(*late[0]))

    def slow_others(*arguments: Any) -> Iterator[Any]:
        if threading.current_thread() is winner:
            is_moving.set()
            may_rename.wait(10)
        return others(*arguments)

    def slow_look(*arguments: Any) -> bool:
        may_rename.set()
        has_renamed.wait(10)
        return is_committed(*arguments)

    def slow_away(folder: Path, scratch: Path) -> None:
        if threading.current_thread() is winner:
            has_renamed.set()
            may_delete.wait(10)
        move_away(folder, scratch)

    monkeypatch.setattr(Publications, "_others", slow_others)
    monkeypatch.setattr(Publications, "is_committed", slow_look)
    monkeypatch.setattr(publication, "move_away", slow_away)
    winner.start()
    assert is_moving.wait(10)
    Ledger(tmp_path).clear_leftovers(ledger.shards, [])
    may_rename.set()
    may_delete.set()
    winner.join()
    assert verify(tmp_path, num_threads=1).ok
    assert list(ledger.publications.staged.iterdir()) == []


def test_a_committed_publication_is_never_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for a moment, in which others who move its files would miss them."""
    ledger = open_ledger(tmp_path, 2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Publications, "move", lambda *_: None)
        run_job(ledger, make_rows(2))
    (staged,) = staged_folders(ledger.publications.staged)
    monkeypatch.setattr(os, "rename", lambda *_: pytest.fail("the folder was renamed"))
    assert not ledger.publications.discard(staged)


_LEAVE_SCRATCH = """
import sys
from pathlib import Path
from offline_diffusion.data.files import scratch_path, write_scratch
write_scratch(Path(sys.argv[1]), "task-00002.json", b"{}")
scratch_path(Path(sys.argv[1]), "shard-00001.images").mkdir()
print("written", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not pid_space(), reason="nothing tells whose a pid is here")
def test_what_a_killed_process_left_in_the_scratch_folder_goes_at_the_next_start(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 10, 4)
    command = [sys.executable, "-c", _LEAVE_SCRATCH, str(ledger.scratch)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        (_, name) = left = sorted(os.listdir(ledger.scratch))
        elsewhere = f"{name.removesuffix(name.split('.')[-1])}0123abcd-{process.pid}-89abcdef"
        (ledger.scratch / elsewhere).write_bytes(b"")
        (ledger.scratch / "mine.txt").write_bytes(b"")
        open_ledger(tmp_path, 10, 4)
        assert sorted(os.listdir(ledger.scratch)) == sorted([*left, elsewhere, "mine.txt"]), "its owner runs"
        process.kill()
    open_ledger(tmp_path, 10, 4)
    assert sorted(os.listdir(ledger.scratch)) == sorted([elsewhere, "mine.txt"])
