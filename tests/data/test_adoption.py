import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from output_fakes import (
    CARRIED,
    all_images,
    contents,
    make_output,
    make_row,
    open_ledger,
    read_table,
    run_job,
)

from offline_diffusion.data.layout import StagedFolder
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.publication import Publications
from offline_diffusion.data.rows import ManifestRow
from offline_diffusion.data.sink import Sink
from offline_diffusion.data.verify import verify
from offline_diffusion.errors import JobError


def rows_with_ids(ids: list[str]) -> list[Any]:
    return [make_row(number, row_id=row_id) for number, row_id in enumerate(ids)]


def change(out: Path, rows: list[Any], shard_size: int, **identity: Any) -> list[tuple[int, int]]:
    """Runs another manifest in the folder; returns what had to be drawn."""
    drawn: list[tuple[int, int]] = []
    manifest = {"sha256": "|".join(row.content_hash for row in rows)}
    options = {"image_format": "png"}
    ledger = open_ledger(
        out, len(rows), shard_size, manifest=manifest, options=options, allow_manifest_change=True, **identity
    )
    run_job(ledger, rows, drawn=drawn)
    assert verify(out, num_threads=1).ok
    assert list((out / "_state").glob("superseded-*")) == []
    return drawn


ids = st.lists(st.sampled_from("abcdefghij"), unique=True, min_size=1)


@settings(max_examples=12)
@given(old=ids, new=ids, old_size=st.integers(1, 4), new_size=st.integers(1, 4))
def test_rows_whose_id_and_content_are_unchanged_are_kept(
    tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str], old_size: int, new_size: int
) -> None:
    out = tmp_path_factory.mktemp("out")
    change(out, rows_with_ids(old), old_size)
    drawn = change(out, rows_with_ids(new), new_size)
    assert [new[row] for row, _ in drawn] == [row_id for row_id in new if row_id not in old]
    clean = tmp_path_factory.mktemp("clean")
    change(clean, rows_with_ids(new), new_size)
    assert contents(out) == contents(clean)


def test_a_row_with_another_prompt_is_made_again(tmp_path: Path) -> None:
    rows = rows_with_ids(["a", "b", "c"])
    change(tmp_path, rows, 2)
    rows[1] = make_row(1, row_id="b", text="another prompt")
    assert change(tmp_path, rows, 2) == [(1, 0)]
    assert [row["prompt"] for row in read_table(tmp_path, "images")] == [
        "picture a",
        "another prompt",
        "picture c",
    ]


def test_a_shard_of_unchanged_rows_is_kept_as_a_file(tmp_path: Path) -> None:
    rows = rows_with_ids(["a", "b", "c", "d"])
    change(tmp_path, rows, 2)
    inodes = {path.name: path.stat().st_ino for path in (tmp_path / "images").iterdir()}
    assert change(tmp_path, [*rows, make_row(4, row_id="e")], 2) == [(4, 0)]
    for name, inode in inodes.items():
        assert (tmp_path / "images" / name).stat().st_ino == inode


def test_without_hard_links_images_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "link", no_links)
    rows = rows_with_ids(["a", "b", "c", "d"])
    change(tmp_path, rows, 2)
    assert change(tmp_path, [*rows, make_row(4, row_id="e")], 2) == [(4, 0)]


def test_carried_values_come_from_the_new_manifest(tmp_path: Path) -> None:
    rows = rows_with_ids(["a", "b"])
    change(tmp_path, rows, 2)
    wider = CARRIED.append(pa.field("extra", pa.int32()))
    relabelled = [
        ManifestRow(
            r.row, r.id, r.file, r.line, r.content_hash, r.prompt, r.params, r.carried | {"extra": r.row}
        )
        for r in rows
    ]
    assert change(tmp_path, relabelled, 2, carried_schema=wider) == []
    assert [row["extra"] for row in read_table(tmp_path, "images")] == [0, 1]


def test_failed_images_are_made_again(tmp_path: Path) -> None:
    rows = rows_with_ids(["a", "b", "c"])
    run_job(open_ledger(tmp_path, 3, 3, options={"image_format": "png"}), rows, failing={(1, 0): "nan"})
    assert change(tmp_path, [*rows, make_row(3, row_id="d")], 4) == [(1, 0), (3, 0)]


def test_unpublished_images_are_kept_too(tmp_path: Path) -> None:
    rows = rows_with_ids(["a", "b", "c", "d"])
    ledger = open_ledger(tmp_path, 4, 4, options={"image_format": "png"})
    sink = Sink(ledger)
    sink.open_shard(ledger.shards[0], rows)
    for image in all_images(rows)[:2]:
        sink.submit(0, image, make_output(image))
    sink.close(abandon=True)
    assert change(tmp_path, rows_with_ids(["x", "b", "a"]), 2) == [(0, 0)]


