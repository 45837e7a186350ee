"""The known prompt sets go straight in."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from job_fakes import Runner, read_table

from offline_diffusion.data.verify import verify

LIMIT = 6


def run(source: Path, out: Path) -> datasets.Dataset:
    summary = Runner().run(source, out, limit=LIMIT, height=48, width=48, num_inference_steps=2, shard_size=4)
    assert (summary.num_ok, summary.num_quarantined_rows, summary.interrupted) == (LIMIT, 0, False)
    assert verify(out).problems == []
    images = datasets.load_dataset(str(out), "images", split="train")
    assert images.features["image"] == datasets.Image()
    assert [image.size for image in images["image"]] == [(48, 48)] * LIMIT
    assert len(set(images["sha256"])) == LIMIT
    return images


def first_rows(images: datasets.Dataset, *names: str) -> list[dict[str, Any]]:
    return images.select_columns(list(names)).to_list()


def test_parti_prompts(shared: Path, tmp_path: Path) -> None:
    source = shared / "prompts" / "PartiPrompts.tsv"
    with source.open(encoding="utf-8", newline="") as stream:
        theirs = list(csv.DictReader(stream, delimiter="\t"))[:LIMIT]
    images = run(source, tmp_path / "out")
    assert images["prompt"][:] == [row["Prompt"] for row in theirs]
    for name in theirs[0].keys() - {"Prompt"}:
        assert images[name][:] == [row[name] or None for row in theirs], name


def test_geneval(shared: Path, tmp_path: Path) -> None:
    source = shared / "prompts" / "geneval_evaluation_metadata.jsonl"
    theirs = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()[:LIMIT]]
    images = run(source, tmp_path / "out")
    assert images["prompt"][:] == [row["prompt"] for row in theirs]
    assert images["tag"][:] == [row["tag"] for row in theirs]
    for ours, row in zip(read_table(tmp_path / "out", "images"), theirs, strict=True):
        # A key that an object lacks is null: a column has one type.
        kept = [{key: value for key, value in part.items() if value is not None} for part in ours["include"]]
        assert kept == row["include"]


def test_compbench(shared: Path, tmp_path: Path) -> None:
    source = shared / "prompts" / "t2i_compbench_color_val.txt"
    images = run(source, tmp_path / "out")
    assert images["prompt"][:] == source.read_text(encoding="utf-8").split("\n")[:LIMIT]


def test_dpg(shared: Path, tmp_path: Path) -> None:
    source = shared / "prompts" / "dpg"
    files = sorted(source.glob("*.txt"), key=lambda path: path.name)[:LIMIT]
    images = run(source, tmp_path / "out")
    assert images["id"][:] == [path.stem for path in files]
    assert images["prompt"][:] == [path.read_text(encoding="utf-8").rstrip("\n") for path in files]


def test_all_at_once(shared: Path, tmp_path: Path) -> None:
    """Sources of unlike columns are one manifest; rows keep their order and what each had."""
    names = ["t2i_compbench_color_val.txt", "geneval_evaluation_metadata.jsonl", "PartiPrompts.tsv"]
    small = tmp_path / "small"
    small.mkdir()
    for name in names:
        lines = (shared / "prompts" / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (small / name).write_text("".join(lines[:4]), encoding="utf-8", newline="")
    out = tmp_path / "out"
    manifests = [str(small / name) for name in names]
    summary = Runner().run(manifests, out, height=32, width=32, num_inference_steps=2)
    assert (summary.num_ok, summary.num_quarantined_rows) == (11, 0)  # the TSV's first line is its header
    images = datasets.load_dataset(str(out), "images", split="train")
    assert images["row"][:] == list(range(11))
    assert [tag is not None for tag in images["tag"][:]] == [False] * 4 + [True] * 4 + [False] * 3
    assert [value is not None for value in images["Category"][:]] == [False] * 8 + [True] * 3


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json", "txt", "parquet"])
def test_the_same_prompts_in_other_formats_draw_the_same(tmp_path: Path, suffix: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = ["a red cup", "ein grünes Haus", "猫"]
    rows = [{"prompt": prompt} for prompt in prompts]
    texts = {
        "jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "csv": "prompt\n" + "".join(f"{prompt}\n" for prompt in prompts),
        "json": json.dumps(rows),
        "txt": "".join(f"{prompt}\r\n" for prompt in prompts),
    }
    source = tmp_path / f"m.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.table({"prompt": pa.array(prompts, pa.large_string())}), source)
    else:
        source.write_text(texts[suffix], encoding="utf-8", newline="")
    reference = tmp_path / "m2.jsonl"
    reference.write_text(texts["jsonl"], encoding="utf-8")
    options = {"height": 32, "width": 32, "num_inference_steps": 2}
    Runner().run(source, tmp_path / "out", **options)
    Runner().run(reference, tmp_path / "out2", **options)
    assert read_table(tmp_path / "out", "images") == read_table(tmp_path / "out2", "images")
