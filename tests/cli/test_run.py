"""``offdiff run``: what a person sees and the exit code, with a stand-in for the job module."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offline_diffusion.cli.main import main
from offline_diffusion.errors import JobInterrupted, JobMismatchError, ManifestError

Run = Callable[..., Any]


class StopFlag:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def request(self, why: str) -> None:
        self.reasons.append(why)


def summary(**changes: Any) -> Any:
    from offline_diffusion.job import JobSummary

    values: dict[str, Any] = {
        "out": Path("out"), "num_rows": 4, "num_images": 4, "num_ok": 4, "num_failed": 0,
        "num_quarantined_rows": 0, "num_resumed": 0, "num_shards": 1, "seconds": 2.0, "images_per_s": 2.0,
        "interrupted": False, "warnings": [],
    }  # fmt: skip
    return JobSummary(**(values | changes))


def invoke(run_task: Run, *args: str) -> Result:
    job = SimpleNamespace(run_task=run_task, StopFlag=StopFlag)
    return CliRunner().invoke(main, ["run", "m.jsonl", "--out", "out", *args], obj=job)


def test_a_finished_job(tmp_path: Path) -> None:
    seen = {}

    def run_task(config: Any, *, observer: Any, stop: StopFlag, say: Callable[[str], None]) -> Any:
        seen["config"] = config
        say("mapped: text is prompt")
        return summary()

    result = invoke(run_task, "--limit", "4")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "mapped: text is prompt" in result.stderr
    assert "done: 4 of 4 images in 2.0 s (2 images/s) in out" in result.stderr
    assert "offdiff status out" in result.stderr
    assert (seen["config"].manifests, seen["config"].limit) == (("m.jsonl",), 4)


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"num_quarantined_rows": 2}, 3, "2 rows quarantined: out/failures"),
        ({"num_failed": 1, "num_ok": 3}, 3, "1 image failed: out/metrics"),
        ({"interrupted": True, "num_ok": 1}, 75, "the same command goes on"),
        ({"interrupted": True, "num_failed": 1}, 75, "interrupted: 4 of 4"),
        ({"num_resumed": 3}, 0, "3 images done before"),
        ({"warnings": ["guidance is off in 7 rows"]}, 0, "warning: guidance is off in 7 rows"),
    ],
)
def test_exit_codes_and_what_is_said(changes: dict[str, Any], code: int, text: str) -> None:
    result = invoke(lambda config, **_: summary(**changes))
    assert result.exit_code == code
    assert text in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ManifestError("m.jsonl: no prompt column", hint="use --map"), 1),
        (JobMismatchError("out belongs to another job", hint="use another folder"), 1),
        (JobInterrupted("stopped while scanning", hint="run it again"), 75),
    ],
)
def test_errors_are_shown_without_a_traceback(error: Exception, code: int) -> None:
    def run_task(config: Any, **_: Any) -> Any:
        raise error

    result = invoke(run_task)
    assert result.exit_code == code
    assert result.stderr == f"Error: {error}\n"
    assert "\nhint: " in result.stderr


def test_a_bug_keeps_its_traceback() -> None:
    def run_task(config: Any, **_: Any) -> Any:
        raise ZeroDivisionError

    assert isinstance(invoke(run_task).exception, ZeroDivisionError)


def test_the_summary_as_json_is_all_of_standard_output() -> None:
    result = invoke(lambda config, **_: summary(num_failed=1, warnings=["w"]), "--json")
    assert json.loads(result.stdout) == {
        "out": "out", "num_rows": 4, "num_images": 4, "num_ok": 4, "num_failed": 1,
        "num_quarantined_rows": 0, "num_resumed": 0, "num_shards": 1, "seconds": 2.0, "images_per_s": 2.0,
        "interrupted": False, "warnings": ["w"],
    }  # fmt: skip


def test_signals_reach_the_running_job() -> None:
    def run_task(config: Any, *, stop: StopFlag, **_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reasons == ["SIGUSR1", "SIGTERM"]
        return summary(interrupted=True)

    assert invoke(run_task).exit_code == 75


def test_usage_mistakes_exit_with_2_before_the_job_starts() -> None:
    for args in (["--max-num-seqs", "0"], ["--scheduling-policy", "best"], ["--unknown"]):
        result = invoke(lambda config, **_: pytest.fail("the job started"), *args)
        assert result.exit_code == 2
        assert "Traceback" not in result.output
