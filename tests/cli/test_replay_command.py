"""``offdiff replay`` from the outside: the real engine once, and the simulation for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offline_diffusion.cli.main import main

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [
        {"timestamp": 10 + index, "prompt": f"owl {index}", "size": "64x64", "steps": 3} for index in range(6)
    ]
    rows[2]["slo_ms"] = 0.001
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def replay(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["replay", *arguments])
    assert result.exit_code == code, result.output
    return result


def simulated(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = replay(*arguments, "--simulate", "--tflops", "0.01", "--json", code=code)
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def test_a_trace_on_the_real_engine(trace: str, tmp_path: Path, tiny_model: Path) -> None:
    modes = tmp_path / "modes.yaml"
    modes.write_text("serial: {step_execution: false, max_num_seqs: 1}\npacked:\n")
    page = tmp_path / "page.html"
    result = replay(
        *(trace, "--speed", "20", "--model", "tiny", "--device", "cpu"),
        *("--compare", str(modes), "--html", str(page), "--json"),
    )
    values = json.loads(result.stdout)
    assert list(values["runs"]) == ["serial", "packed"]
    for numbers in values["runs"].values():
        assert numbers["completed_requests"] == 6
        assert numbers["num_steps"] >= 3
        assert 0 < numbers["latency_p50"] <= numbers["latency_p99"] <= numbers["duration"]
        assert 0 < numbers["device_busy_share"] < 1
        assert numbers["slo_attainment_rate"] <= 5 / 6
        assert numbers["stage_durations_mean"]["denoise"] > 0
    assert values["runs"]["serial"]["mean_batch_images"] == 1
    assert values["runs"]["serial"]["num_steps"] == 18
    assert page.read_text().startswith("<!doctype html>")


def test_a_mode_that_fails_costs_no_finished_one(trace: str, tmp_path: Path, tiny_model: Path) -> None:
    modes = tmp_path / "modes.yaml"
    modes.write_text("one:\ntwo: {attention_backend: fa3}\nthree:\n")
    page = tmp_path / "new" / "folder" / "page.html"
    result = replay(
        *(trace, "--speed", "50", "--model", "tiny", "--device", "cpu"),
        *("--compare", str(modes), "--html", str(page), "--json"),
        code=1,
    )
    values = json.loads(result.stdout)
    assert (values["mode"], values["completed_requests"]) == ("one", 6)
    assert values["facts"]["not run"] == "two, three"
    assert "fa3" in result.stderr
    assert "not run: two, three" in page.read_text()


def test_a_page_that_cannot_be_written_is_refused_at_start(trace: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for page in (tmp_path / "file" / "page.html", tmp_path):
        result = replay(trace, "--simulate", "--html", str(page), code=2)
        assert f"--html {page}: " in result.stderr


def test_a_simulation_refuses_modes_of_unlike_costs(trace: str, tmp_path: Path) -> None:
    modes = tmp_path / "modes.yaml"
    modes.write_text("plain:\nsmall: {quantization: int8}\n")
    result = replay(trace, "--simulate", "--compare", str(modes), code=2)
    assert "mode small: quantization int8 cannot be simulated" in result.stderr


def test_times_windows_and_speed(trace: str) -> None:
    assert simulated(trace)["offered_qps"] == pytest.approx(6 / 5)
    fast = simulated(trace, "--speed", "10", "--window", "1:4")
    assert fast["completed_requests"] == 3
    assert fast["offered_qps"] == pytest.approx(3 / 0.2)
    assert fast["facts"]["window"] == "1 s to 4 s"
    assert simulated(trace, "--limit", "2")["completed_requests"] == 2
    late = simulated(trace, "--limit", "2", "--window", "3:")
    assert (late["completed_requests"], late["offered_qps"]) == (2, pytest.approx(2 / 1))
    closed = simulated(trace, "--arrivals", "closed", "--max-concurrency", "1")
    assert closed["queue_mean"] == 0
    assert closed["mean_batch_images"] == 1
    assert closed["device_busy_share"] == pytest.approx(1)


def test_kinds_of_requests_at_made_up_times() -> None:
    kinds = str(ROOT / "traces" / "kinds.json")
    values = simulated(kinds, "--arrivals", "poisson", "--request-rate", "5", "--limit", "60")
    assert values["completed_requests"] == 60
    assert set(values["size_classes"]) == {"128x128", "192x192", "256x256"}
    assert values == simulated(kinds, "--arrivals", "poisson", "--request-rate", "5", "--limit", "60")
    assert values != simulated(kinds, *("--arrivals", "bursty", "--request-rate", "5", "--limit", "60"))


def test_the_table_is_for_people(trace: str) -> None:
    result = replay(trace, "--simulate", "--tflops", "0.01")
    assert "latency, p95" in result.stdout
    assert "by size" in result.stdout
    assert "0.01 TFLOP/s, as given" in result.stdout


def test_faulty_lines_are_told_with_their_line_and_count(trace: str) -> None:
    with open(trace, "a") as file:
        file.write('{"timestamp": 1, "prompt": "x", "size": "65x64"}\n{"timestamp": "soon", "prompt": "x"}\n')
    result = replay(trace, "--simulate", "--tflops", "1", code=3)
    assert f"{trace}:8: timestamp=soon: must be seconds" in result.stderr
    assert f"{trace}:7: width=65: width must be a multiple of 16" in result.stderr
    assert "faulty lines   2" in result.stdout
    assert simulated(trace, "--on-bad-size", "round", code=3)["completed_requests"] == 7


def test_a_cost_record_of_another_machine(trace: str, tmp_path: Path) -> None:
    record = {
        **{"model": "m", "device": "NVIDIA H200", "dtype": "bfloat16", "quantization": "none"},
        **{"fixed_s": 1.0, "token_s": 0, "square_s": 0, "image_s": 0, "pixel_s": 0, "prompt_s": 0},
        **{"max_num_batched_tokens": 4000, "budget_was_given": False, "num_steps": 9, "num_images": 3},
        **{"seconds": 9.0, "measured_at": 0, "version": "0"},
    }
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    result = replay(trace, "--simulate", "--cost", str(path), "--json")
    values = json.loads(result.stdout)
    assert "NVIDIA H200" in values["facts"]["simulated by"]
    assert values["latency_p50"] >= 3  # three steps of a second
    path.write_text("{}")
    assert "is no cost record" in replay(trace, "--simulate", "--cost", str(path), code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--arrivals", "poisson"], "needs --request-rate"),
        (["--request-rate", "1"], "says nothing with --arrivals trace"),
        (["--tflops", "1"], "--tflops is for --simulate"),
        (["--replicas", "2"], "--replicas is for --simulate"),
        (["--window", "5:1"], "ends before it begins"),
        (["--window", "noon"], "not of the form START:END"),
        (["--window", "50:60", "--simulate"], "nothing arrives within --window"),
    ],
)
def test_what_makes_no_sense_is_refused(trace: str, arguments: list[str], problem: str) -> None:
    assert problem in replay(trace, *arguments, code=2).stderr


def test_a_manifest_without_times_asks_for_some(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("an owl\na fox\n")
    assert "--arrivals closed" in replay(str(path), "--simulate", code=2).stderr
    assert simulated(str(path), "--arrivals", "closed")["completed_requests"] == 2


def test_the_shipped_modes_are_five_and_their_policies() -> None:
    arguments = (str(ROOT / "traces" / "traffic.jsonl"), "--compare", str(ROOT / "traces" / "modes.yaml"))
    runs = simulated(*arguments)["runs"]
    assert len(runs) == 9
    assert {numbers["completed_requests"] for numbers in runs.values()} == {24}
