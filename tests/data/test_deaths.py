import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offline_diffusion.data.deaths import (
    KILLS_TO_ISOLATE,
    MAX_CRASHES,
    MAX_KILLS,
    FlightLog,
    forget_deaths,
    record_death,
    suspicions_of,
)
from offline_diffusion.data.layout import DEATHS, FLIGHTS, SCRATCH

ROWS = range(0, 100)

CHILD = """
import ctypes, faulthandler, os, signal, sys
from pathlib import Path
from offline_diffusion.data.deaths import FlightLog
log = FlightLog(Path(sys.argv[1]), sys.argv[2])
crash_file = open(log.crash_file, "w")
faulthandler.enable(crash_file)
for image in ((1, 0), (2, 0), (3, 1)):
    log.begin(image)
log.end((2, 0))
os.kill(os.getpid(), getattr(signal, sys.argv[3]))
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / SCRATCH).mkdir(parents=True)
    return tmp_path


def die(out: Path, worker: str, *in_flight: tuple[int, int], crash: str = "") -> None:
    """A worker that dies with these images in flight."""
    log = FlightLog(out, worker)
    for image in in_flight:
        log.begin(image)
    if crash:
        log.crash_file.write_text(crash)
    os.close(log._fd)
    record_death(out, worker)


@pytest.mark.parametrize(("name", "is_crash"), [("SIGSEGV", True), ("SIGABRT", True), ("SIGKILL", False)])
def test_a_real_death_leaves_what_was_in_flight(out: Path, name: str, is_crash: bool) -> None:
    command = [sys.executable, "-c", CHILD, str(out), "host:1:ab", name]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert done.returncode == -getattr(signal, name)
    assert record_death(out, "host:1:ab")
    found = suspicions_of(out, ROWS)
    assert set(found) == {(1, 0), (3, 1)}
    for suspicion in found.values():
        assert (suspicion.num_crashes, suspicion.num_kills) == ((1, 0) if is_crash else (0, 1))
        assert ("Fatal Python error" in suspicion.cause) == is_crash
        assert suspicion.isolate == is_crash
    assert not list((out / FLIGHTS).iterdir())


def test_a_worker_that_ends_alive_leaves_nothing(out: Path) -> None:
    log = FlightLog(out, "w")
    log.begin((1, 0))
    log.crash_file.touch()
    log.close()
    assert not record_death(out, "w")
    assert not list((out / FLIGHTS).iterdir())
    assert suspicions_of(out, ROWS) == {}


def test_two_crashes_are_the_end_and_only_of_the_image_in_both(out: Path) -> None:
    die(out, "first", (1, 0), (2, 0), crash="Fatal Python error: Aborted")
    assert [suspicion.verdict for suspicion in suspicions_of(out, ROWS).values()] == [None, None]
    die(out, "second", (2, 0), crash="Fatal Python error: Segmentation fault")
    found = suspicions_of(out, ROWS)
    assert found[1, 0].verdict is None
    assert found[2, 0].num_crashes == MAX_CRASHES
    assert "crashed 2 times" in str(found[2, 0].verdict)
    assert "Fatal Python error" in str(found[2, 0].verdict)


def test_kills_in_company_never_set_an_image_aside(out: Path) -> None:
    for number in range(3 * MAX_KILLS):
        die(out, f"w{number}", (1, 0), (2, 0))
    found = suspicions_of(out, ROWS)
    assert found[1, 0].isolate
    assert found[1, 0].verdict is None


def test_kills_of_a_lone_image_do_so_in_the_end(out: Path) -> None:
    for number in range(MAX_KILLS):
        assert suspicions_of(out, ROWS).get((1, 0)) is None or suspicions_of(out, ROWS)[1, 0].verdict is None
        die(out, f"w{number}", (1, 0))
        assert suspicions_of(out, ROWS)[1, 0].isolate == (number + 1 >= KILLS_TO_ISOLATE)
    assert f"killed {MAX_KILLS} times" in str(suspicions_of(out, ROWS)[1, 0].verdict)


def test_a_death_is_counted_once_whoever_reports_it(out: Path) -> None:
    log = FlightLog(out, "w")
    log.begin((1, 0))
    data = log._log.read_bytes()
    assert record_death(out, "w")
    log._log.write_bytes(data)  # another process had read the log before it went
    record_death(out, "w")
    assert suspicions_of(out, ROWS)[1, 0].num_kills == 1


def test_a_torn_line_and_a_damaged_record_are_left_out(out: Path) -> None:
    log = FlightLog(out, "w")
    log.begin((1, 0))
    with open(log._log, "ab") as file:
        file.write(b"+2")
    record_death(out, "w")
    (out / DEATHS / "x.json").write_text("{")
    (out / DEATHS / "y.json").write_text('{"crash": "", "in_flight": 3}')
    assert set(suspicions_of(out, ROWS)) == {(1, 0)}


def test_other_rows_are_not_suspects_and_published_ones_are_forgotten(out: Path) -> None:
    die(out, "a", (1, 0))
    die(out, "b", (1, 0), (200, 0))
    assert set(suspicions_of(out, range(200, 300))) == {(200, 0)}
    forget_deaths(out, published={0}, shard_size=100)
    assert suspicions_of(out, ROWS)[1, 0].num_kills == 1  # the other image of that death may still be wanted
    forget_deaths(out, published={0, 2}, shard_size=100)
    assert not list((out / DEATHS).iterdir())


def test_a_workers_name_cannot_leave_the_folder(out: Path) -> None:
    die(out, "../../x/y:1", (1, 0))
    assert [path.name for path in (out / DEATHS).iterdir()] == [".._.._x_y_1.json"]
