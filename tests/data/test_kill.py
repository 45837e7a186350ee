"""kill -9 at any moment: the dataset equals an uninterrupted run's. And several tasks at once."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from output_fakes import check_publication, contents, make_rows, open_ledger, read_table, run_job

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
def test_dying_before_any_change_of_the_disk_loses_nothing(root: Path, scenario: str, step: int) -> None:
    last = int(worker("crash", scenario, str(root), str(step)))
    assert last > 40
    expected = contents(root / str(last))
    assert expected
    for number in range(0, last, step):
        out = root / str(number)
        assert contents(out) == expected, number
        report = verify(out, num_threads=1)
        assert report.problems == [], number
        assert report.pending == [], number
        assert list((out / "_state" / "partial").iterdir()) == [], number


def check_publications(root: Path, num_calls: int, num_failed: int) -> None:
    for number in range(num_calls):
        check_publication(root / str(number), make_rows(6), num_failed)


@pytest.mark.parametrize(("kind", "num_failed"), [("first", 2), ("again", 1)])
def test_dying_before_any_step_of_a_publication(root: Path, kind: str, num_failed: int) -> None:
    """Catches a shard that is published before its files are there, a mixture of two publications, and
    surplus files of the older one. A kill leaves the system's memory alone: what is not yet durable when it
    is needed shows in ``test_power_loss.py``."""
    num_calls = int(worker("publish", kind, str(root)))
    assert num_calls > 30
    check_publications(root, num_calls, num_failed)
    for number in range(num_calls):
        assert list((root / str(number) / "_state" / "partial").iterdir()) == [], number


@pytest.mark.parametrize("kind", ["first", "again"])
def test_a_process_frozen_before_any_step_changes_nothing_when_it_comes_late(root: Path, kind: str) -> None:
    """Catches a process that trusts a look at who owns the shard, and anything at a final name that is not
    tied to the folder that whoever publishes later takes away first. The worker compares the checksums."""
    num_calls = int(worker("zombie", kind, str(root)))
    assert num_calls > 30
    check_publications(root, num_calls, 0)


@pytest.mark.parametrize("kind", ["open", "change"])
def test_tasks_that_start_together_agree_on_one_job(root: Path, kind: str) -> None:
    worker("race", kind, str(root), "25")


def test_a_storm_of_kills_changes_nothing(root: Path) -> None:
    kills = 12
    killed = int(worker("storm", str(root), str(kills)))
    assert killed >= 10
    rows = make_rows(120, images=2, faults=(7, 31))
    run_job(open_ledger(root / "whole", 120, 8), rows)
    assert contents(root / "out") == contents(root / "whole")
    assert verify(root / "out", num_threads=1).problems == []
    keys = [(row["row"], row["image_index"]) for row in read_table(root / "out", "images")]
    assert len(keys) == len(set(keys)) == 236
    drawn = Counter((root / "drawn.txt").read_text().splitlines())
    # Only what was in the air at a kill is made again: 4 waiting and the one being handed in.
    assert sum(drawn.values()) - len(drawn) <= killed * 5
