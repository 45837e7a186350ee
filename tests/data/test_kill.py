"""kill -9 at any moment: the dataset equals an uninterrupted run's. And several tasks at once."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from output_fakes import contents, make_rows, open_ledger, read_table, run_job

from offline_diffusion.data.verify import verify

HERE = Path(__file__).parent


def worker(*arguments: str) -> str:
    script = [sys.executable, "-W", "ignore", str(HERE / "crash_worker.py"), *arguments]
    done = subprocess.run(
        script, capture_output=True, text=True, timeout=240, cwd=HERE.parents[1], env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("scenario", ["fresh", "resume", "retry", "change"])
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_dying_before_any_change_of_the_disk_loses_nothing(tmp_path: Path, scenario: str, step: int) -> None:
    last = int(worker("crash", scenario, str(tmp_path), str(step)))
    assert last > 40
    expected = contents(tmp_path / str(last))
    assert expected
    for number in range(0, last, step):
        out = tmp_path / str(number)
        assert contents(out) == expected, number
        report = verify(out, num_threads=1)
        assert report.problems == [], number
        assert report.pending == [], number
        assert list((out / "_state" / "partial").iterdir()) == [], number


@pytest.mark.parametrize("kind", ["open", "change"])
def test_tasks_that_start_together_agree_on_one_job(tmp_path: Path, kind: str) -> None:
    worker("race", kind, str(tmp_path), "25")


def test_a_storm_of_kills_changes_nothing(tmp_path: Path) -> None:
    kills = 12
    killed = int(worker("storm", str(tmp_path), str(kills)))
    assert killed >= 10
    rows = make_rows(120, images=2, faults=(7, 31))
    run_job(open_ledger(tmp_path / "whole", 120, 8), rows)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert verify(tmp_path / "out", num_threads=1).problems == []
    keys = [(row["row"], row["image_index"]) for row in read_table(tmp_path / "out", "images")]
    assert len(keys) == len(set(keys)) == 236
    drawn = Counter((tmp_path / "drawn.txt").read_text().splitlines())
    # Only what was in the air at a kill is made again: 4 waiting and the one being handed in.
    assert sum(drawn.values()) - len(drawn) <= killed * 5
