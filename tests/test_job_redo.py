"""What ``verify`` finds broken is made again by doing what its hint says, and nothing else is."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from job_fakes import SMALL, Runner, contents, make_rows, write_jsonl

from offline_diffusion.cli.main import main

OPTIONS = {"shard_size": 2, "device": "cpu", **SMALL}


def damage(path: Path) -> None:
    """Flips the bits of a byte of the first encoded image's pixels."""
    data = bytearray(path.read_bytes())
    data[data.index(b"IDAT") + 20] ^= 0xFF
    path.write_bytes(data)


def verify(out: Path) -> Result:
    return CliRunner().invoke(main, ["verify", str(out)])


def delete_what_the_hint_says(result: Result) -> list[str]:
    (hint,) = (line for line in result.stderr.splitlines() if line.startswith("hint: "))
    paths = [Path(path) for path in re.findall(r"/\S+?\.(?:json|parquet)", hint)]
    for path in paths:
        path.unlink()
    return [path.name for path in paths]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("harm", "name", "reason"),
    [
        (damage, "images/shard-00001.parquet", "images/shard-00001.parquet was changed: its checksum"),
        (
            cut,
            "metrics/shard-00001.parquet",
            r"metrics/shard-00001.parquet has \d+ bytes, published were \d+",
        ),
        (Path.unlink, "images/shard-00001.parquet", "images/shard-00001.parquet is missing"),
        (cut, "_state/shards/shard-00001.json", "its marker shard-00001.json is damaged"),
    ],
)
def test_the_same_command_makes_a_broken_shard_again(
    tmp_path: Path, harm: Callable[[Path], None], name: str, reason: str
) -> None:
    manifest, out, runner = write_jsonl(tmp_path / "m.jsonl", make_rows(6)), tmp_path / "out", Runner()
    runner.run(manifest, out, **OPTIONS)
    before = contents(out)
    others = {path: path.stat() for index in (0, 2) for path in out.glob(f"*/shard-0000{index}.parquet")}
    harm(out / name)
    lines: list[str] = []
    summary = runner.run(manifest, out, say=lines.append, **OPTIONS)
    assert re.fullmatch(f"shard 1 is made again: {reason}.*", lines[0])
    assert set(runner.finished) == {"a red cup, view 2", "a red cup, view 3"}
    assert (summary.num_ok, summary.num_shards) == (6, 3)
    assert contents(out) == before
    assert {path: path.stat() for path in others} == others
    assert verify(out).exit_code == 0
    assert sorted(path.name for path in (out / "_state" / "shards").glob("shard-00001*")) == [
        "shard-00001.json",
        "shard-00001.r1.json",
    ]
    runner.run(manifest, out, say=lines.append, **OPTIONS)
    assert runner.engine is None
    assert len(lines) == 1


@pytest.mark.parametrize("state_is_deleted", [False, True])
def test_a_shard_that_only_verify_finds_is_made_again(tmp_path: Path, state_is_deleted: bool) -> None:
    manifest, out, runner = write_jsonl(tmp_path / "m.jsonl", make_rows(6)), tmp_path / "out", Runner()
    runner.run(manifest, out, **OPTIONS)
    before = contents(out)
    others = [out / "images" / f"shard-0000{index}.parquet" for index in (0, 2)]
    stamps = [path.stat().st_mtime_ns for path in others]
    path = out / "images" / "shard-00001.parquet"
    stat = path.stat()
    damage(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as when the disk does it
    if state_is_deleted:
        shutil.rmtree(out / "_state")

    broken = verify(out)
    assert broken.exit_code == 1
    assert "shard-00001.parquet" in broken.stdout
    runner.run(manifest, out, **OPTIONS)
    assert runner.engine is None  # the same command alone takes the shard for done
    if state_is_deleted:
        shutil.rmtree(out / "_state")

    suffix = "parquet" if state_is_deleted else "json"
    assert delete_what_the_hint_says(verify(out)) == [f"shard-00001.{suffix}"]
    runner.run(manifest, out, **OPTIONS)
    assert set(runner.finished) == {"a red cup, view 2", "a red cup, view 3"}
    assert contents(out) == before
    assert [path.stat().st_mtime_ns for path in others] == stamps
    sound = verify(out)
    assert (sound.exit_code, "hint" in sound.stderr) == (0, False)


def test_several_damaged_shards_are_hinted_at_together(tmp_path: Path) -> None:
    manifest, out, runner = write_jsonl(tmp_path / "m.jsonl", make_rows(7)), tmp_path / "out", Runner()
    runner.run(manifest, out, **OPTIONS | {"shard_size": 1})
    for path in sorted((out / "images").iterdir()):
        damage(path)
    result = verify(out)
    assert "to make 7 shards again" in result.stderr
    assert "(likewise for 2 more shards)" in result.stderr
    assert len(delete_what_the_hint_says(result)) == 5


def test_a_retry_with_nothing_but_faulty_rows_loads_no_model(tmp_path: Path) -> None:
    rows = make_rows(4)
    rows[1]["prompt"], rows[2]["height"] = "", 42
    manifest, out, runner = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out", Runner()
    runner.run(manifest, out, **OPTIONS)
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    summary = runner.run(manifest, out, retry_failed=True, **OPTIONS)
    assert runner.engine is None
    assert (summary.num_ok, summary.num_quarantined_rows) == (2, 2)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == stamps


def test_a_retry_takes_rows_that_can_be_drawn_by_now(tmp_path: Path) -> None:
    """As after an update that lifts a limit: here the marker is made to speak of one fault more."""
    rows = make_rows(2)
    rows[1]["prompt"] = ""
    manifest, out, runner = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out", Runner()
    runner.run(manifest, out, **OPTIONS)
    path = out / "_state" / "shards" / "shard-00000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_invalid_rows": 2}))
    runner.run(manifest, out, retry_failed=True, **OPTIONS)
    assert runner.engine is not None
    newest = out / "_state" / "shards" / "shard-00000.r1.json"
    assert json.loads(newest.read_text())["num_invalid_rows"] == 1
