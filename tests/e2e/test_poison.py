"""Rows that crash the process: two crashes and they are set aside, and no other row is lost with them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from job_fakes import Runner, make_rows, pixels_by_key, read_table, write_jsonl
from processes import Forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

SCRIPT = Path(__file__).with_name("poison_worker.py")
FLAGS = (
    *("--model=tiny", "--shard-size=8", "--max-num-seqs=4"),
    *("--height=32", "--width=32", "--num-inference-steps=3"),
)


class Ended(NamedTuple):
    """A command that has come to its end."""

    returncode: int
    stderr: str


def run(manifest: Path, out: Path, *flags: str) -> Ended:
    process = Forked("run", manifest, "--out", out, *FLAGS, *flags, program=SCRIPT.stem)
    return Ended(process.wait(), process.stderr)


def test_a_row_that_crashes_twice_is_set_aside(tmp_path: Path) -> None:
    rows = make_rows(24)
    rows[10]["prompt"] = "ABORT"
    manifest, out = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out"
    first, second, third = (run(manifest, out) for _ in range(3))
    assert (first.returncode, second.returncode) == (-signal.SIGABRT, -signal.SIGABRT)
    assert third.returncode == 3, third.stderr
    (failure,) = read_table(out, "failures")
    assert (failure["row"], failure["error_type"]) == (10, "crash")
    assert "crashed 2 times" in failure["reason"]
    assert "Aborted" in failure["reason"]
    assert "drawn one at a time" in second.stderr
    Runner().run(manifest, tmp_path / "whole", shard_size=8, height=32, width=32, num_inference_steps=3)
    others = {key: value for key, value in pixels_by_key(tmp_path / "whole").items() if key[0] != "r010"}
    assert pixels_by_key(out) == others
    assert not list((out / "_state" / "deaths").iterdir())
    assert not list((out / "_state" / "flights").iterdir())


def test_a_row_that_breaks_the_device_twice_is_set_aside(tmp_path: Path) -> None:
    """No signal and no death: the process ends with an error, and the user is told how it goes on."""
    rows = make_rows(24)
    rows[10]["prompt"] = "DEVICE"
    manifest, out = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out"
    first, second, third = (run(manifest, out) for _ in range(3))
    assert (first.returncode, second.returncode, third.returncode) == (1, 1, 3), third.stderr
    told = first.stderr[first.stderr.index("Error: ") :]
    assert "images in flight: AcceleratorError: CUDA error: an illegal memory access" in told
    assert (
        "hint: what is finished is kept, and the same command goes on: it draws these images one at" in told
    )
    assert "drawn one at a time" in second.stderr
    assert "with 1 image in flight" in second.stderr
    (failure,) = read_table(out, "failures")
    assert (failure["row"], failure["error_type"]) == (10, "crash")
    assert "crashed 2 times" in failure["reason"]
    assert failure["reason"].endswith("an illegal memory access was encountered")
    Runner().run(manifest, tmp_path / "whole", shard_size=8, height=32, width=32, num_inference_steps=3)
    others = {key: value for key, value in pixels_by_key(tmp_path / "whole").items() if key[0] != "r010"}
    assert pixels_by_key(out) == others
    assert not list((out / "_state" / "deaths").iterdir())
    assert not list((out / "_state" / "flights").iterdir())


def test_two_poison_rows_take_two_crashes_each(tmp_path: Path) -> None:
    rows = make_rows(16)
    rows[3]["prompt"] = rows[5]["prompt"] = "ABORT"
    manifest, out = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out"
    codes = []
    while not codes or codes[-1] == -signal.SIGABRT:
        codes.append(run(manifest, out).returncode)
        assert len(codes) <= 5
    assert codes[-1] == 3
    assert sorted(row["row"] for row in read_table(out, "failures")) == [3, 5]
    assert len(pixels_by_key(out)) == 14
    failed = [row for row in read_table(out, "metrics") if row["status"] == "failed"]
    assert [row["error_type"] for row in failed] == ["crash", "crash"]


SUPERVISED = f"""
import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
import poison_worker
from offline_diffusion import job
from offline_diffusion.launch import local
if sys.argv[1:] == ["worker"]:
    from offline_diffusion.launch.worker import main
    job._load_engine = poison_worker.load_engine
    main()
else:
    from offline_diffusion.cli.main import main
    command = [sys.executable, __file__, "worker"]
    local.Supervisor.__init__.__kwdefaults__["command"] = lambda: command
    main()
