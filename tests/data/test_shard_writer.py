import errno
import hashlib
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from output_fakes import (
    all_images,
    decode,
    make_fault,
    make_images,
    make_output,
    make_pixels,
    make_row,
    make_rows,
    open_ledger,
    read_table,
)

from offline_diffusion.data import tables
from offline_diffusion.data.files import link_file
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.partial import Record, partial_paths, scan_partials
from offline_diffusion.data.publication import Publications, ShardLostError
from offline_diffusion.data.quick_check import find_broken
from offline_diffusion.data.record import make_record
from offline_diffusion.data.rows import ImageTask, ManifestRow, RowFault
from offline_diffusion.data.shard_images import SlotTable
from offline_diffusion.data.shard_writer import ShardWriter
from offline_diffusion.errors import DiskFullError, JobError, JobInterrupted

Rows = list[ManifestRow | RowFault]


def open_writer(ledger: Ledger, rows: Rows, *, retry_failed: bool = False, shard: int = 0) -> ShardWriter:
    return ShardWriter(
        ledger,
        ledger.shards[shard],
        rows,
        number=ledger.next_number(ledger.shards[shard]),
        task=3,
        worker="host:1",
        image_format="png",
        retry_failed=retry_failed,
    )


def to_record(rows: Rows, image: ImageTask, error_type: str | None = None) -> Record:
    hashes = {row.row: row.content_hash for row in rows}
    output = make_output(image, error_type=error_type)
    return make_record(image, output, row_hash=hashes[image.row], image_format="png", task=3, worker="host:1")


def finish(writer: ShardWriter, last: Record) -> None:
    writer.append(last)
    writer.publish()


def publish_all(ledger: Ledger, rows: Rows) -> None:
    writer = open_writer(ledger, rows)
    for image in all_images(rows):
        writer.append(to_record(rows, image))
    writer.publish()


def test_the_published_tables_hold_what_was_made(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 4, 4)
    rows = make_rows(4, images=2, faults=(2,))
    images = all_images(rows)
    writer = open_writer(ledger, rows)
    assert writer.finished == set()
    for image in reversed(images):  # in any order
        writer.append(to_record(rows, image, "nan" if (image.row, image.image_index) == (1, 0) else None))
    assert writer.complete
    writer.publish()

    found = read_table(tmp_path, "images")
    good = [image for image in images if (image.row, image.image_index) != (1, 0)]
    assert [(row["row"], row["image_index"]) for row in found] == [(0, 0), (0, 1), (1, 1), (3, 0), (3, 1)]
    for row, image in zip(found, good, strict=True):
        pixels = make_pixels(image)
        np.testing.assert_array_equal(decode(row["image"]["bytes"]), pixels)
        assert row["sha256"] == hashlib.sha256(pixels.tobytes()).hexdigest()
        assert row["seed"] == image.request.seed
        assert row["prompt"] == f"picture {row['id']}"
        assert row["negative_prompt"] == ("" if row["row"] % 3 else None)
        assert (row["height"], row["width"]) == (16, 24)
        assert (row["num_inference_steps"], row["true_cfg_scale"], row["guidance_scale"]) == (4, 4.0, None)
        assert row["image"]["path"] == f"{row['row']:08d}-{row['image_index']}.png"
        assert row["tag"] == f"t{row['id']}"
        assert row["weight"] == (0.5 if row["row"] % 2 else None)
        assert row["scores"] == [row["row"], 2**60]

    metrics = read_table(tmp_path, "metrics")
    keys = [(row["row"], row["image_index"], row["status"], row["error_type"]) for row in metrics]
    assert keys == [
        (0, 0, "ok", None),
        (0, 1, "ok", None),
        (1, 0, "failed", "nan"),
        (1, 1, "ok", None),
        (2, None, "failed", "invalid_row"),
        (3, 0, "ok", None),
        (3, 1, "ok", None),
    ]
    assert {row["task"] for row in metrics} == {3}
    assert {row["worker"] for row in metrics} == {"host:1"}
    assert metrics[0]["num_tokens"] == 42
    assert metrics[0]["device_s"] == 0.25
    assert metrics[4]["error"] == "prompts.jsonl:3: height=-5: must be at least 1"
    for row in metrics:
        assert abs(row["finished_at"] - datetime.now(UTC)) < timedelta(minutes=5)

    failures = read_table(tmp_path, "failures")
    assert failures == [
        {
            "id": "00000001",
            "row": 1,
            "image_index": 0,
            "file": "prompts.jsonl",
            "line": 2,
            "column": None,
            "value": None,
            "reason": "nan at step 3",
            "error_type": "nan",
        },
        {
            "id": "00000002",
            "row": 2,
            "image_index": None,
            "file": "prompts.jsonl",
            "line": 3,
            "column": "height",
            "value": "-5",
            "reason": "must be at least 1",
            "error_type": "invalid_row",
        },
    ]


