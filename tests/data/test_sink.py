import errno
import hashlib
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from output_fakes import (
    all_images,
    contents,
    decode,
    make_fault,
    make_identity,
    make_images,
    make_output,
    make_pixels,
    make_row,
    make_rows,
    open_ledger,
    read_table,
    rows_of,
    run_job,
)

from offline_diffusion.data import sink as sink_module
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.partial import partial_paths, scan_partials
from offline_diffusion.data.rows import ImageTask
from offline_diffusion.data.sink import Sink
from offline_diffusion.errors import JobError


def submit_all(sink: Sink, images: list[ImageTask]) -> None:
    for image in images:
        sink.submit(0, image, make_output(image))
    sink.drain()


def test_shards_are_published_as_they_complete(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 4, 2)
    rows = make_rows(4)
    with Sink(ledger) as sink:
        for shard in ledger.shards:
            part = rows[shard.start : shard.stop]
            assert sink.open_shard(shard, part) == set()
        for row in (0, 2, 3):
            image = make_images(rows[row])[0]
            sink.submit(row // 2, image, make_output(image))
        sink.drain()
        assert ledger.published() == {1}
        assert [r.row for _, r in scan_partials(partial_paths(ledger.partials, "shard-00000"))] == [0]
        image = make_images(rows[1])[0]
        sink.submit(0, image, make_output(image))
    assert ledger.published() == {0, 1}
    assert [row["row"] for row in read_table(tmp_path, "images")] == [0, 1, 2, 3]
    assert (sink.progress.num_ok, sink.progress.num_shards, sink.progress.num_pending) == (4, 2, 0)


@pytest.mark.parametrize("image_format", ["png", "jpeg", "webp"])
def test_the_picture_is_the_middle_of_what_was_drawn(tmp_path: Path, image_format: str) -> None:
    ledger = open_ledger(tmp_path, 1, 1)
    row = make_row(0)
    image = replace(
        make_images(row)[0], final_height=13, final_width=20, requested_height=13, requested_width=20
    )
    with Sink(ledger, image_format=image_format) as sink:
        sink.open_shard(ledger.shards[0], [row])
        sink.submit(0, image, make_output(image))
    (found,) = read_table(tmp_path, "images")
    pixels = decode(found["image"]["bytes"])
    assert found["image"]["path"] == f"00000000-0.{image_format}"
    assert (found["height"], found["width"]) == pixels.shape[:2] == (13, 20)
    assert found["sha256"] == hashlib.sha256(pixels.tobytes()).hexdigest()
    expected = make_pixels(image)[1:14, 2:22]
    if image_format != "jpeg":
        np.testing.assert_array_equal(pixels, expected)
    (metrics,) = read_table(tmp_path, "metrics")
    assert (metrics["requested_height"], metrics["requested_width"]) == (13, 20)
    assert metrics["write_s"] > 0


def test_failed_outputs_become_failures(tmp_path: Path) -> None:
    rows = make_rows(3, images=2, faults=(1,))
    run_job(open_ledger(tmp_path, 3, 10), rows, failing={(0, 1): "out_of_memory"})
    assert [(row["row"], row["image_index"]) for row in read_table(tmp_path, "images")] == [
        (0, 0),
        (2, 0),
        (2, 1),
    ]
    failures = read_table(tmp_path, "failures")
    assert [(row["row"], row["image_index"], row["error_type"]) for row in failures] == [
        (0, 1, "out_of_memory"),
        (1, None, "invalid_row"),
    ]


def test_what_cannot_be_encoded_fails_alone(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 2, 2)
    wide, normal = make_row(0), make_row(1)
    request = replace(make_images(wide)[0].request, height=1, width=16_384)
    image = ImageTask(0, 0, wide.id, request, 1, 16_384, 1, 16_384)
    images = [image, *make_images(normal)]
    with Sink(ledger, image_format="webp") as sink:
        sink.open_shard(ledger.shards[0], [wide, normal])
        for each in images:
            sink.submit(0, each, make_output(each))
    metrics = read_table(tmp_path, "metrics")
    assert [(row["status"], row["error_type"]) for row in metrics] == [
        ("failed", "encode_error"),
        ("ok", None),
    ]
    assert "webp" in metrics[0]["error"]


def test_a_shard_of_faults_needs_nothing(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 2, 2)
    with Sink(ledger) as sink:
        assert sink.open_shard(ledger.shards[0], [make_fault(0), make_fault(1)]) == set()
        sink.drain()
        assert ledger.published() == {0}
        assert sink.progress.num_invalid_rows == 2


def test_an_interrupted_job_goes_on_where_it_stopped(tmp_path: Path) -> None:
    rows = make_rows(6, images=2)
    run_job(open_ledger(tmp_path / "whole", 6, 3), rows)
    ledger = open_ledger(tmp_path / "out", 6, 3)
    sink = Sink(ledger)
    sink.open_shard(ledger.shards[0], rows[:3])
    for image in all_images(rows[:2]):
        sink.submit(0, image, make_output(image))
    sink.close(abandon=True)
    assert ledger.published() == set()
    beat = json.loads((tmp_path / "out" / "_state" / "tasks" / "task-00000.json").read_text())
    assert beat["state"] == "stopped"
    drawn: list[tuple[int, int]] = []
    run_job(open_ledger(tmp_path / "out", 6, 3), rows, drawn=drawn)
    assert drawn == [(row, index) for row in range(2, 6) for index in (0, 1)]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_published_shard_is_not_opened_again(tmp_path: Path) -> None:
    rows = make_rows(2)
    ledger = open_ledger(tmp_path, 2, 2)
    run_job(ledger, rows)
    before = (tmp_path / "images" / "shard-00000.parquet").stat().st_mtime_ns
    with Sink(ledger) as sink:
        assert sink.open_shard(ledger.shards[0], rows) == {(0, 0), (1, 0)}
    assert (tmp_path / "images" / "shard-00000.parquet").stat().st_mtime_ns == before


def test_retry_makes_only_what_failed(tmp_path: Path) -> None:
    rows = make_rows(6, images=2, faults=(5,))
    ledger = open_ledger(tmp_path / "out", 6, 2)
    run_job(ledger, rows, failing={(2, 1): "nan", (3, 0): "out_of_memory"})
    untouched = (tmp_path / "out" / "images" / "shard-00000.parquet").read_bytes()
    repaired = [*rows[:5], make_row(5, images=2)]  # the faulty row, read again, is good now
    drawn: list[tuple[int, int]] = []
    run_job(open_ledger(tmp_path / "out", 6, 2), repaired, retry_failed=True, drawn=drawn)
    assert drawn == [(2, 1), (3, 0), (5, 0), (5, 1)]
    run_job(open_ledger(tmp_path / "clean", 6, 2), repaired)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")
    assert (tmp_path / "out" / "images" / "shard-00000.parquet").read_bytes() == untouched
    assert list((tmp_path / "out" / "failures").iterdir()) == []
    metrics = read_table(tmp_path / "out", "metrics")
    assert all(row["device_s"] == 0.25 and row["num_tokens"] == 42 for row in metrics)


def test_a_retry_that_fails_again_leaves_a_whole_shard(tmp_path: Path) -> None:
    rows = make_rows(3)
    failing = {(1, 0): "nan"}
    run_job(open_ledger(tmp_path, 3, 3), rows, failing=failing)
    before = contents(tmp_path)
    run_job(open_ledger(tmp_path, 3, 3), rows, failing=failing, retry_failed=True)
    assert contents(tmp_path) == before
    assert len(read_table(tmp_path, "failures")) == 1


def test_a_stopped_retry_keeps_the_old_shard_and_its_own_work(tmp_path: Path) -> None:
    rows = make_rows(3)
    ledger = open_ledger(tmp_path, 3, 3)
    run_job(ledger, rows, failing={(0, 0): "nan", (1, 0): "nan"})
    sink = Sink(ledger)
    images = all_images(rows)
    assert sink.open_shard(ledger.shards[0], rows, retry_failed=True) == {(2, 0)}
    sink.submit(0, images[0], make_output(images[0]))
    sink.close(abandon=True)
    assert [row["row"] for row in read_table(tmp_path, "images")] == [2]
    assert ledger.published() == {0}
    with Sink(ledger) as sink:
        assert sink.open_shard(ledger.shards[0], rows, retry_failed=True) == {(0, 0), (2, 0)}
        sink.submit(0, images[1], make_output(images[1]))
    assert [row["row"] for row in read_table(tmp_path, "images")] == [0, 1, 2]


def test_too_much_unwritten_makes_the_engine_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = sink_module.make_record

    def slow(*args: object, **kwargs: object) -> object:
        gate.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(sink_module, "make_record", slow)
    ledger = open_ledger(tmp_path, 8, 8)
    rows = make_rows(8)
    sink = Sink(ledger, num_threads=2, max_pending=3)
    sink.open_shard(ledger.shards[0], rows)

    def hand_in() -> None:
        for image in all_images(rows):
            sink.submit(0, image, make_output(image))

    engine = threading.Thread(target=hand_in)
    engine.start()
    time.sleep(0.3)
    assert sink.progress.num_pending == 3
    assert engine.is_alive()
    gate.set()
    engine.join(30)
    sink.close()
    assert ledger.published() == {0}


def test_bytes_are_bounded_but_one_large_image_still_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "MAX_PENDING_BYTES", 1)
    run_job(open_ledger(tmp_path, 3, 3), make_rows(3))
    assert len(read_table(tmp_path, "images")) == 3


