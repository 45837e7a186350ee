"""kill -9 of ``offdiff run`` at any moment: the dataset equals that of a run that nothing disturbed."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_fakes import Runner, contents, pixels_by_key, read_table, write_jsonl
from processes import Forked, offdiff

from offline_diffusion.data.verify import verify_shards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 20
NUM_KILLS = 6
OPTIONS = {"shard_size": 7, "max_num_seqs": 4}
FLAGS = ("--model=tiny", "--shard-size=7", "--max-num-seqs=4")


def make_manifest(path: Path, num_steps: int) -> Path:
    """60 rows of unlike size, steps and guidance; two faulty, two with several images: 61 images."""
    rows: list[dict[str, Any]] = []
    for n in range(60):
        row = {"id": f"r{n:03d}", "prompt": f"a red cup, view {n}", "seed": n, "tag": f"t{n}"}
        row |= {"height": 32 + 16 * (n % 3), "width": 48, "num_inference_steps": num_steps + n % 7}
        rows.append(row | {"negative_prompt": "grey"} if n % 2 else row)
    rows[9]["prompt"] = " "
    rows[30]["height"] = 50
    rows[12]["num_images_per_prompt"] = 3
    rows[58]["num_images_per_prompt"] = 2
    return write_jsonl(path, rows)


def durable(out: Path) -> Iterator[tuple[tuple[int, int], int]]:
    """``(row, image_index)`` and time of making of every image on disk, read without our own code."""
    for path in (out / "_state" / "partial").glob("*.arrows"):
        try:
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as batches:
                for batch in batches:
                    (record,) = batch.to_pylist()
                    yield (record["row"], record["image_index"]), json.loads(record["result"])["finished_at"]
        except (OSError, EOFError, pa.ArrowException):
            continue  # a torn tail
    for marker in (out / "_state" / "shards").glob("*.json"):
        table = pq.read_table(out / "metrics" / f"{marker.stem}.parquet")
        for row in table.filter(pa.compute.equal(table["status"], "ok")).to_pylist():
            yield (row["row"], row["image_index"]), round(row["finished_at"].timestamp() * 1e6)


def check_same(out: Path, whole: Path) -> None:
    result = offdiff("verify", out)
    assert result.returncode == 0, result.stdout
    for ours, theirs in zip(contents(out), contents(whole), strict=True):
        assert ours == theirs
    pixels_by_key(out)  # none twice
    assert not list((out / "_state" / "partial").iterdir())
    assert not list((out / "_state" / "tmp").iterdir())


def test_kills_at_random_moments(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path / "m.jsonl", num_steps=150)
    out, moments = tmp_path / "out", random.Random(SEED)
    made: dict[tuple[int, int], int] = {}
    num_killed = 0
    for number in range(NUM_KILLS):
        process = Forked("run", manifest, "--out", out, *FLAGS)
        if process.wait_for_line("running:"):
            if number % 3 == 1:  # some come after an image, however slow the machine is
                process.wait_until(lambda made=made: len(dict(durable(out))) > len(made), 0.05)
            time.sleep(moments.uniform(0.0, 1.2))
        process.send(signal.SIGKILL)
        num_killed += process.wait() == -signal.SIGKILL
        now = dict(durable(out))
        assert made.items() <= now.items(), "an image was lost or drawn again"
        made = now
    assert num_killed >= NUM_KILLS - 2, "too fast: the job was over before it could be killed"
    assert len(made) > 0, "no kill came after an image"
    result = offdiff("run", manifest, "--out", out, *FLAGS)
    assert result.returncode == 3, result.stderr
    assert "done: 61 of 61 images" in result.stderr
    assert "2 rows quarantined" in result.stderr
    assert "Traceback" not in result.stderr
    assert made.items() <= dict(durable(out)).items(), "what was finished was drawn again"
    Runner().run(manifest, tmp_path / "whole", **OPTIONS)
    check_same(out, tmp_path / "whole")


def test_kills_while_scanning_loading_and_publishing(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path / "m.jsonl", num_steps=3)
    with manifest.open("a", encoding="utf-8") as stream:
        stream.writelines(f'{{"id": "b{n}", "prompt": ""}}\n' for n in range(12_000))
    options = {"shard_size": 500, "max_num_seqs": 4}
    flags = ("--model=tiny", "--shard-size=500", "--max-num-seqs=4")
    out = tmp_path / "out"
    scratch, markers = out / "_state" / "tmp", out / "_state" / "shards"

    def publishing() -> bool:
        return scratch.exists() and any("shard-" in path.name for path in scratch.iterdir())

    def one_more() -> bool:
        return markers.exists() and len(list(markers.iterdir())) > num_published

    num_published = 0
    for when in ("scanning", "loading", publishing, one_more, publishing, one_more):
        num_published = len(list(markers.iterdir())) if markers.exists() else 0
        process = Forked("run", manifest, "--out", out, *flags)
        landed = process.wait_until(when, 0.0) if callable(when) else process.wait_for_line(when)
        process.send(signal.SIGKILL)
        assert landed
        assert process.wait() == -signal.SIGKILL
        if (out / "job.json").exists():
            assert not [problem for report in verify_shards(out) for problem in report.problems]
    assert offdiff("run", manifest, "--out", out, *flags).returncode == 3
    Runner().run(manifest, tmp_path / "whole", **options)
    check_same(out, tmp_path / "whole")
    assert len(read_table(out, "failures")) == 12_002


def test_kills_of_three_tasks_at_once(tmp_path: Path) -> None:
    """Tasks share a folder; killed together and started again they finish each their own shards."""
    manifest = make_manifest(tmp_path / "m.jsonl", num_steps=20)
    out = tmp_path / "out"

    def start() -> list[Forked]:
        flags = (*FLAGS, "--num-tasks=3")
        return [Forked("run", manifest, "--out", out, *flags, f"--task-index={task}") for task in range(3)]

    processes = start()
    processes[0].wait_for_line("running:")
    time.sleep(0.5)
    for process in processes:
        process.send(signal.SIGKILL)
    assert -signal.SIGKILL in [process.wait() for process in processes]
    made = dict(durable(out))
    assert {process.wait() for process in start()} <= {0, 3}
    assert made.items() <= dict(durable(out)).items()
    Runner().run(manifest, tmp_path / "whole", **OPTIONS)
    check_same(out, tmp_path / "whole")
