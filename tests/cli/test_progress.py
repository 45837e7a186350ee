"""The progress display: plain lines and the bar."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest

from offline_diffusion.cli.progress import PlainProgress, TerminalProgress, describe, make_progress, ticking
from offline_diffusion.progress import Progress


def progress(**changes: Any) -> Progress:
    values: dict[str, Any] = {
        "phase": "running", "num_images": 2400, "num_done": 1200, "num_failed": 3, "num_resumed": 0,
        "work_done": 5.0, "work_total": 10.0, "images_per_s": 1.2345, "eta_s": 75.0, "step_fill": 0.876,
        "num_running": 8, "num_waiting": 40, "num_rows_scanned": 1_000_000,
    }  # fmt: skip
    return Progress(**(values | changes))


def test_a_line_says_everything() -> None:
    assert describe(progress()) == (
        "running: 1,200/2,400 images, 1.23 images/s, ETA 1 min 15 s, step fill 88%, 3 failed, "
        "8 running, 40 waiting"
    )
    assert describe(progress(num_resumed=7)).endswith("7 done before")
    assert "ETA unknown" in describe(progress(eta_s=None))
    assert describe(progress(phase="scanning")) == "scanning the manifest: 1,000,000 rows"
    assert describe(progress(phase="loading")) == "loading the model"


def test_plain_lines_come_every_five_seconds_and_at_a_new_phase(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with PlainProgress(lambda: now[0]) as display:
        for second, phase in ((0, "loading"), (1, "running"), (2, "running"), (5.9, "running"),
                              (6, "running"), (6.5, "finishing")):  # fmt: skip
            now[0] = second
            display.update(progress(phase=phase, num_done=int(second)))
        display.say("a note")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "loading the model", "running: 1/2", "running: 6/2", "finishing: 6/2", "a note",
    ]  # fmt: skip


def test_no_terminal_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with make_progress() as display:
        display.update(progress())
    assert isinstance(display, PlainProgress)
    assert "\x1b" not in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_bar_by_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    with TerminalProgress(terminal) as display:
        display.update(progress(phase="scanning"))
        display.update(progress(num_done=1, work_done=9.0))
        display.say("quarantined [bold]row[/bold] 7")
    text = terminal.getvalue()
    assert "90%" in text
    assert "1/2,400 images" in text
    assert "quarantined [bold]row[/bold] 7" in text


def test_ticking_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with ticking(lambda: "7 rows", interval_s=0.01):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert set(lines) == {"7 rows"}
