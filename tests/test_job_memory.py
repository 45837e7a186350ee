"""A row may ask for thousands of images: memory follows what is being drawn, not what is asked for."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from job_fakes import SMALL, CountingEngine, Runner, make_rows, read_table, write_jsonl

from offline_diffusion.config import JobConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.job import StopFlag
from offline_diffusion.models.registry import Checkpoint

NUM_ROWS, NUM_IMAGES = 20, 3_000
MIB = 2**20


class MeteredRunner(Runner):
    """Stops a job after its third step; ``peak`` is what Python held at most until then, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = StopFlag()
        self.peak = 0
        self.on_step = self._measure

    def make_engine(self, config: JobConfig, checkpoint: Checkpoint) -> Engine:
        engine = super().make_engine(config, checkpoint)
        tracemalloc.start()  # before the first shard is opened
        return engine

    def _measure(self, engine: CountingEngine) -> None:
        if engine.num_steps == 4:
            self.peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            self.stop.request("enough")


def test_images_not_begun_take_no_memory(tmp_path: Path) -> None:
    rows = make_rows(NUM_ROWS, num_images_per_prompt=NUM_IMAGES)
    runner = MeteredRunner()
    manifest = write_jsonl(tmp_path / "m.jsonl", rows)
    summary = runner.run(manifest, tmp_path / "out", stop=runner.stop, **SMALL)
    assert summary.interrupted
    assert summary.num_images == NUM_ROWS * NUM_IMAGES
    assert 0 < runner.peak < 6 * MIB  # all tasks of the shard at once would take over 30


def test_many_images_of_a_row_are_all_drawn_and_resumed(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(2, num_images_per_prompt=150))
    options = SMALL | {"num_inference_steps": 1}
    stop, first = StopFlag(), Runner()
    first.on_step = lambda engine: stop.request("SIGTERM") if engine.num_steps == 5 else None
    first.run(manifest, tmp_path / "out", stop=stop, **options)
    rest = Runner()
    summary = rest.run(manifest, tmp_path / "out", **options)
    assert sum(first.finished.values()) + sum(rest.finished.values()) == summary.num_ok == 300
    images = read_table(tmp_path / "out", "images")
    assert [(image["row"], image["image_index"]) for image in images] == [
        (row, index) for row in range(2) for index in range(150)
    ]
    assert len({image["seed"] for image in images}) == 151  # rows 0 and 1 have seeds 0 and 1