def test_text_that_is_no_unicode_does_not_stop_a_shard(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 2, 4)
    rows: Rows = [make_row(0, text="half a \ud83d pair"), replace(make_fault(1), value="\udc00", id="\ud800")]
    writer = open_writer(ledger, rows)
    writer.append(to_record(rows, make_images(rows[0])[0]))
    writer.publish()
    assert read_table(tmp_path, "images")[0]["prompt"] == "half a ? pair"
    assert read_table(tmp_path, "failures")[0]["value"] == "?"


def test_marker_names_every_file_with_its_checksum(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 3, 4)
    publish_all(ledger, make_rows(3))
    marker = ledger.markers()[0]
    assert (marker.start, marker.stop, marker.num_ok, marker.num_failed) == (0, 3, 3, 0)
    assert [file.path for file in marker.files] == [
        "images/shard-00000.parquet",
        "metrics/shard-00000.parquet",
    ]
    for file in marker.files:
        data = (tmp_path / file.path).read_bytes()
        assert file.num_bytes == len(data)
        assert file.sha256 == hashlib.sha256(data).hexdigest()
        assert pq.read_metadata(tmp_path / file.path).num_rows == file.num_rows == 3
    assert not (tmp_path / "failures").exists()
    assert list(ledger.partials.iterdir()) == []
    assert list(ledger.scratch.iterdir()) == []


def test_a_shard_without_images_publishes_no_empty_file(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 2, 4)
    writer = open_writer(ledger, [make_fault(0), make_fault(1)])
    assert writer.complete
    marker = writer.publish()
    assert [file.path for file in marker.files] == [
        "metrics/shard-00000.parquet",
        "failures/shard-00000.parquet",
    ]
    assert marker.num_invalid_rows == 2
    assert list((tmp_path / "images").iterdir()) == []


def test_a_second_image_of_a_key_is_dropped(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 2, 4)
    rows = make_rows(2)
    writer = open_writer(ledger, rows)
    first = to_record(rows, make_images(rows[0])[0])
    assert writer.append(first)
    assert not writer.append(Record(0, 0, "ok", b"another", first.result))
    writer.append(to_record(rows, make_images(rows[1])[0]))
    writer.publish()
    assert read_table(tmp_path, "images")[0]["image"]["bytes"] == first.image


def test_the_first_good_image_of_several_attempts_wins(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 1, 4)
    rows = make_rows(1)
    image = make_images(rows[0])[0]
    good = to_record(rows, image)
    failed = to_record(rows, image, "out_of_memory")
    for records in ([failed], [good], [Record(0, 0, "ok", b"late", good.result)]):
        writer = open_writer(ledger, rows)
        # As a process would that started before the others' records were written.
        writer._slots = SlotTable(writer.images)
        for record in records:
            writer.append(record)
        writer.close()
    writer = open_writer(ledger, rows)
    assert writer.complete
    writer.publish()
    assert read_table(tmp_path, "images")[0]["image"]["bytes"] == good.image


def test_failures_of_earlier_attempts_count_unless_they_are_retried(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 2, 4)
    rows = make_rows(2)
    writer = open_writer(ledger, rows)
    writer.append(to_record(rows, make_images(rows[0])[0], "nan"))
    writer.append(to_record(rows, make_images(rows[1])[0]))
    writer.close()
    assert open_writer(ledger, rows).finished == {(0, 0), (1, 0)}
    assert open_writer(ledger, rows, retry_failed=True).finished == {(1, 0)}


def test_images_of_a_row_that_changed_are_not_taken(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 2, 4)
    rows = make_rows(2)
    writer = open_writer(ledger, rows)
    for image in all_images(rows):
        writer.append(to_record(rows, image))
    writer.close()
    changed: Rows = [make_row(0, text="something else"), rows[1]]
    assert open_writer(ledger, changed).missing == {(0, 0)}


def test_the_newest_owner_alone_publishes(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 2, 4)
    rows = make_rows(2)
    zombie = open_writer(ledger, rows)
    for image in all_images(rows):
        zombie.append(to_record(rows, image))
    owner = open_writer(ledger, rows)
    with pytest.raises(ShardLostError):
        zombie.publish()
    assert ledger.published() == set()
    assert owner.complete
    owner.publish()
    assert list(ledger.partials.iterdir()) == []
    before = (tmp_path / "images" / "shard-00000.parquet").read_bytes()
    with pytest.raises(ShardLostError):
        zombie.publish()
    assert (tmp_path / "images" / "shard-00000.parquet").read_bytes() == before
    assert ledger.published() == {0}


