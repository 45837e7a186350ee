"""A job without an engine: rows, images whose pixels follow from their seed, and helpers to read back."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq

from offline_diffusion.data.job_file import JobIdentity
from offline_diffusion.data.layout import Shard
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.quick_check import find_broken
from offline_diffusion.data.rows import ImageTask, ManifestRow, RowFault
from offline_diffusion.data.sink import Sink
from offline_diffusion.data.verify import verify
from offline_diffusion.request import Request, RequestMetrics, RequestOutput, SamplingParams

CARRIED = pa.schema([("tag", pa.string()), ("weight", pa.float64()), ("scores", pa.list_(pa.int64()))])
HEIGHT, WIDTH = 16, 24


def make_row(
    number: int, *, row_id: str | None = None, text: str | None = None, images: int = 1
) -> ManifestRow:
    row_id = f"{number:08d}" if row_id is None else row_id
    prompt = f"picture {row_id}" if text is None else text
    return ManifestRow(
        row=number,
        id=row_id,
        file="prompts.jsonl",
        line=number + 1,
        content_hash=hashlib.sha256(f"{row_id}|{prompt}|{images}".encode("utf-8", "replace")).hexdigest()[
            :16
        ],
        prompt=prompt,
        params=SamplingParams(num_images_per_prompt=images),
        carried={"tag": f"t{row_id}", "weight": 0.5 if number % 2 else None, "scores": [number, 2**60]},
    )


def make_fault(number: int) -> RowFault:
    return RowFault(
        number, f"{number:08d}", "prompts.jsonl", number + 1, "height", "-5", "must be at least 1", "f" * 16
    )


def make_images(row: ManifestRow) -> list[ImageTask]:
    seed = int.from_bytes(hashlib.sha256(row.id.encode()).digest()[:8], "little")
    tasks = []
    for index in range(row.params.num_images_per_prompt):
        request = Request(
            request_id=f"{row.row}-{index}",
            prompt=row.prompt,
            height=HEIGHT,
            width=WIDTH,
            num_inference_steps=4,
            true_cfg_scale=4.0,
            seed=(seed + index) % 2**64,
            negative_prompt="" if row.row % 3 else None,
        )
        tasks.append(ImageTask(row.row, index, row.id, request, HEIGHT, WIDTH, HEIGHT, WIDTH))
    return tasks


def all_images(rows: list[ManifestRow | RowFault]) -> list[ImageTask]:
    return [image for row in rows if isinstance(row, ManifestRow) for image in make_images(row)]


def make_pixels(image: ImageTask) -> np.ndarray:
    """What the pretended model draws: noise of the seed."""
    shape = (image.request.height, image.request.width, 3)
    return np.random.default_rng(image.request.seed).integers(0, 256, shape, dtype=np.uint8)


def make_output(image: ImageTask, *, error_type: str | None = None) -> RequestOutput:
    metrics = RequestMetrics(
        attempts=1, cfg_active=True, num_tokens=42, steps_run=4, device_s=0.25, total_s=1.5
    )
    if error_type is not None:
        return RequestOutput(image.request, "failed", None, metrics, error_type, f"{error_type} at step 3")
    return RequestOutput(image.request, "ok", make_pixels(image), metrics)


def make_identity(num_rows: int, shard_size: int, **changes: Any) -> JobIdentity:
    values: dict[str, Any] = {
        "model": {"model": "dummy", "revision": None, "config_sha256": "abc"},
        "manifest": {"sha256": "123", "files": [{"path": "prompts.jsonl", "rows": num_rows}]},
        "options": {
            "seed": 0,
            "dtype": "auto",
            "image_format": "png",
            "shard_size": shard_size,
            "limit": None,
        },
        "num_rows": num_rows,
        "shard_size": shard_size,
        "carried_schema": CARRIED,
    }
    return JobIdentity(**(values | changes))


def open_ledger(out: Path, num_rows: int, shard_size: int, **changes: Any) -> Ledger:
    ledger = Ledger(out)
    allow = changes.pop("allow_manifest_change", False)
    ledger.open(make_identity(num_rows, shard_size, **changes), allow_manifest_change=allow)
    return ledger


def make_rows(
    num_rows: int, *, images: int = 1, faults: tuple[int, ...] = ()
) -> list[ManifestRow | RowFault]:
    return [make_fault(n) if n in faults else make_row(n, images=images) for n in range(num_rows)]


def rows_of(rows: list[ManifestRow | RowFault], shard: Shard) -> list[ManifestRow | RowFault]:
    return rows[shard.start : shard.stop]


def run_job(
    ledger: Ledger,
    rows: list[ManifestRow | RowFault],
    *,
    failing: dict[tuple[int, int], str] | None = None,
    retry_failed: bool = False,
    drawn: list[tuple[int, int]] | None = None,
    **sink_options: Any,
) -> None:
    """Runs every unfinished shard as a job would; ``drawn`` collects what had to be made."""
    failing = failing or {}
    find_broken(ledger, ledger.shards)
    with Sink(ledger, num_threads=2, **sink_options) as sink:
        ledger.clear_leftovers(ledger.shards, ledger.leftovers())
        markers = ledger.markers()
        for shard in ledger.shards:
            marker = markers.get(shard.index)
            if marker is not None and not (retry_failed and marker.has_failures):
                continue
            part = rows_of(rows, shard)
            images = all_images(part)
            finished = sink.open_shard(shard, part, retry_failed=retry_failed)
            for image in images:
                key = image.row, image.image_index
                if key in finished:
                    continue
                if drawn is not None:
                    drawn.append(key)
                sink.submit(shard.index, image, make_output(image, error_type=failing.get(key)))
        sink.drain()
    ledger.finish()


def read_table(out: Path, table: str) -> list[dict[str, Any]]:
    """All rows of a table, by plain pyarrow."""
    return [
        row for path in sorted((out / table).glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def decode(data: bytes) -> np.ndarray:
    with PIL.Image.open(io.BytesIO(data)) as image:
        assert image.mode == "RGB"
        return np.array(image)


def contents(out: Path) -> list[tuple[Any, ...]]:
    """What two runs of a job must agree in: everything but times."""
    images = [
        (row["row"], row["image_index"], row["id"], row["prompt"], row["seed"], row["sha256"], row["tag"])
        for row in read_table(out, "images")
    ]
    metrics = [
        (row["row"], row["image_index"], row["id"], row["status"], row["error_type"])
        for row in read_table(out, "metrics")
    ]
    return images + metrics


def check_publication(out: Path, rows: list[ManifestRow | RowFault], num_failed: int) -> None:
    """A folder has every image of its one shard once and as it is drawn, and nothing else."""
    report = verify(out, num_threads=1)
    assert (report.problems, report.pending, report.unmoved) == ([], [], []), out
    wanted = all_images(rows)
    metrics = read_table(out, "metrics")
    keys = [(image.row, image.image_index) for image in wanted]
    assert [(row["row"], row["image_index"]) for row in metrics] == keys, out
    assert sum(row["status"] == "failed" for row in metrics) == num_failed, out
    images = read_table(out, "images")
    expected = {
        (image.row, image.image_index): hashlib.sha256(make_pixels(image).tobytes()).hexdigest()
        for image in wanted
    }
    assert len(images) == len(wanted) - num_failed, out
    assert all(row["sha256"] == expected[row["row"], row["image_index"]] for row in images), out
    for name in ("staged", "tmp"):
        assert list((out / "_state" / name).iterdir()) == [], out
