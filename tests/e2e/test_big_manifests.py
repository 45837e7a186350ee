"""Half a million rows: time and memory of the commands that read them all, printed and bounded.

Bounds of time are thrice or more what two shared cores took; they catch what grows faster than the rows.
Bounds of memory leave about 100 bytes a row: a command that keeps a thing of each row needs more.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq
import pytest
from finished_job import publish, run_without_model, write_big_jsonl
from processes import Process, measure

from offline_diffusion.data.verify import verify_shards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ROWS = 500_000
SHARD_SIZE = 250
NUM_SHARDS = NUM_ROWS // SHARD_SIZE

MAX_READ_BYTES, MAX_STATUS_BYTES = 250_000_000, 145_000_000
MAX_RUN_BYTES = 375_000_000
"""A run asks torch for its version, which alone takes 190 MB."""

MAX_READ_S, MAX_FAULTS_S = 50.0, 60.0
MAX_RESUME_S, MAX_RESUME_COMMAND_S, MAX_ADOPT_S, MAX_STATUS_S = 2.0, 15.0, 55.0, 5.0


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


@pytest.mark.parametrize(("kind", "command"), [("jsonl", "plan"), ("one", "validate"), ("many", "plan")])
def test_reading_many_rows(
    tiny_model: Path, jsonl: Path, parquet: dict[str, Path], tmp_path: Path, command: str, kind: str
) -> None:
    manifest = jsonl if kind == "jsonl" else parquet[kind]
    cost = measure(command, manifest, stdout=tmp_path / "out.txt")
    print(f"{command} {manifest.name}: {cost.seconds:.1f} s, {cost.peak_bytes / 1e6:.0f} MB")
    said = (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert cost.code == 0, said[-2000:]
    assert (
        f"{NUM_ROWS:,} rows, {NUM_ROWS:,} images: no faults" if command == "validate" else f"{NUM_ROWS:,}"
    ) in said
    assert cost.seconds < MAX_READ_S
    assert cost.peak_bytes < MAX_READ_BYTES


def test_as_many_faults_as_rows(tmp_path: Path) -> None:
    """Every row has the same id: as many faults as rows, each told."""
    manifest = tmp_path / "m.jsonl"
    manifest.write_text('{"id": "same", "prompt": "a red cup"}\n' * NUM_ROWS, encoding="utf-8")
    cost = measure("validate", manifest, stdout=tmp_path / "out.txt")
    print(f"validate, all ids equal: {cost.seconds:.1f} s, {cost.peak_bytes / 1e6:.0f} MB")
    assert cost.code == 3
    assert cost.seconds < MAX_FAULTS_S
    assert cost.peak_bytes < MAX_READ_BYTES
    with (tmp_path / "out.txt").open(encoding="utf-8") as stream:
        assert sum("same id" in line for line in stream) == NUM_ROWS - 1


def start_run(manifest: Path, out: Path) -> tuple[float, int]:
    """Seconds until a run has the folder and loads the model, and its memory by then; there it is killed."""
    started = time.monotonic()
    process = Process("run", manifest, "--model=tiny", "--out", out, f"--shard-size={SHARD_SIZE}")
    assert process.wait_for_line("loading"), process.stderr
    seconds, (_, peak_bytes) = time.monotonic() - started, process.memory()
    process.send(signal.SIGKILL)
    process.wait()
    return seconds, peak_bytes


def test_starting_and_resuming(tiny_model: Path, jsonl: Path, tmp_path: Path) -> None:
    """What a resume does must not grow with the rows, only with the shards."""
    out, options = tmp_path / "out", {"shard_size": SHARD_SIZE}
    seconds, peak_bytes = start_run(jsonl, out)
    print(f"run until it loads the model: {seconds:.1f} s, {peak_bytes / 1e6:.0f} MB")
    assert seconds < MAX_READ_S
    assert peak_bytes < MAX_RUN_BYTES

    publish(out, slice(0, NUM_SHARDS // 2))
    seconds, peak_bytes = start_run(jsonl, out)
    print(f"resume of a job half done, likewise: {seconds:.1f} s, {peak_bytes / 1e6:.0f} MB")
    assert seconds < MAX_RESUME_COMMAND_S
    assert peak_bytes < MAX_RUN_BYTES

    publish(out, slice(NUM_SHARDS // 2, None))
    report = next(iter(verify_shards(out)))
    assert not report.problems, "the folder is not as a real job would leave it"

    tries = []
    for _ in range(2):  # this machine does other tests beside
        started = time.monotonic()
        summary = run_without_model(jsonl, out, **options)
        tries.append(time.monotonic() - started)
    seconds = min(tries)
    print(f"resume of a finished job, run_task: {seconds:.2f} s, the better of two")
    assert seconds < MAX_RESUME_S
    assert (summary.num_ok, summary.num_resumed, summary.num_shards) == (NUM_ROWS, NUM_ROWS, NUM_SHARDS)
    assert not summary.interrupted

    flags = ("--model=tiny", "--out", out, f"--shard-size={SHARD_SIZE}")
    cost = measure("run", jsonl, *flags, stdout=tmp_path / "out.txt")
    print(f"resume of a finished job, command: {cost.seconds:.2f} s, {cost.peak_bytes / 1e6:.0f} MB")
    assert cost.code == 0
    assert cost.seconds < MAX_RESUME_COMMAND_S
    assert cost.peak_bytes < MAX_RUN_BYTES
    assert f"done: {NUM_ROWS:,} of {NUM_ROWS:,} images" in (tmp_path / "out.txt").read_text(encoding="utf-8")

    cost = measure("status", out, stdout=tmp_path / "out.txt")
    print(f"status: {cost.seconds:.2f} s, {cost.peak_bytes / 1e6:.0f} MB")
    assert f"{NUM_SHARDS:,} of {NUM_SHARDS:,} shards done" in (tmp_path / "out.txt").read_text(
        encoding="utf-8"
    )
    assert cost.seconds < MAX_STATUS_S
    assert cost.peak_bytes < MAX_STATUS_BYTES

    shutil.rmtree(out / "_state")
    started = time.monotonic()
    summary = run_without_model(jsonl, out, **options)
    seconds = time.monotonic() - started
    print(f"the same after _state was deleted: {seconds:.2f} s")
    assert seconds < MAX_ADOPT_S
    assert (summary.num_ok, summary.num_shards, summary.interrupted) == (NUM_ROWS, NUM_SHARDS, False)
