"""``attempts`` counts every attempt at an image, over all runs."""

from __future__ import annotations

from pathlib import Path

from output_fakes import all_images, make_output, make_row, make_rows, open_ledger, read_table, run_job

from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.sink import Sink


def attempts(out: Path) -> list[tuple[str, int]]:
    return [(row["status"], row["attempts"]) for row in read_table(out, "metrics")]


def test_retries_add_up(tmp_path: Path) -> None:
    rows = make_rows(3)
    run_job(open_ledger(tmp_path, 3, 3), rows, failing={(0, 0): "nan", (1, 0): "nan"})
    assert attempts(tmp_path) == [("failed", 1), ("failed", 1), ("ok", 1)]
    run_job(open_ledger(tmp_path, 3, 3), rows, failing={(1, 0): "nan"}, retry_failed=True)
    assert attempts(tmp_path) == [("ok", 2), ("failed", 2), ("ok", 1)]
    run_job(open_ledger(tmp_path, 3, 3), rows, retry_failed=True)
    assert attempts(tmp_path) == [("ok", 2), ("ok", 3), ("ok", 1)]


def test_what_the_engine_tried_again_adds_to_it(tmp_path: Path) -> None:
    rows = make_rows(1)
    run_job(open_ledger(tmp_path, 1, 1), rows, failing={(0, 0): "out_of_memory"})
    ledger = open_ledger(tmp_path, 1, 1)
    with Sink(ledger) as sink:
        sink.open_shard(ledger.shards[0], rows, retry_failed=True)
        (image,) = all_images(rows)
        output = make_output(image)
        output.metrics.attempts = 3
        sink.submit(0, image, output)
    assert attempts(tmp_path) == [("ok", 4)]


def test_an_attempt_of_a_stopped_retry_counts_once(tmp_path: Path) -> None:
    rows: list[ManifestRow | RowFault] = make_rows(2)
    ledger = open_ledger(tmp_path, 2, 2)
    run_job(ledger, rows, failing={(0, 0): "nan", (1, 0): "nan"})
    sink = Sink(ledger)
    sink.open_shard(ledger.shards[0], rows, retry_failed=True)
    image = all_images(rows)[0]
    sink.submit(0, image, make_output(image, error_type="nan"))
    sink.close(abandon=True)
    with Sink(ledger) as sink:
        sink.open_shard(ledger.shards[0], rows, retry_failed=True)
        for image in all_images(rows):
            sink.submit(0, image, make_output(image))
    assert attempts(tmp_path) == [("ok", 3), ("ok", 2)]


def test_attempts_at_another_row_do_not_count(tmp_path: Path) -> None:
    run_job(open_ledger(tmp_path, 1, 1), make_rows(1), failing={(0, 0): "nan"})
    run_job(open_ledger(tmp_path, 1, 1), [make_row(0, text="something else")], retry_failed=True)
    assert attempts(tmp_path) == [("ok", 1)]