def test_row_groups_and_files_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP_BYTES", 6_000)
    monkeypatch.setattr(tables, "FILE_BYTES", 12_000)
    ledger = open_ledger(tmp_path, 40, 40)
    rows = make_rows(40)
    publish_all(ledger, rows)
    files = sorted((tmp_path / "images").iterdir())
    assert len(files) > 3
    assert [path.name for path in files[:3]] == [
        "shard-00000.parquet",
        "shard-00000.part001.parquet",
        "shard-00000.part002.parquet",
    ]
    seen = []
    for path in files:
        assert path.stat().st_size < 30_000  # footers are large beside such small images
        parquet = pq.ParquetFile(path)
        seen += parquet.read(columns=["row"])["row"].to_pylist()
        for group in range(parquet.num_row_groups):
            size = sum(len(image["bytes"]) for image in parquet.read_row_group(group)["image"].to_pylist())
            assert size < 6_000
    assert seen == list(range(40))
    marker = ledger.markers()[0]
    assert sorted(file.path for file in marker.files if file.path.startswith("images")) == [
        f"images/{path.name}" for path in files
    ]


def test_large_carried_columns_split_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP_BYTES", 20_000)
    ledger = open_ledger(tmp_path, 8, 8, carried_schema=pa.schema([("tag", pa.string())]))
    rows: Rows = []
    for number in range(8):
        row = make_row(number)
        rows.append(
            ManifestRow(
                row.row,
                row.id,
                row.file,
                row.line,
                row.content_hash,
                row.prompt,
                row.params,
                {"tag": "z" * 9_000},
            )
        )
    publish_all(ledger, rows)
    parquet = pq.ParquetFile(tmp_path / "images" / "shard-00000.parquet")
    assert max(parquet.read_row_group(group).nbytes for group in range(parquet.num_row_groups)) <= 20_000
    assert parquet.read(columns=["row"])["row"].to_pylist() == list(range(8))


def test_images_are_stored_as_they_are_and_the_rest_compressed(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 3, 4)
    publish_all(ledger, make_rows(3))
    group = pq.read_metadata(tmp_path / "images" / "shard-00000.parquet").row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert columns["image.bytes"].compression == "UNCOMPRESSED"
    assert columns["image.bytes"].statistics is None
    assert columns["prompt"].compression == "ZSTD"
    assert columns["scores.list.element"].compression == "ZSTD"
    assert columns["row"].statistics.max == 2


@pytest.mark.parametrize("call", ["write", "fsync", "mkdir", "link"])
def test_a_full_disk_is_an_error_that_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    ledger = open_ledger(tmp_path, 3, 4)
    rows = make_rows(3)
    writer = open_writer(ledger, rows)
    images = all_images(rows)
    for image in images[:2]:
        writer.append(to_record(rows, image))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises((JobError, JobInterrupted), match="No space left") as caught:
            finish(writer, to_record(rows, images[2]))
    assert "free some space" in (caught.value.hint or "")
    assert ledger.published() == set()
    assert list((ledger.state / "staged").iterdir()) == []
    again = open_writer(ledger, rows)
    assert {(0, 0), (1, 0)} <= again.finished
    for image in images:
        again.append(to_record(rows, image))
    again.publish()
    assert [row["row"] for row in read_table(tmp_path, "images")] == [0, 1, 2]
    assert list(ledger.scratch.iterdir()) == []


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_after_the_commit_leaves_a_published_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a writer that throws away, or writes anew, what it has committed."""
    ledger = open_ledger(tmp_path, 2, 4)
    rows = make_rows(2)
    writer = open_writer(ledger, rows)
    for image in all_images(rows):
        writer.append(to_record(rows, image))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_space)
        with pytest.raises(DiskFullError):
            writer.publish()
    assert ledger.published() == {0}
    assert not (tmp_path / "images" / "shard-00000.parquet").exists()
    (staged,) = (ledger.state / "staged").iterdir()
    inode = (staged / "images.shard-00000.parquet").stat().st_ino
    writer.publish()
    assert (tmp_path / "images" / "shard-00000.parquet").stat().st_ino == inode
    assert list((ledger.state / "staged").iterdir()) == []


def test_after_a_torn_record_the_next_goes_into_a_fresh_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an append after a torn record: a reader stops at the tear and would never see it."""
    ledger = open_ledger(tmp_path, 3, 4)
    rows = make_rows(3)
    records = [to_record(rows, image) for image in all_images(rows)]
    writer = open_writer(ledger, rows)
    writer.append(records[0])
    real, written = os.write, 0

    def short(fd: int, data: memoryview) -> int:
        nonlocal written
        if written:
            no_space()
        written = real(fd, memoryview(data)[:100])
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        for _ in range(3):
            with pytest.raises(DiskFullError):
                writer.append(records[1])
    assert written == 100
    writer.append(records[1])
    writer.append(records[2])
    writer.close()
    paths = partial_paths(ledger.partials, "shard-00000")
    assert len(paths) == 2
    assert sorted(record.row for _, record in scan_partials(paths)) == [0, 1, 2]
    assert open_writer(ledger, rows).complete