def test_closing_tells_an_error_that_nobody_has_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_ledger(tmp_path, 2, 2)
    rows = make_rows(2)
    sink = Sink(ledger)
    sink.open_shard(ledger.shards[0], rows)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", broken)
    sink.submit(0, make_images(rows[0])[0], make_output(make_images(rows[0])[0]))
    with pytest.raises(JobError, match="Input/output error"):
        sink.close(abandon=True)
    sink.close()


def test_a_job_given_to_another_manifest_stops_the_old_process(tmp_path: Path) -> None:
    rows = make_rows(2)
    old = open_ledger(tmp_path, 2, 2)
    sink = Sink(old)
    sink.open_shard(old.shards[0], rows)
    Ledger(tmp_path).open(make_identity(3, 2, manifest={"sha256": "new"}), allow_manifest_change=True)
    with pytest.raises(JobError, match="another manifest"):
        submit_all(sink, all_images(rows))
    sink.close(abandon=True)
    assert read_table(tmp_path, "images") == []


def test_the_same_run_gives_the_same_pictures_with_many_threads(tmp_path: Path) -> None:
    rows = make_rows(40, images=3, faults=(7, 8, 39))
    run_job(open_ledger(tmp_path / "a", 40, 9), rows)
    ledger = open_ledger(tmp_path / "b", 40, 9)
    with Sink(ledger, num_threads=8, max_pending=5) as sink:
        work = []
        for shard in ledger.shards:
            part = rows[shard.start : shard.stop]
            sink.open_shard(shard, part)
            work += [(shard.index, image) for image in all_images(part)]
        np.random.default_rng(0).shuffle(work)
        for index, image in work:
            sink.submit(index, image, make_output(image))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_shard_that_another_process_took_is_left_to_it(tmp_path: Path) -> None:
    """Catches a loser that ends its job, or that publishes all the same."""
    rows = make_rows(6)
    ledger = open_ledger(tmp_path, 6, 2)
    lines: list[str] = []
    with Sink(ledger, say=lines.append) as sink:
        for shard in ledger.shards:
            sink.open_shard(shard, rows_of(rows, shard))
        sink.submit(0, all_images(rows)[0], make_output(all_images(rows)[0]))
        sink.drain()
        with Sink(Ledger(tmp_path)) as other:
            assert other.open_shard(ledger.shards[0], rows[:2]) == {(0, 0)}
            other.submit(0, all_images(rows)[1], make_output(all_images(rows)[1]))
        stamps = {path: path.stat() for path in tmp_path.rglob("*.parquet")}
        assert len(stamps) == 2
        for image in all_images(rows)[1:]:
            sink.submit(image.row // 2, image, make_output(image))
            sink.drain()
            sink.submit(0, all_images(rows)[1], make_output(all_images(rows)[1]))  # late: dropped
    assert lines == ["shard 0 was published or taken over by another process: left to it"]
    assert (sink.progress.num_shards, sink.progress.num_lost_shards) == (2, 1)
    assert ledger.published() == {0, 1, 2}
    assert {path: path.stat() for path in stamps} == stamps
    assert [row["row"] for row in read_table(tmp_path, "images")] == list(range(6))
    assert list(ledger.partials.iterdir()) == []


def test_what_an_owner_may_still_read_is_left_to_it(tmp_path: Path) -> None:
    """A loser whose shard is not published yet keeps its partial: the owner took its images from there."""
    rows = make_rows(2)
    ledger = open_ledger(tmp_path, 2, 2)
    with Sink(ledger) as sink:
        sink.open_shard(ledger.shards[0], rows)
        sink.submit(0, all_images(rows)[0], make_output(all_images(rows)[0]))
        sink.drain()
        owner = Sink(ledger)
        assert owner.open_shard(ledger.shards[0], rows) == {(0, 0)}
        sink.submit(0, all_images(rows)[1], make_output(all_images(rows)[1]))
        sink.drain()
        assert sink.progress.num_lost_shards == 1
        owner.submit(0, all_images(rows)[1], make_output(all_images(rows)[1]))
        owner.close()
    assert [row["row"] for row in read_table(tmp_path, "images")] == [0, 1]
