"""``offdiff`` with its output on object storage, stopped, killed, and gone on with by other machines."""

import re
import signal
import time
from pathlib import Path

import pytest
from job_fakes import Runner, contents, pixels_by_key, write_jsonl
from processes import Forked, Process, offdiff
from s3_server import BUCKET, S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

URL = f"s3://{BUCKET}/sets/cups"
FLAGS = ("--model=tiny", "--shard-size=8", "--max-num-seqs=4")


def make_manifest(path: Path) -> Path:
    rows = [
        {"id": f"r{n:02d}", "prompt": f"a red cup, view {n}", "seed": n, "num_inference_steps": 60 + n % 5}
        | {"height": 32 + 16 * (n % 3), "width": 48}
        for n in range(40)
    ]
    rows[7]["height"] = 50
    return write_jsonl(path, rows)


def test_machines_come_and_go(s3: S3Server, tmp_path: Path) -> None:
    """A stopped one, a killed one, two at once, each with a disk of its own: nothing lost, nothing twice."""
    manifest = make_manifest(tmp_path / "m.jsonl")

    def start(machine: str, *flags: str) -> Process:
        return Forked("run", manifest, "--out", URL, "--work-dir", tmp_path / machine, *FLAGS, *flags)

    stopped = start("a")
    assert stopped.wait_until(lambda: any("images/s" in line for line in stopped.lines))
    time.sleep(0.5)
    stopped.send(signal.SIGTERM)
    assert stopped.wait() == 75, stopped.stderr
    assert any(key.startswith("_state/parked/") for key in s3.keys("sets/cups"))

    killed = start("b")
    assert killed.wait_until(lambda: any("images/s" in line for line in killed.lines))
    time.sleep(0.3)
    killed.send(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL

    both = [start(name, "--num-tasks=2", f"--task-index={n}") for n, name in enumerate("bc")]
    assert {process.wait() for process in both} <= {0, 3}, [process.stderr for process in both]
    last = offdiff("run", manifest, "--out", URL, "--work-dir", tmp_path / "d", *FLAGS)
    assert last.returncode == 3, last.stderr
    assert re.search(rf"^done: 39 of 39 images in .* in {URL}$", last.stderr, re.MULTILINE), last.stderr
    verified = offdiff("verify", URL)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    status = offdiff("status", URL)
    assert f"{URL}: 5 of 5 shards done, 40 of 40 rows, 39 images drawn, 0 failed" in status.stdout

    copy = s3.download("sets/cups", tmp_path / "copy")
    Runner().run(manifest, tmp_path / "whole", shard_size=8, max_num_seqs=4)
    for ours, theirs in zip(contents(copy), contents(tmp_path / "whole"), strict=True):
        assert ours == theirs
    pixels_by_key(copy)  # none twice
    state = [key for key in s3.keys("sets/cups") if key.startswith("_state/")]
    assert not [key for key in state if not key.startswith(("_state/shards/", "_state/tasks/"))]


def test_two_devices_and_a_manifest_there(s3: S3Server, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path / "m.jsonl")
    s3.put("manifests/m.jsonl", manifest.read_bytes())
    source = f"s3://{BUCKET}/manifests/m.jsonl"
    command = ("run", source, "--out", URL, "--work-dir", tmp_path / "a", *FLAGS)
    result = offdiff(*command, "--devices", "cpu,cpu")
    assert result.returncode == 3, result.stderr
    assert "done: 39 of 39 images" in result.stderr
    assert offdiff("verify", URL).returncode == 0
    again = offdiff(*command, "--devices", "cpu,cpu")
    assert again.returncode == 3, again.stderr
    assert "39 images done before" in again.stderr


def test_a_storage_that_is_away_is_waited_for(s3: S3Server, tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", [{"prompt": "a red cup"}])
    s3.fault = lambda request: "busy" if request.verb == "PUT" and "staged" in request.key else None
    small = ("--model=tiny", "--height=32", "--width=32")
    process = Forked("run", manifest, "--out", URL, "--work-dir", tmp_path / "a", *small)
    assert process.wait_until(
        lambda: any("trying again, for at most 300 s" in line for line in process.lines)
    )
    s3.fault = lambda _: None
    assert process.wait() == 0, process.stderr
    assert offdiff("verify", URL).returncode == 0


def test_messages(s3: S3Server, tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", [{"prompt": "a red cup"}])
    missing = offdiff("run", manifest, "--out", "s3://no-such-bucket/x", "--work-dir", tmp_path / "a")
    assert missing.returncode == 1
    assert "Traceback" not in missing.stderr
    assert missing.stderr.startswith("Error: s3://no-such-bucket/x: The specified bucket does not exist")
    unknown = offdiff("run", manifest, "--out", "what://bucket/x", "--work-dir", tmp_path / "a")
    assert unknown.returncode == 2
    assert "what://bucket/x" in unknown.stderr
    nothing = offdiff("verify", URL)
    assert nothing.returncode == 1
    assert f"{URL} is not an output of offdiff" in nothing.stderr
