"""Makes an output folder as a job of many rows leaves it, without drawing every image."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq

from offline_diffusion.config import make_job_config
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.schemas import METRICS_SCHEMA, images_schema
from offline_diffusion.job import JobSummary, run_task

SIDE = 16


def write_big_jsonl(path: Path, num_rows: int) -> Path:
    """Rows of unlike sizes and steps with a carried column; about 160 bytes each."""
    with path.open("w", encoding="utf-8") as stream:
        for start in range(0, num_rows, 10_000):
            stream.writelines(
                f'{{"id": "r{n}", "prompt": "a red cup on a wooden table, view {n}", "seed": {n}, '
                f'"height": {256 + 64 * (n % 9)}, "width": {256 + 64 * (n % 7)}, '
                f'"num_inference_steps": {20 + n % 10}, "tag": "t{n % 100}"}}\n'
                for n in range(start, min(start + 10_000, num_rows))
            )
    return path


def run_without_model(manifest: Path, out: Path, **options: Any) -> JobSummary:
    """Runs a job that must not need the model."""

    def make_engine(*_: object) -> NoReturn:
        raise AssertionError("the model is loaded")

    config = make_job_config({"model": "tiny", "manifests": [str(manifest)], "out": out, **options})
    return run_task(config, make_engine=make_engine)


def publish(out: Path, shards: slice) -> None:
    """Publishes some shards: the tables of one stand-in image a row, and a marker."""
    ledger = Ledger(out)
    image_schema = images_schema(ledger.job.identity.carried_schema)
    data, sha256 = _picture()
    for shard in ledger.shards[shards]:
        rows = np.arange(shard.start, shard.stop)
        count = len(rows)
        known = {
            "row": pa.array(rows),
            "id": pa.array([f"r{row}" for row in rows]),
            "image_index": pa.array(np.zeros(count, np.int32)),
            "status": pa.array(["ok"] * count),
            "task": pa.array(np.zeros(count, np.int32)),
            "worker": pa.array(["test"] * count),
            "finished_at": pa.array(np.zeros(count, np.int64)).cast(pa.timestamp("us", tz="UTC")),
            "width": pa.array(np.full(count, SIDE, np.int32)),
            "height": pa.array(np.full(count, SIDE, np.int32)),
            "sha256": pa.array([sha256] * count),
            "image": pa.array([{"bytes": data, "path": f"{row}.png"} for row in rows]),
        }
        files = []
        for table, schema in (("images", image_schema), ("metrics", METRICS_SCHEMA)):
            columns = [known.get(field.name, pa.nulls(count, field.type)) for field in schema]
            path = out / table / f"{shard.stem}.parquet"
            pq.write_table(pa.Table.from_arrays(columns, schema=schema), path)
            entry = {"path": f"{table}/{path.name}", "num_rows": count, "num_bytes": path.stat().st_size}
            files.append(entry | {"sha256": None})
        marker = {
            "shard": shard.index, "start": shard.start, "stop": shard.stop, "num_ok": count, "num_failed": 0,
            "num_invalid_rows": 0, "files": files, "task": 0, "worker": "test", "finished_at": "",
        }  # fmt: skip
        ledger.marker_path(shard).write_text(json.dumps(marker), encoding="utf-8")


def _picture() -> tuple[bytes, str]:
    pixels = np.full((SIDE, SIDE, 3), 128, np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue(), hashlib.sha256(pixels.tobytes()).hexdigest()
