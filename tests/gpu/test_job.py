"""A whole job on a GPU: mixed rows, interrupted once, equal to each row drawn alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from offline_diffusion.config import make_job_config
from offline_diffusion.data.verify import verify
from offline_diffusion.engine.engine import Engine
from offline_diffusion.job import Progress, StopFlag, run_task

pytestmark = pytest.mark.gpu

ROWS = [
    {
        "id": f"r{index}",
        "prompt": "a lantern " * (1 + index % 5),
        "height": [256, 512, 320, 768][index % 4],
        "width": [256, 384, 640, 512][index % 3],
        "num_inference_steps": 2 + index % 4,
        "true_cfg_scale": [4.0, 1.0, 7.5][index % 3],
        "negative_prompt": [None, " ", "grey"][index % 3],
        "seed": index * 977,
    }
    for index in range(24)
]


def _run(folder: Path, model: Any, stop: StopFlag | None = None, **options: Any) -> Any:
    manifest = folder.parent / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    config = make_job_config(
        {"model": "tiny", "manifests": [str(manifest)], "out": folder, "shard_size": 10, **options}
    )

    def stop_soon(progress: Progress) -> None:
        if stop is not None and progress.num_done >= 5 and not stop.requests:
            stop.request("test")
            stop.request("test")

    return run_task(config, observer=stop_soon, stop=stop, make_engine=lambda c, _: Engine(model, c))


def _pixels(folder: Path) -> dict[str, str]:
    table = pq.ParquetDataset(folder / "images").read(["id", "sha256"])
    return dict(zip(table["id"].to_pylist(), table["sha256"].to_pylist(), strict=True))


def test_interrupted_packed_job_equals_rows_alone(gpu_model: Any, tmp_path: Path) -> None:
    packed, alone = tmp_path / "packed", tmp_path / "alone"
    first = _run(packed, gpu_model, StopFlag(), max_num_seqs=6)
    assert first.interrupted
    assert 0 < first.num_ok < len(ROWS)
    second = _run(packed, gpu_model, max_num_seqs=6)
    assert (second.num_ok, second.interrupted) == (len(ROWS), False)
    _run(alone, gpu_model, max_num_seqs=1)
    assert not verify(packed).problems
    pixels = _pixels(packed)
    assert len(pixels) == len(ROWS)
    assert len(set(pixels.values())) == len(ROWS)
    assert pixels == _pixels(alone)
