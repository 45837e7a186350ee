"""``offdiff`` with its output on the Hub: stopped, killed, gone on with, by several devices of a machine."""

import re
import signal
import time
from pathlib import Path

import pytest
from hub_server import REPO, HubServer
from job_fakes import Runner, contents, pixels_by_key, write_jsonl
from processes import Process, offdiff

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

URL = f"hf://datasets/{REPO}"
FLAGS = ("--model=tiny", "--shard-size=8", "--max-num-seqs=4")


def make_manifest(path: Path) -> Path:
    rows = [
        {"id": f"r{n:02d}", "prompt": f"a red cup, view {n}", "seed": n, "num_inference_steps": 30 + n % 5}
        | {"height": 32 + 16 * (n % 3), "width": 48}
        for n in range(32)
    ]
    return write_jsonl(path, rows)


def test_stopped_killed_and_gone_on_with(hub: HubServer, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path / "m.jsonl")

    def start(machine: str, *flags: str) -> Process:
        return Process("run", manifest, "--out", URL, "--work-dir", tmp_path / machine, *FLAGS, *flags)

    for machine, number in (("a", signal.SIGTERM), ("a", signal.SIGKILL), ("b", signal.SIGTERM)):
        process = start(machine)
        assert process.wait_until(lambda p=process: any("images/s" in line for line in p.lines))
        time.sleep(1)
        process.send(number)
        assert process.wait() in {75, -signal.SIGKILL, 0}, process.stderr
    last = offdiff(
        "run", manifest, "--out", URL, "--work-dir", tmp_path / "a", *FLAGS, "--devices", "cpu,cpu"
    )
    assert last.returncode == 0, last.stderr
    assert re.search(rf"^done: 32 of 32 images in .* in {URL}$", last.stderr, re.MULTILINE), last.stderr
    verified = offdiff("verify", URL)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    status = offdiff("status", URL)
    assert f"{URL}: 4 of 4 shards done, 32 of 32 rows, 32 images drawn, 0 failed" in status.stdout

    copy = hub.download(tmp_path / "copy")
    Runner().run(manifest, tmp_path / "whole", shard_size=8, max_num_seqs=4)
    for ours, theirs in zip(contents(copy), contents(tmp_path / "whole"), strict=True):
        assert ours == theirs
    pixels_by_key(copy)  # none twice
    shards = [commit.message for commit in hub.commits if commit.message.startswith("shard")]
    assert sorted(shards) == [f"shard {shard}: 8 rows" for shard in range(4)]


def test_messages(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", [{"prompt": "a red cup"}])
    missing = offdiff("run", manifest, "--out", f"{URL}x", "--work-dir", tmp_path / "a")
    assert missing.returncode == 1
    assert "Traceback" not in missing.stderr
    assert f"hint: create it: hf repos create {REPO}x --repo-type dataset" in missing.stderr
    unknown = offdiff("run", manifest, "--out", "hf://owner/name", "--work-dir", tmp_path / "a")
    assert unknown.returncode == 2
    assert "hint: hf://datasets/OWNER/NAME" in unknown.stderr
    nothing = offdiff("verify", URL)
    assert nothing.returncode == 1
    assert f"{URL} is not an output of offdiff" in nothing.stderr
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused = offdiff("run", manifest, "--out", URL, "--work-dir", tmp_path / "a")
    assert refused.returncode == 1
    assert "HF_TOKEN" in refused.stderr
