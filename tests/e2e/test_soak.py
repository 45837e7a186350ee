"""Thousands of images through the whole command: its memory does not grow with them.

By hand over 20,000 images, see `benchmarks/LOG.md`.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
from job_fakes import write_jsonl
from processes import Process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_IMAGES, WARM_UP = 10_000, 5_000
"""Until then allocators, pools of threads and caches fill up: about 30 MB."""

MAX_SLOPE = 4.0
"""MB for each 1,000 images. It was -0.7 to 1.8, over 20,000 images -0.1; with every output kept 11.5."""


def test_memory_is_flat_over_thousands_of_images(tiny_model: Path, tmp_path: Path) -> None:
    rows = ({"prompt": f"a red cup on a table, view {n}", "seed": n} for n in range(NUM_IMAGES))
    manifest = write_jsonl(tmp_path / "m.jsonl", rows)
    smallest = ("--model=tiny", "--height=16", "--width=16", "--num-inference-steps=1")
    process = Process("run", manifest, "--out", tmp_path / "out", *smallest)
    samples = [sample for sample in watch(process) if sample[0] >= WARM_UP]
    assert process.wait() == 0, process.stderr
    images, megabytes = np.array(samples).T
    slope, _ = np.polyfit(images / 1_000, megabytes, 1)
    print(f"{slope:.2f} MB for each 1,000 images, {megabytes.mean():.0f} MB, {len(images)} samples")
    assert slope < MAX_SLOPE


def watch(process: Process) -> list[tuple[int, float]]:
    """Images done, by the last line of progress, and MB in memory, twice a second while images are drawn."""
    samples = []
    process.wait_for_line("running:")
    while match := re.match(r"running: ([\d,]+)/", process.lines[-1]):
        samples.append((int(match[1].replace(",", "")), process.memory()[0] / 1e6))
        time.sleep(0.5)
    return samples
