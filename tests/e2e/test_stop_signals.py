"""Signals to ``offdiff run``: it ends in good order with 75, says so, and the same command goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from job_fakes import Runner, contents, make_rows, pixels_by_key, write_jsonl
from processes import Forked, Process, offdiff

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 40
FLAGS = (
    *("--model=tiny", "--shard-size=7", "--max-num-seqs=2"),
    *("--height=48", "--width=48", f"--num-inference-steps={STEPS}"),
)
OPTIONS = {"shard_size": 7, "max_num_seqs": 2, "height": 48, "width": 48, "num_inference_steps": STEPS}


def test_each_signal_in_turn_then_to_the_end(tmp_path: Path) -> None:
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(60)), tmp_path / "out"
    num_done = 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        process = Forked("run", manifest, "--out", out, *FLAGS)
        assert process.wait_for_line("running:")
        process.send(signal.SIGCONT)
        time.sleep(0.3)
        assert process.is_running, "SIGCONT must be ignored"
        process.send(number)
        assert process.wait() == 75, process.stderr
        assert f"{number.name}: saving " in process.stderr
        assert "once more to stop without saving" in process.stderr
        assert "next: the same command goes on" in process.stderr
        assert "Traceback" not in process.stderr
        (told,) = (line for line in process.lines if line.startswith("interrupted: "))
        now = int(told.split()[1])
        assert num_done <= now < 60
        num_done = now
        assert offdiff("verify", out).returncode == 3, "sound, but unfinished"
    status = offdiff("status", out)
    assert "not running" in status.stdout
    assert f"{num_done} images drawn" in status.stdout
    result = offdiff("run", manifest, "--out", out, *FLAGS)
    assert result.returncode == 0, result.stderr
    assert f"{num_done} images done before" in result.stderr
    assert offdiff("verify", out).returncode == 0
    Runner().run(manifest, tmp_path / "whole", **OPTIONS)
    assert contents(out) == contents(tmp_path / "whole")
    assert len(pixels_by_key(out)) == 60


def test_one_signal_or_two_stop_within_seconds(tmp_path: Path) -> None:
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(6)), tmp_path / "out"
    endless = ("--model=tiny", "--height=48", "--width=48", "--num-inference-steps=10000")
    for signals in ([signal.SIGTERM], [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]):
        process = Forked("run", manifest, "--out", out, *endless)
        assert process.wait_for_line("running:")
        started = time.monotonic()
        for number in signals:
            process.send(number)
        assert process.wait() == 75, process.stderr
        assert time.monotonic() - started < 10
        assert "saving 6 unfinished images" in process.stderr, "delivered twice is not asked twice"
        assert "without saving unfinished images" not in process.stderr
        assert "interrupted: 0 of 6 images" in process.stderr


@pytest.mark.parametrize("line", ["scanning", "loading"])
def test_a_signal_before_the_first_image(tmp_path: Path, line: str) -> None:
    manifest, out = tmp_path / "m.jsonl", tmp_path / "out"
    rows = make_rows(40_000 if line == "scanning" else 10)
    write_jsonl(manifest, rows)
    process = Process("run", manifest, "--out", out, *FLAGS)
    assert process.wait_for_line(line)
    process.send(signal.SIGTERM)
    assert process.wait() == 75, process.stderr
    assert "SIGTERM" in process.stderr or line == "loading"
    assert "Traceback" not in process.stderr
    assert "the same command" in process.stderr