"""


def run_supervised(
    tmp_path: Path, manifest: Path, out: Path, devices: str, group: Path | None = None
) -> tuple[int, str]:
    """With workers of ``--devices`` that die of deadly prompts; exit code and standard error."""
    script = tmp_path / "deadly.py"
    script.write_text(SUPERVISED)
    command = [sys.executable, str(script), "run", str(manifest), "--out", str(out), *FLAGS]
    if group is not None:
        command = ["sh", "-c", f'echo $$ > {group} && exec "$@"', "sh", *command]
    result = subprocess.run(
        [*command, f"--devices={devices}"], capture_output=True, text=True, check=False, timeout=200
    )
    return result.returncode, result.stderr


@pytest.mark.parametrize(("word", "how"), [("ABORT", "SIGABRT"), ("DEVICE", "exit code 1")])
def test_one_command_with_devices_gets_through(tmp_path: Path, word: str, how: str) -> None:
    """The supervisor starts its worker again; nobody has to."""
    rows = make_rows(16)
    rows[3]["prompt"] = word
    manifest, out = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out"
    code, stderr = run_supervised(tmp_path, manifest, out, "cpu,cpu")
    assert code == 3, stderr
    assert stderr.count(f"died of {how}: started again") == 2
    assert [row["row"] for row in read_table(out, "failures")] == [3]
    assert len(pixels_by_key(out)) == 15
    assert "done: 15 of 16 images" in stderr


def test_a_worker_that_hangs_is_started_again(tmp_path: Path) -> None:
    """Once, and alone: nobody else could do what it holds."""
    rows = make_rows(12)
    rows[3]["prompt"] = "HANG"
    manifest, out = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out"
    code, stderr = run_supervised(tmp_path, manifest, out, "cpu")
    assert code == 0, stderr
    assert stderr.count("died of a hang, 0 min in a step: started again") == 1
    assert len(pixels_by_key(out)) == 12


LIMITED = Path("/sys/fs/cgroup/memory/offdiff-test")
MIN_LIMIT = 3 * 2**30


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group that may use little memory; who shall be in it writes its pid into the file."""
    try:
        LIMITED.mkdir()
        (LIMITED / "memory.limit_in_bytes").write_text(str(MIN_LIMIT))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield LIMITED / "cgroup.procs"
    LIMITED.rmdir()


def test_a_row_that_needs_more_memory_than_there_is_is_set_aside(tmp_path: Path, small_memory: Path) -> None:
    """Killed by the system, twice, and by nobody else."""
    rows = make_rows(12)
    rows[3]["prompt"] = "MEMORY"
    manifest, out = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out"
    code, stderr = run_supervised(tmp_path, manifest, out, "cpu", group=small_memory)
    assert code == 3, stderr
    assert stderr.count("died of SIGKILL for want of memory: started again") == 2
    (failure,) = read_table(out, "failures")
    assert (failure["row"], failure["error_type"]) == (3, "crash")
    assert "killed by the system for want of memory" in failure["reason"]
    assert len(pixels_by_key(out)) == 11


def test_one_worker_gets_through_a_pack_of_poison(tmp_path: Path) -> None:
    """Each life convicts one row and dies of the next, before it could tell that it had done anything."""
    rows = make_rows(16)
    for row in rows[2:7]:
        row["prompt"] = "ABORT"
    manifest, out = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out"
    code, stderr = run_supervised(tmp_path, manifest, out, "cpu")
    assert code == 3, stderr
    assert sorted(row["row"] for row in read_table(out, "failures")) == [2, 3, 4, 5, 6]
    assert len(pixels_by_key(out)) == 11


def test_another_manifests_row_is_not_set_aside_for_crashes_of_the_old(tmp_path: Path) -> None:
    """Row 2 crashed twice; then the manifest has an innocent row there."""
    rows = make_rows(8)
    rows[2]["prompt"] = "ABORT"
    manifest, out = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out"
    assert [run(manifest, out).returncode for _ in range(2)] == [-signal.SIGABRT] * 2
    mended = write_jsonl(tmp_path / "mended.jsonl", make_rows(8))
    result = run(mended, out, "--allow-manifest-change")
    assert result.returncode == 0, result.stderr
    assert len(pixels_by_key(out)) == 8
    assert not list((out / "_state" / "deaths").iterdir())
    assert not list((out / "_state" / "flights").iterdir())
