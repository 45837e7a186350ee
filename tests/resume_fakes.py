"""What tests of resumed and of refused jobs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from job_fakes import SMALL, CountingEngine, Runner, contents, make_rows, pixels_by_key, write_jsonl

from offline_diffusion.data.verify import verify
from offline_diffusion.progress import StopFlag

OPTIONS: dict[str, Any] = {"shard_size": 6, "max_num_seqs": 4, "device": "cpu"} | SMALL


def write_manifest(path: Path) -> Path:
    """20 rows, two of them faulty, one with three images: 20 images."""
    rows = make_rows(20)
    rows[3]["prompt"] = ""
    rows[12]["num_images_per_prompt"] = 3
    rows[14]["seed"] = -1
    for row in rows:
        row["tag"] = f"tag {row['id']}"
    return write_jsonl(path, rows)


def draw_whole(manifest: Path, out: Path) -> Path:
    """The dataset of a run that nothing disturbed."""
    assert Runner().run(manifest, out, **OPTIONS).num_ok == 20
    return out


def same(out: Path, whole: Path) -> None:
    """Both folders hold the same dataset, to the last bit of every pixel."""
    for ours, theirs in zip(contents(out), contents(whole), strict=True):
        assert ours == theirs
    pixels_by_key(out)
    assert verify(out).problems == []
    assert verify(out).pending == []


def stop_at(stop: StopFlag, num_images: int, times: int = 1) -> Any:
    """Asks to stop as soon as the engine has finished ``num_images``."""

    def on_step(engine: CountingEngine) -> None:
        if sum(engine.finished.values()) >= num_images and not stop.requests:
            for _ in range(times):
                stop.request("SIGTERM")

    return on_step
