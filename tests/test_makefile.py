"""The Makefile: what its targets would run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def commands(target: str, venv: Path) -> str:
    """What ``make TARGET`` would run with no environment there yet."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    command = [make, "--dry-run", target, f"VENV={venv}"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("target", "extra"),
    [
        ("quickstart", "."),
        ("test", "'.[test]'"),
        ("test-ray", "'.[ray,test]'"),
        ("lint", "'.[dev]'"),
        ("bench", "'.[gpu]'"),
    ],
)
def test_a_target_installs_what_it_needs(tmp_path: Path, target: str, extra: str) -> None:
    installs = re.findall(r"--editable (\S+)", commands(target, tmp_path / "venv"))
    assert installs == [extra]


@pytest.mark.parametrize("target", ["test", "test-slow", "test-chaos", "test-slurm", "test-ray"])
def test_a_run_that_finds_no_test_fails(tmp_path: Path, target: str) -> None:
    assert "||" not in commands(target, tmp_path / "venv")


def test_the_contributors_page_names_what_ci_runs() -> None:
    lines = re.findall(r"^make ([^#\n]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    targets = [word for line in lines for word in line.split() if not word.startswith(("-", '"$VENV/'))]
    assert set(targets) == {"test", "lint", "test-slow", "test-chaos", "test-slurm", "test-ray"}
    setup = (ROOT / "CONTRIBUTING.md").read_text().partition("| target |")[0]
    words = set(re.findall(r"[a-z-]+", " ".join(re.findall(r"make [a-z -]+", setup))))
    assert set(targets) <= words
