"""``offdiff run``: what a person sees and the exit code, with a stand-in for ``run_task``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offline_diffusion.cli.cost_record import recall
from offline_diffusion.cli.main import main
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.cost import CostModel, MeasuredCost
from offline_diffusion.errors import JobInterrupted, JobMismatchError, ManifestError
from offline_diffusion.job import JobSummary
from offline_diffusion.progress import StopFlag

Run = Callable[..., Any]


def summary(**changes: Any) -> JobSummary:
    values: dict[str, Any] = {
        "out": Path("out"), "num_rows": 4, "num_images": 4, "num_ok": 4, "num_failed": 0,
        "num_quarantined_rows": 0, "num_resumed": 0, "num_shards": 1, "seconds": 2.0, "images_per_s": 2.0,
        "interrupted": False, "warnings": [],
    }  # fmt: skip
    return JobSummary(**(values | changes))


def invoke(run_task: Run, *args: str) -> Result:
    return CliRunner().invoke(main, ["run", "m.jsonl", "--out", "out", *args], obj=run_task)


def test_a_finished_job() -> None:
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
        ({"num_failed": 1, "num_ok": 3}, 3, "1 image failed: out/failures"),
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
        "interrupted": False, "warnings": ["w"], "cost": None, "profile": None,
    }  # fmt: skip


def test_signals_reach_the_running_job() -> None:
    def run_task(config: Any, *, stop: StopFlag, **_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.requests, stop.why) == (1, "SIGUSR1")
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requests == 1, "the same request in another form"
        return summary(interrupted=True)

    assert invoke(run_task).exit_code == 75


SIGNAL_IN_IMPORTS = """
import importlib.abc, os, signal, sys

class Sender(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{signal})

sys.meta_path.insert(0, Sender())
from offline_diffusion.cli.main import main
main(["run", {manifest!r}, "--out", {out!r}])
"""


@pytest.mark.parametrize("module", ["offline_diffusion.cli.run", "pydantic", "offline_diffusion.job"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_while_modules_are_imported(name: str, module: str, tmp_path: Path) -> None:
    manifest, out = tmp_path / "m.jsonl", tmp_path / "out"
    manifest.write_text('{"prompt": "a"}\n')
    code = SIGNAL_IN_IMPORTS.format(module=module, signal=name, manifest=str(manifest), out=str(out))
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 75, done.stderr
    assert f"Error: {name}: stopped before the job began\nhint: the same command starts it" in done.stderr
    assert not out.exists()


def test_a_task_of_a_slurm_array_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COUNT", "2"), ("ID", "1"), ("MIN", "0")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    result = invoke(lambda config, **_: summary())
    assert "task 2 of 2 (--task-index 1, from Slurm's array)" in result.stderr
    result = invoke(lambda config, **_: summary(), "--num-tasks", "3", "--task-index", "1")
    assert "Slurm" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "end", "low", "high"),
    [
        ((), None, None, None),
        ((), "+500", 480, 500),
        (("--time-limit", "00:02:00"), "+500", 120, 120),
        (("--time-limit", "3600"), "+500", 480, 500),
        (("--time-limit", "3600"), "-5", 3600, 3600),  # it was extended, and nobody said by how much
        ((), "0", None, None),
        ((), "soon", None, None),
    ],
)
def test_the_earlier_of_slurms_end_and_the_time_limit_counts(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], end: str | None, low: Any, high: Any
) -> None:
    if end is not None:
        value = str(round(time.time() + float(end))) if end[0] in "+-" else end
        monkeypatch.setenv("SLURM_JOB_END_TIME", value)
    seen = []

    def run_task(config: Any, **_: Any) -> Any:
        seen.append(config.time_limit)
        return summary()

    assert invoke(run_task, *flags).exit_code == 0
    (limit,) = seen
    assert limit is None if low is None else low - 1 <= limit <= high + 1


def test_a_time_limit_that_is_none_is_refused() -> None:
    result = invoke(lambda config, **_: pytest.fail("the job started"), "--time-limit", "12:30")
    assert result.exit_code == 2
    assert "--time-limit" in result.output


def test_usage_mistakes_exit_with_2_before_the_job_starts() -> None:
    for args in (["--max-num-seqs", "0"], ["--scheduling-policy", "best"], ["--unknown"]):
        result = invoke(lambda config, **_: pytest.fail("the job started"), *args)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


def test_what_a_run_cost_is_remembered_for_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    terms = CostModel(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    cost = MeasuredCost(terms, 50, 20.0, 60, max_num_batched_tokens=4_096, dtype="float32")
    result = invoke(lambda config, **_: summary(cost=cost), "--model", "m", "--device", "cpu", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["cost"]["model"]["square_s"] == 0.3
    record = recall(EngineConfig(model="m"))
    assert record is not None
    assert (record.device, record.num_images, record.budget_was_given) == ("CPU", 60, False)
    assert record.cost_model() == terms


def test_a_profiled_run_is_not_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tracing takes time of its own, which is no part of what steps cost."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cost = MeasuredCost(CostModel(1, 1, 1), 50, 20.0, 60, max_num_batched_tokens=4_096, dtype="float32")
    profile = {"stages": {}}
    monkeypatch.setattr("offline_diffusion.cli.run.profile_text", lambda _: "")
    assert invoke(lambda config, **_: summary(cost=cost, profile=profile), "--model", "m").exit_code == 0
    assert recall(EngineConfig(model="m")) is None
