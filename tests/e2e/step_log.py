"""``offdiff`` that notes every step of every image: ``step_log.py LOG ARGUMENT...``.

A line is the monotonic clock's seconds, the request's id and the steps it has done. A pause of
``STEP_PAUSE_S`` seconds follows each step of the engine: a job takes its time on a fast machine, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """A step that was done."""

    at: float
    request_id: str
    step_index: int


def read_steps(log: Path) -> list[Step]:
    """All whole lines of a log."""
    lines = (line.split() for line in log.read_text().splitlines())
    return [Step(float(words[0]), words[1], int(words[2])) for words in lines if len(words) == 3]


def main() -> None:
    from offline_diffusion.cli.main import main as offdiff
    from offline_diffusion.engine.engine import Engine
    from offline_diffusion.engine.request_state import RequestState

    pause_s = float(os.environ.get("STEP_PAUSE_S", "0"))
    log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    count_step = Engine._count_step

    def note_step(self: Engine, running: Sequence[RequestState], num_seqs: int) -> None:
        count_step(self, running, num_seqs)
        now = time.monotonic()
        lines = (f"{now} {state.request.request_id} {state.step_index}\n" for state in running)
        os.write(log, "".join(lines).encode())
        time.sleep(pause_s)

    Engine._count_step = note_step  # type: ignore[method-assign]
    offdiff()


if __name__ == "__main__":
    main()
