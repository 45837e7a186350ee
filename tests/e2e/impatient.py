"""``offdiff`` that takes a worker for dead after seconds of silence: ``impatient.py SECONDS ARGUMENT...``.

So do the workers that it starts, and after as long it kills one that is of no use any more.
"""

from __future__ import annotations

import sys

WORKER = "worker"


def main() -> None:
    from offline_diffusion.cli.main import main as offdiff
    from offline_diffusion.data import heartbeat, sink
    from offline_diffusion.launch import local, worker

    seconds = sys.argv.pop(1)
    heartbeat.STALE_S, sink.INTERVAL_S, local.PATIENCE_S = float(seconds), 0.2, float(seconds)
    command = [sys.executable, __file__, seconds, WORKER]
    local.Supervisor.__init__.__kwdefaults__["command"] = lambda: command  # type: ignore[index]
    if sys.argv[1:] == [WORKER]:
        worker.main()
    else:
        offdiff()


if __name__ == "__main__":
    main()
