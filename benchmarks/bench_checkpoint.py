"""What step checkpoints cost: a full pack with one after every step against the same pack without any.

    python benchmarks/bench_checkpoint.py                              # the full-size model on a GPU
    python benchmarks/bench_checkpoint.py --device cpu --model tiny    # to try it; no number means anything

Windows of steps with and without checkpoints take turns. Their difference, over the checkpoints that were
written, is what one costs; over the interval of a job that is its share of the throughput. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from clock import Clock
from ours import make_engine
from records import portable_command
from subject import Subject
from workloads import like, make_workloads

from offline_diffusion.config import JobConfig
from offline_diffusion.data.layout import SCRATCH, Shard
from offline_diffusion.data.step_checkpoint import StepFiles, step_paths
from offline_diffusion.engine.engine import Engine

INTERVAL_S = JobConfig.model_fields["checkpoint_interval"].default
MANY_STEPS = 1_000
"""Of each request, so that none is ever done."""

TINY_SCALE = 4
SHARD = Shard(0, 0, 100_000)


class Checkpoints:
    """Written one at a time in a thread, as a job does it.

    Args:
        engine: Whose requests.
        folder: Where.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        (folder / SCRATCH).mkdir(parents=True)
        self._engine, self._files = engine, StepFiles(folder, "benchmark")
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[float] | None = None
        self.host_s: list[float] = []
        self.write_s: list[float] = []

    def take(self) -> None:
        """One more, unless the last is still being written."""
        if self._writing is not None and not self._writing.done():
            return
        self.wait()
        start = time.perf_counter()
        snapshot = self._engine.snapshot()
        self.host_s.append(time.perf_counter() - start)

        def write() -> float:
            begun = time.perf_counter()
            states = enumerate(snapshot.states().values())
            self._files.write(SHARD, 0, {(row, 0): ("benchmark", state) for row, state in states})
            return time.perf_counter() - begun

        self._writing = self._thread.submit(write)

    def wait(self) -> None:
        """Until the last is written."""
        if self._writing is not None:
            self.write_s.append(self._writing.result())
            self._writing = None

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in step_paths(self._files.folder, SHARD.stem))


def fill(engine: Engine, workload: str, scale: int) -> int:
    """A full pack of requests that never end, and ten steps to warm up; how many they are."""
    images = make_workloads(MANY_STEPS, scale=scale)[workload].requests
    for request in like(images, "checkpoint", count=256, steps=MANY_STEPS):
        engine.add_request(request)
    engine.step()
    for entry in list(engine.scheduler.waiting):
        engine.abort(entry.request_id)
    for _ in range(10):
        engine.step()
    return engine.num_running


def window(engine: Engine, clock: Clock, num_steps: int, checkpoints: Checkpoints | None) -> float:
    """Seconds of some steps."""
    clock.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
        if checkpoints is not None:
            checkpoints.take()
    clock.synchronize()
    seconds = time.perf_counter() - start
    if checkpoints is not None:
        checkpoints.wait()
    return seconds


def measure(engine: Engine, clock: Clock, folder: Path, rounds: int, num_steps: int) -> dict[str, Any]:
    checkpoints = Checkpoints(engine, folder)
    window(engine, clock, 2, checkpoints)  # the first takes memory
    plain, costs = [], []
    for number in range(rounds):
        seconds = {}
        before = len(checkpoints.host_s)
        for with_checkpoints in (False, True) if number % 2 else (True, False):
            seconds[with_checkpoints] = window(
                engine, clock, num_steps, checkpoints if with_checkpoints else None
            )
        plain.append(seconds[False] / num_steps)
        costs.append((seconds[True] - seconds[False]) / (len(checkpoints.host_s) - before))
    cost_s = statistics.median(costs)
    return {
        "step_s": statistics.median(plain),
        "num_checkpoints": len(checkpoints.host_s),
        "checkpoint_mib": checkpoints.num_bytes / 2**20,
        "host_ms": 1000 * statistics.median(checkpoints.host_s),
        "write_ms": 1000 * statistics.median(checkpoints.write_s),
        "cost_ms": 1000 * cost_s,
        "cost_ms_lowest": 1000 * min(costs),
        "cost_ms_highest": 1000 * max(costs),
        "interval_s": INTERVAL_S,
        "share_of_throughput": cost_s / INTERVAL_S,
        "share_of_throughput_highest": max(costs) / INTERVAL_S,
    }


@torch.inference_mode()
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=60, help="transformer blocks of the full model")
    parser.add_argument("--workloads", nargs="*", default=["512", "1024"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="steps of a window")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; a temporary one")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    subject = Subject(args.model, device, args.layers, "auto")
    clock = Clock(device)
    name = torch.cuda.get_device_name(device) if clock.on_gpu else platform.machine()
    header = {
        "hardware": name,
        "torch": torch.__version__,
        "command": portable_command(sys.argv[0], arguments),
    }
    print(json.dumps(header))
    print("ceiling: a checkpoint that costs nothing")
    records = []
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        for number, workload in zip(itertools.count(), args.workloads, strict=False):
            engine = make_engine(subject.model, device=args.device)
            num_images = fill(engine, workload, TINY_SCALE if args.model == "tiny" else 1)
            found = measure(engine, clock, Path(temporary) / str(number), args.rounds, args.steps)
            record = {"workload": workload, "images_in_flight": num_images, **found}
            records.append(record)
            print(
                "  ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in record.items()
                ),
                flush=True,
            )
            del engine
    print(json.dumps({**header, "records": records}))


if __name__ == "__main__":
    main(sys.argv[1:])
