"""What each worker process of the test's cluster does first: it makes the engine slow.

So a job is longer than the time in which a worker's sign of life is seen, however fast the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

PAUSE_S = 0.02
"""After each denoise step."""


def slow_down() -> None:
    from offline_diffusion.engine.engine import Engine
    from offline_diffusion.engine.request_state import RequestState

    count_step = Engine._count_step

    def count_step_slowly(self: Engine, running: Sequence[RequestState], num_seqs: int) -> None:
        count_step(self, running, num_seqs)
        time.sleep(PAUSE_S)

    Engine._count_step = count_step_slowly  # type: ignore[method-assign]
