"""What several workers came to together."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_fakes import SMALL, Runner, make_rows, write_jsonl

from offline_diffusion.data.ledger import Ledger
from offline_diffusion.progress import StopFlag
from offline_diffusion.summary import summary_of_workers


@pytest.mark.parametrize(("is_whole", "interrupted"), [(True, False), (False, True)])
def test_a_stop_interrupts_what_it_left_undone(tmp_path: Path, is_whole: bool, interrupted: bool) -> None:
    """Though the only worker that handed anything in had come to its end: another one died in the stop."""
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(8)), tmp_path / "out"
    runner, stop = Runner(), StopFlag()
    if not is_whole:
        runner.on_step = lambda engine: stop.request("SIGTERM") if engine.finished else None
    runner.run(manifest, out, shard_size=2, max_num_seqs=1, stop=stop, **SMALL)
    part = {"num_ok": 2, "num_failed": 0, "num_resumed": 0, "interrupted": False, "warnings": []}
    assert summary_of_workers(Ledger(out), 8, [part], 1.0, stopped=True).interrupted is interrupted
    assert not summary_of_workers(Ledger(out), 8, [part], 1.0, stopped=False).interrupted
