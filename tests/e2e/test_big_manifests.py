"""A million rows: time and memory of the commands that read them all, printed and bounded.

Bounds of time are thrice or more what two shared cores took; they catch what grows faster than the rows.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq
import pytest
from finished_job import begin_job, publish_all, run_without_model, write_big_jsonl
from processes import measure

from offline_diffusion.data.verify import verify_shards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ROWS = 1_000_000
SHARD_SIZE = 500
MAX_BYTES = 600_000_000

MAX_READ_S, MAX_FAULTS_S = 100.0, 120.0
MAX_RESUME_S, MAX_RESUME_COMMAND_S, MAX_ADOPT_S = 2.0, 10.0, 105.0


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_big_jsonl(tmp_path_factory.mktemp("big") / "m.jsonl", NUM_ROWS)


@pytest.fixture(scope="module")
def parquet(jsonl: Path) -> dict[str, Path]:
    """The same rows in one row group and in many."""
    table: pa.Table = pj.read_json(jsonl)
    paths = {"one": jsonl.with_name("one.parquet"), "many": jsonl.with_name("many.parquet")}
    pq.write_table(table, paths["one"], row_group_size=NUM_ROWS)
    pq.write_table(table, paths["many"], row_group_size=10_000)
    assert pq.ParquetFile(paths["one"]).num_row_groups == 1
    return paths


@pytest.mark.parametrize("command", ["validate", "plan"])
@pytest.mark.parametrize("kind", ["jsonl", "one", "many"])
def test_reading_a_million_rows(
    tiny_model: Path, jsonl: Path, parquet: dict[str, Path], tmp_path: Path, command: str, kind: str
) -> None:
    manifest = jsonl if kind == "jsonl" else parquet[kind]
    cost = measure(command, manifest, stdout=tmp_path / "out.txt")
    print(f"{command} {manifest.name}: {cost.seconds:.1f} s, {cost.peak_bytes / 1e6:.0f} MB")
    said = (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert cost.code == 0, said[-2000:]
    assert ("1,000,000 rows, 1,000,000 images: no faults" if command == "validate" else "1,000,000") in said
    assert cost.seconds < MAX_READ_S
    assert cost.peak_bytes < MAX_BYTES


def test_a_million_faults(tmp_path: Path) -> None:
    """Every row has the same id: as many faults as rows, each told."""
    manifest = tmp_path / "m.jsonl"
    manifest.write_text('{"id": "same", "prompt": "a red cup"}\n' * NUM_ROWS, encoding="utf-8")
    cost = measure("validate", manifest, stdout=tmp_path / "out.txt")
    print(f"validate, all ids equal: {cost.seconds:.1f} s, {cost.peak_bytes / 1e6:.0f} MB")
    assert cost.code == 3
    assert cost.seconds < MAX_FAULTS_S
    assert cost.peak_bytes < MAX_BYTES
    with (tmp_path / "out.txt").open(encoding="utf-8") as stream:
        assert sum("same id" in line for line in stream) == NUM_ROWS - 1


def test_resuming_a_finished_job(tiny_model: Path, jsonl: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"shard_size": SHARD_SIZE}
    begin_job(jsonl, out, SHARD_SIZE)
    publish_all(out, NUM_ROWS, SHARD_SIZE)
    report = next(iter(verify_shards(out)))
    assert not report.problems, "the folder is not as a real job would leave it"

    started = time.monotonic()
    summary = run_without_model(jsonl, out, **options)
    seconds = time.monotonic() - started
    print(f"resume of a finished job, run_task: {seconds:.2f} s")
    assert seconds < MAX_RESUME_S
    assert (summary.num_ok, summary.num_resumed, summary.num_shards) == (NUM_ROWS, NUM_ROWS, 2_000)
    assert not summary.interrupted

    flags = ("--out", out, f"--shard-size={SHARD_SIZE}")
    cost = measure("run", jsonl, *flags, stdout=tmp_path / "out.txt")
    print(f"resume of a finished job, command: {cost.seconds:.2f} s, {cost.peak_bytes / 1e6:.0f} MB")
    assert cost.code == 0
    assert cost.seconds < MAX_RESUME_COMMAND_S
    assert cost.peak_bytes < MAX_BYTES
    assert "done: 1,000,000 of 1,000,000 images" in (tmp_path / "out.txt").read_text(encoding="utf-8")

    shutil.rmtree(out / "_state")
    started = time.monotonic()
    summary = run_without_model(jsonl, out, **options)
    seconds = time.monotonic() - started
    print(f"the same after _state was deleted: {seconds:.2f} s")
    assert seconds < MAX_ADOPT_S
    assert (summary.num_ok, summary.num_shards, summary.interrupted) == (NUM_ROWS, 2_000, False)