def test_of_two_publications_with_one_number_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both owners pass every check, so only the marker decides. Catches a commit that replaces, and one that
    takes the next free number."""
    ledger = open_ledger(tmp_path, 2, 4)
    rows = make_rows(2)
    monkeypatch.setattr(ShardWriter, "_check_owner", lambda self: None)
    writers = [open_writer(ledger, rows), open_writer(ledger, rows)]
    for writer in writers:
        for image in all_images(rows):
            writer.append(to_record(rows, image))
    writers[0].publish()
    stamps = {path: path.stat() for path in tmp_path.rglob("*.parquet")}
    with pytest.raises(ShardLostError):
        writers[1].publish()
    writers[1].forget()
    assert {path: path.stat() for path in tmp_path.rglob("*.parquet")} == stamps
    assert list((ledger.state / "staged").iterdir()) == list(ledger.partials.iterdir()) == []


def test_without_hard_links_a_marker_is_created_exclusively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    ledger = open_ledger(tmp_path, 2, 4)
    publish_all(ledger, make_rows(2))
    marker = ledger.marker(ledger.shards[0])
    assert marker is not None
    assert marker.num_ok == 2
    assert not link_file(ledger.marker_path(ledger.shards[0]), ledger.marker_path(ledger.shards[0]))


def test_a_link_that_was_made_but_told_as_failed_is_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does when an answer was lost and the request is repeated."""
    real = os.link

    def twice(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", twice)
    ledger = open_ledger(tmp_path, 2, 4)
    publish_all(ledger, make_rows(2))
    assert [row["row"] for row in read_table(tmp_path, "images")] == [0, 1]


def test_a_generation_can_be_given(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 1, 1)
    rows = make_rows(1)
    options = {"number": 0, "task": 0, "worker": "w", "image_format": "png"}
    old = ShardWriter(ledger, ledger.shards[0], rows, generation=4, **options)
    assert [path.name.split("-")[1] for path in ledger.partials.iterdir()] == ["00000.000004"]
    ShardWriter(ledger, ledger.shards[0], rows, generation=7, **options).close()
    old.append(to_record(rows, make_images(rows[0])[0]))
    with pytest.raises(ShardLostError):
        old.publish()


def test_a_commit_that_was_done_but_told_as_failed_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a writer that deletes its staged files then: the shard would be published without any."""
    real = os.link

    def done_and_failed(source: Path, target: Path) -> None:
        real(source, target)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ledger = open_ledger(tmp_path, 2, 4)
    monkeypatch.setattr(os, "link", done_and_failed)
    publish_all(ledger, make_rows(2))
    assert ledger.published() == {0}
    assert [row["row"] for row in read_table(tmp_path, "images")] == [0, 1]


def test_a_winner_that_comes_late_moves_nothing_after_the_next_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its marker is damaged, so nobody rolls it forward. Catches a next one that leaves its files there."""
    ledger, rows, late = open_ledger(tmp_path, 2, 4), make_rows(2), []
    real = Publications.move
    with monkeypatch.context() as patch:
        patch.setattr(Publications, "move", lambda *arguments: late.append(arguments))
        publish_all(ledger, rows)
    ledger.marker_path(ledger.shards[0]).write_text("")
    assert find_broken(ledger, ledger.shards) == {0: "its marker shard-00000.json is damaged"}
    publish_all(ledger, rows)
    stamps = {path: path.stat() for path in tmp_path.rglob("*.parquet")}
    assert len(stamps) == 2
    for arguments in late:
        real(*arguments)
    assert {path: path.stat() for path in tmp_path.rglob("*.parquet")} == stamps
    assert list((ledger.state / "staged").iterdir()) == []