def test_a_change_in_the_middle_of_a_change_loses_nothing(tmp_path: Path) -> None:
    rows = rows_with_ids(["a", "b", "c", "d"])
    change(tmp_path, rows, 2)
    second = rows_with_ids(["b", "c", "x"])
    options = {"image_format": "png"}
    ledger = open_ledger(tmp_path, 3, 2, manifest={"n": 2}, options=options, allow_manifest_change=True)
    sink = Sink(ledger)
    assert sink.open_shard(ledger.shards[0], second[:2]) == {(0, 0), (1, 0)}
    sink.open_shard(ledger.shards[1], second[2:])
    sink.close(abandon=True)
    assert change(tmp_path, rows_with_ids(["d", "a", "b", "y"]), 3) == [(3, 0)]


def test_when_the_state_was_deleted_images_are_still_kept(tmp_path: Path) -> None:
    rows = rows_with_ids(["a", "b", "c"])
    change(tmp_path, rows, 2)
    shutil.rmtree(tmp_path / "_state")
    assert change(tmp_path, rows_with_ids(["c", "z", "a"]), 2) == [(1, 0)]


def test_a_published_shard_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Its size, footer and time are right, so only reading it tells."""
    rows = rows_with_ids(["a", "b"])
    ledger = open_ledger(tmp_path, 2, 2, options={"image_format": "png"})
    run_job(ledger, rows, failing={(1, 0): "nan"})
    path = tmp_path / "metrics" / "shard-00000.parquet"
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(JobError, match=r"published shard-00000 .* cannot be read") as caught:
        run_job(ledger, rows, retry_failed=True)
    assert "shard-00000*.json" in (caught.value.hint or "")
    for marker in (tmp_path / "_state" / "shards").glob("shard-00000*.json"):
        marker.unlink()
    run_job(ledger, rows)
    assert verify(tmp_path, num_threads=1).ok


@pytest.mark.parametrize("where", ["before the change", "after it"])
def test_what_was_committed_but_not_moved_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Catches a change that leaves staged files behind: the images would be made again."""
    rows = rows_with_ids(["a", "b"])
    ledger = open_ledger(tmp_path, 2, 2, options={"image_format": "png"})
    with monkeypatch.context() as patch:
        patch.setattr(Publications, "move", lambda *_: None)
        run_job(ledger, rows)
    assert read_table(tmp_path, "images") == []
    if where == "before the change":
        open_ledger(tmp_path, 2, 2, options={"image_format": "png"})
        assert len(read_table(tmp_path, "images")) == 2
    assert change(tmp_path, [*rows, make_row(2, row_id="c")], 2) == [(2, 0)]
    assert list((tmp_path / "_state" / "staged").iterdir()) == []


def test_a_late_process_of_the_old_manifest_puts_nothing_into_the_new_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen before its files move, and once more before its commit: what it needs was moved aside."""
    rows = rows_with_ids(["a", "b", "c", "d"])
    ledger = open_ledger(tmp_path, 4, 2, options={"image_format": "png"})
    real_move, real_commit, late = Publications.move, Publications.commit, []

    def freeze_move(self: Publications, staged: StagedFolder, marker: Marker) -> None:
        late.append(lambda: real_move(self, staged, marker))

    def freeze_commit(self: Publications, staged: StagedFolder, marker: Marker) -> bool:
        if staged.shard == 0:
            return real_commit(self, staged, marker)
        late.append(lambda: real_commit(self, staged, marker))
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Publications, "move", freeze_move)
        patch.setattr(Publications, "commit", freeze_commit)
        run_job(ledger, rows)
    assert ledger.published() == {0}
    other = rows_with_ids(["x", "y", "z", "w"])
    change(tmp_path, other, 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(late) == 3  # two moves, one commit
    for act in late:
        with contextlib.suppress(FileNotFoundError):
            act()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_failed_is_retried_in_a_shard_that_is_kept(tmp_path: Path) -> None:
    """Catches a retry under the number that the kept shard was published with: it would be lost."""
    rows, options = rows_with_ids(["a", "b", "c"]), {"image_format": "png"}
    run_job(open_ledger(tmp_path, 3, 2, options=options), rows, failing={(1, 0): "nan"})
    ledger = open_ledger(tmp_path, 2, 2, options=options, manifest={"n": 2}, allow_manifest_change=True)
    drawn: list[tuple[int, int]] = []
    run_job(ledger, rows[:2], retry_failed=True, drawn=drawn)
    assert drawn == [(1, 0)]
    assert [row["row"] for row in read_table(tmp_path, "images")] == [0, 1]
    assert verify(tmp_path, num_threads=1).ok
