import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from offline_diffusion.data import deaths
from offline_diffusion.data.deaths import (
    KILLS_TO_ISOLATE,
    MAX_CRASHES,
    MAX_KILLS,
    Flight,
    FlightLog,
    Suspicion,
    forget_deaths,
    record_death,
    suspicions_of,
    sweep_flights,
)
from offline_diffusion.data.heartbeat import Heartbeat, write_heartbeat
from offline_diffusion.data.layout import DEATHS, FLIGHTS, SCRATCH
from offline_diffusion.data.process import ProcessId, this_process
from offline_diffusion.launch.outcome import LastWords, last_words

Image = tuple[int, int]

CHILD = """
import ctypes, faulthandler, os, signal, sys
from pathlib import Path
from offline_diffusion.data.deaths import Flight, FlightLog
log = FlightLog(Path(sys.argv[1]), sys.argv[2])
crash_file = open(log.crash_file, "w")
faulthandler.enable(crash_file)
for row, image_index in ((1, 0), (2, 0), (3, 1)):
    log.begin(Flight(row=row, image_index=image_index, row_hash=f"{row:016x}", number=0))
log.end((2, 0))
os.kill(os.getpid(), getattr(signal, sys.argv[3]))
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / SCRATCH).mkdir(parents=True)
    return tmp_path


def flight(image: Image, *, number: int = 0, step: int = 0) -> Flight:
    return Flight(row=image[0], image_index=image[1], row_hash=f"{image[0]:016x}", number=number, step=step)


def suspects(
    out: Path, rows: range = range(100), *, number: int = 0, steps: dict[Image, int] | None = None
) -> dict[Image, Suspicion]:
    return suspicions_of(out, {row: f"{row:016x}" for row in rows}, number=number, steps=steps)


def die(out: Path, worker: str, *images: Image, crash: str = "", number: int = 0, step: int = 0) -> None:
    """A worker that dies with these images in flight."""
    log = FlightLog(out, worker)
    for image in images:
        log.begin(flight(image, number=number, step=step))
    if crash:
        log.crash_file.write_text(crash)
    os.close(log._fd or 0)
    record_death(out, worker)


@pytest.mark.parametrize(("name", "is_crash"), [("SIGSEGV", True), ("SIGABRT", True), ("SIGKILL", False)])
def test_a_real_death_leaves_what_was_in_flight(out: Path, name: str, is_crash: bool) -> None:
    command = [sys.executable, "-c", CHILD, str(out), "host:1:ab", name]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert done.returncode == -getattr(signal, name)
    assert record_death(out, "host:1:ab")
    found = suspects(out)
    assert set(found) == {(1, 0), (3, 1)}
    for suspicion in found.values():
        assert (suspicion.num_crashes, suspicion.num_kills) == ((1, 0) if is_crash else (0, 1))
        assert ("Fatal Python error" in suspicion.cause) == is_crash
        assert suspicion.isolate == is_crash
    assert not list((out / FLIGHTS).iterdir())


def test_a_worker_that_ends_alive_leaves_nothing(out: Path) -> None:
    log = FlightLog(out, "w")
    log.begin(flight((1, 0)))
    log.crash_file.touch()
    log.close()
    assert not record_death(out, "w")
    assert not list((out / FLIGHTS).iterdir())
    assert suspects(out) == {}


def test_a_crash_without_a_signal_counts_like_one(out: Path) -> None:
    log = FlightLog(out, "host:7:ab")
    log.begin(flight((1, 0)))
    log.end((1, 0))
    log.begin(flight((2, 0)))
    assert log.num_in_flight == 1
    assert log.record_crash("AcceleratorError: lost\nand more")
    log.close()
    assert not list((out / FLIGHTS).iterdir())
    assert {image: found.num_crashes for image, found in suspects(out).items()} == {(2, 0): 1}
    assert suspects(out)[2, 0].cause == "AcceleratorError: lost"


@pytest.mark.parametrize("has_drawn", [True, False])
def test_what_a_life_drew_is_known_when_its_log_is_gone(out: Path, has_drawn: bool) -> None:
    """Whoever takes over a shard of it may be quicker than the one that starts it again."""
    log = FlightLog(out, "host:7:ab")
    log.begin(flight((1, 0)))
    log.end((1, 0), is_drawn=has_drawn)
    log.begin(flight((2, 0)))
    log.record_crash("AcceleratorError: lost")
    assert last_words(out, "host", 7) == LastWords(has_drawn=has_drawn, has_convicted=True)


def test_two_crashes_are_the_end_and_only_of_the_image_in_both(out: Path) -> None:
    die(out, "first", (1, 0), (2, 0), crash="Fatal Python error: Aborted")
    assert [suspicion.verdict for suspicion in suspects(out).values()] == [None, None]
    die(out, "second", (2, 0), crash="Fatal Python error: Segmentation fault")
    found = suspects(out)
    assert found[1, 0].verdict is None
    assert found[2, 0].num_crashes == MAX_CRASHES
    assert "crashed 2 times" in str(found[2, 0].verdict)
    assert "Fatal Python error" in str(found[2, 0].verdict)


def test_kills_in_company_never_set_an_image_aside(out: Path) -> None:
    for number in range(3 * MAX_KILLS):
        die(out, f"w{number}", (1, 0), (2, 0))
    found = suspects(out)
    assert found[1, 0].isolate
    assert found[1, 0].verdict is None


def test_kills_of_a_lone_image_do_so_in_the_end(out: Path) -> None:
    for number in range(MAX_KILLS):
        assert suspects(out).get((1, 0)) is None or suspects(out)[1, 0].verdict is None
        die(out, f"w{number}", (1, 0))
        assert suspects(out)[1, 0].isolate == (number + 1 >= KILLS_TO_ISOLATE)
    assert f"killed {MAX_KILLS} times" in str(suspects(out)[1, 0].verdict)


def test_a_death_is_counted_once_whoever_reports_it(out: Path) -> None:
    log = FlightLog(out, "w")
    log.begin(flight((1, 0)))
    data = log._log.read_bytes()
    assert record_death(out, "w")
    log._log.write_bytes(data)  # another process had read the log before it went
    record_death(out, "w")
    assert suspects(out)[1, 0].num_kills == 1


def test_a_torn_line_and_a_damaged_record_are_left_out(out: Path) -> None:
    log = FlightLog(out, "w")
    log.begin(flight((1, 0)))
    with open(log._log, "ab") as file:
        file.write(b"+2")
    record_death(out, "w")
    (out / DEATHS / "x.json").write_text("{")
    (out / DEATHS / "y.json").write_text('{"crash": "", "in_flight": 3}')
    assert set(suspects(out)) == {(1, 0)}


def test_other_rows_are_not_suspects_and_published_ones_are_forgotten(out: Path) -> None:
    die(out, "a", (1, 0))
    die(out, "b", (1, 0), (200, 0))
    assert set(suspects(out, range(200, 300))) == {(200, 0)}
    forget_deaths(out, published={0: 0}, shard_size=100)
    assert suspects(out)[1, 0].num_kills == 1  # the other image of that death may still be wanted
    forget_deaths(out, published={0: 0, 2: 0}, shard_size=100)
    assert not list((out / DEATHS).iterdir())


def test_a_workers_name_cannot_leave_the_folder(out: Path) -> None:
    die(out, "../../x/y:1", (1, 0))
    assert [path.name for path in (out / DEATHS).iterdir()] == [".._.._x_y_1.json"]


def test_a_record_says_nothing_about_another_manifests_rows(out: Path) -> None:
    """Row numbers alone would name an innocent row after --allow-manifest-change."""
    for worker in "ab":
        die(out, worker, (5, 0), (6, 0), crash="Fatal Python error: Aborted")
    assert set(suspicions_of(out, {5: "of another row", 6: f"{6:016x}"}, number=0)) == {(6, 0)}


def test_a_retry_forgets_the_crashes_before_it_and_keeps_its_own(out: Path) -> None:
    die(out, "first", (1, 0), crash="Fatal Python error: Aborted")
    die(out, "retry", (1, 0), number=1, crash="Fatal Python error: Aborted")
    assert suspects(out, number=1)[1, 0].num_crashes == 1
    forget_deaths(out, published={0: 0}, shard_size=100)  # by another worker, while the retry is under way
    assert [path.name for path in (out / DEATHS).iterdir()] == ["retry.json"]
    forget_deaths(out, published={0: 1}, shard_size=100)
    assert not list((out / DEATHS).iterdir())


def test_kills_count_only_while_an_image_gains_no_step(out: Path) -> None:
    """One that is preempted again and again, but gets on, is neither set aside nor drawn alone."""
    for number in range(2 * MAX_KILLS):
        die(out, f"w{number:02d}", (1, 0), (2, 0), step=number)
        die(out, f"x{number:02d}", (3, 0), step=number)
    found = suspects(out)
    assert [found[image].num_kills for image in ((1, 0), (2, 0), (3, 0))] == [1, 1, 1]
    assert not any(suspicion.isolate or suspicion.verdict for suspicion in found.values())
    assert suspects(out, steps={(3, 0): 2 * MAX_KILLS}).get((3, 0)) is None  # it has come further since
    for number in range(MAX_KILLS - 1):  # now it is stuck
        die(out, f"y{number}", (3, 0), step=2 * MAX_KILLS - 1)
    assert suspects(out)[3, 0].verdict is not None


def test_a_crash_counts_however_far_the_image_came(out: Path) -> None:
    die(out, "a", (1, 0), step=0, crash="Fatal Python error: Aborted")
    die(out, "b", (1, 0), step=7, crash="Fatal Python error: Aborted")
    assert suspects(out, steps={(1, 0): 9})[1, 0].verdict is not None


def test_a_sweep_takes_the_logs_of_the_dead_and_of_those_that_ended(out: Path) -> None:
    here = this_process()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        dead = replace(here, pid=child.pid, started=stat[19])
        child.communicate(b"\n")
    elsewhere = ProcessId(host="far", boot_id="another boot", pid_namespace="pid:[1]", pid=1, started="5")
    for row, (worker, process) in enumerate({"dead:1": dead, "lives:2": here, "far:3": elsewhere}.items()):
        write_heartbeat(out, Heartbeat(task=0, num_tasks=1, worker=worker, process=process))
        FlightLog(out, worker).begin(flight((row, 0)))
    states: tuple[Literal["stopped", "done"], ...] = ("stopped", "done")
    for state in states:
        write_heartbeat(out, Heartbeat(task=0, num_tasks=1, worker=state, state=state, process=dead))
        FlightLog(out, state).begin(flight((9, 0)))
    sweep_flights(out)
    assert sorted(path.name for path in (out / FLIGHTS).iterdir()) == ["far_3.log", "lives_2.log"]
    assert {image: found.num_kills for image, found in suspects(out).items()} == {(0, 0): 1}


def test_where_nothing_can_be_written_nothing_is_said(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint that cannot be left is no reason to end a job; what can be kept is, for who comes next."""
    log = FlightLog(out, "w")
    log.begin(flight((1, 0)))

    def full(path: Path, *_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(deaths, "create_file", full)
        assert not record_death(out, "w")
    assert record_death(out, "w")
    (out / "flat").touch()
    mute = FlightLog(out / "flat", "w")  # a file is where the folder should be
    with mute.catching_crashes(), mute.during(flight((2, 0))):
        pass
    mute.close()
    assert set(suspects(out)) == {(1, 0)}


def test_a_long_life_leaves_a_short_log(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound the log, and what the next run reads, would grow with every image ever drawn."""
    monkeypatch.setattr(deaths, "MAX_LOG_BYTES", 2_000)
    log = FlightLog(out, "w")
    log.begin(flight((7, 0)))  # is in flight all the time
    (path,) = (out / FLIGHTS).glob("*.log")
    longest = 0
    for row in range(10, 1_010):
        log.begin(flight((row, 0)))
        log.end((row, 0))
        longest = max(longest, path.stat().st_size)
    assert 1_500 < longest < 2_200
    assert any(line.startswith("-") for line in path.read_text().splitlines()), "that it has drawn stays told"
    os.close(log._fd or 0)
    assert record_death(out, "w")
    assert set(suspects(out)) == {(7, 0)}


def test_only_an_image_handed_out_counts_as_drawn(out: Path) -> None:
    """Catches a device at fault that is never given up, since each of its lives is handed some images."""
    worker = "here:7:0123abcd"
    log = FlightLog(out, worker)
    with log.during(flight((1, 0))):
        pass
    log.begin(flight((2, 0)))
    log.end((2, 0), is_drawn=False)
    log.begin(flight((3, 0)))
    os.close(log._fd or 0)
    assert last_words(out, "here", 7) == LastWords(has_drawn=False, has_convicted=False)
    log = FlightLog(out, worker)
    log.begin(flight((3, 0)))
    log.end((3, 0))
    os.close(log._fd or 0)
    assert last_words(out, "here", 7).has_drawn
