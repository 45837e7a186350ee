"""A mixed manifest through the whole job, against diffusers' pipeline and plain readers of the dataset."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from job_fakes import SMALL, Runner, contents, decode, pixels_by_key, read_schema, read_table, write_jsonl
from resume_fakes import stop_at

from offline_diffusion.data.verify import verify
from offline_diffusion.job import JobSummary, StopFlag

JOB_SEED = 11
LONG = " ".join(f"a {colour} cup on a table," for colour in ("red", "green", "blue", "grey") * 60)

ROWS: list[dict[str, Any]] = [
    {"prompt": "a red cup"},
    {"id": "wide", "prompt": "a wide sea", "height": 32, "width": 80, "num_inference_steps": 5},
    {
        "id": "tall",
        "prompt": "a tower",
        "height": 80,
        "width": 32,
        "seed": 2**64 - 1,
        "num_images_per_prompt": 3,
    },
    {"id": "cfg", "prompt": "a boat", "true_cfg_scale": 7.5, "negative_prompt": "grey", "seed": 2**63},
    {"id": "cfg-blank", "prompt": "a boat", "true_cfg_scale": 2.0, "negative_prompt": " ", "seed": 7},
    {"id": "cfg-empty", "prompt": "a boat", "true_cfg_scale": 4.0, "negative_prompt": "", "seed": 7},
    {"id": "cfg-one", "prompt": "a boat", "true_cfg_scale": 1.0, "negative_prompt": "grey", "seed": 7},
    {"id": "cfg-zero", "prompt": "a boat", "true_cfg_scale": 0, "negative_prompt": "grey", "seed": 7},
    {"id": 9007199254740993, "prompt": "e", "seed": 9007199254740993, "num_inference_steps": 3},
    {
        "id": "long",
        "prompt": LONG,
        "height": 64,
        "width": 48,
        "negative_prompt": LONG,
        "num_inference_steps": 4,
    },
    {"id": "ünï/../😀", "prompt": "ein rotes Haus\n茶杯 😀", "height": 96, "width": 16, "seed": 0},
    {"prompt": "two of these", "num_images_per_prompt": 2, "num_inference_steps": 8},
]
NESTED = {"a": [1, None, 2**60], "b": {"c": "ü", "d": None}}
for number, values in enumerate(ROWS):
    values |= {
        "tag": f"t{number}",
        "weight": 0.5 if number % 2 else None,
        "nested": NESTED,
        "image": "mine.png",
    }
    values.setdefault("height", 48)
    values.setdefault("width", 64)
    values.setdefault("num_inference_steps", 2)

NUM_IMAGES = 15


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("manifest") / "mixed.jsonl", ROWS)


@pytest.fixture(scope="module")
def job(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, JobSummary]:
    out = tmp_path_factory.mktemp("job") / "out"
    return out, Runner().run(manifest, out, seed=JOB_SEED, shard_size=5, max_num_seqs=5)


def ids() -> list[str]:
    return [str(row.get("id", f"{number:08d}")) for number, row in enumerate(ROWS)]


def expected_seed(number: int, image_index: int) -> int:
    """As documented: BLAKE2b over job seed and id; image k has the row's seed plus k, modulo 2**64."""
    digest = hashlib.blake2b(f"{JOB_SEED}:{ids()[number]}".encode(), digest_size=8).digest()
    return (ROWS[number].get("seed", int.from_bytes(digest, "little")) + image_index) % 2**64


def test_summary_and_soundness(job: tuple[Path, JobSummary]) -> None:
    out, summary = job
    assert (summary.num_rows, summary.num_images, summary.num_ok, summary.num_failed) == (12, 15, 15, 0)
    assert (summary.num_quarantined_rows, summary.num_resumed, summary.num_shards) == (0, 0, 3)
    assert (summary.interrupted, summary.out) == (False, out)
    assert summary.images_per_s == pytest.approx(NUM_IMAGES / summary.seconds, rel=0.5)
    assert verify(out).problems == []
    assert not (out / "failures").exists()


def test_warnings_have_counts(job: tuple[Path, JobSummary]) -> None:
    # Guidance is on by default in the family, and off in rows without a negative prompt.
    off = sum(row.get("num_images_per_prompt", 1) for row in ROWS if "negative_prompt" not in row)
    truncated, guidance = sorted(job[1].warnings)
    assert truncated.startswith("1 image: the prompt is longer than a text encoder reads and was cut")
    assert guidance.startswith(f"{off} images: true_cfg_scale > 1 without a negative_prompt")


def test_images_are_in_manifest_order_with_what_was_asked(job: tuple[Path, JobSummary]) -> None:
    found = iter(read_table(job[0], "images"))
    for number, row in enumerate(ROWS):
        for image_index in range(row.get("num_images_per_prompt", 1)):
            image = next(found)
            assert (image["id"], image["row"], image["image_index"]) == (ids()[number], number, image_index)
            assert (image["prompt"], image["negative_prompt"]) == (row["prompt"], row.get("negative_prompt"))
            assert (image["height"], image["width"]) == (row["height"], row["width"])
            assert image["num_inference_steps"] == row["num_inference_steps"]
            assert image["true_cfg_scale"] == row.get("true_cfg_scale", 4.0)
            assert image["seed"] == expected_seed(number, image_index)
            assert (image["tag"], image["weight"], image["nested"]) == (row["tag"], row["weight"], NESTED)
            assert decode(image["image"]).shape == (row["height"], row["width"], 3)
    assert next(found, None) is None


def test_a_carried_column_with_one_of_our_names_is_kept(job: tuple[Path, JobSummary]) -> None:
    ours = {"image"}
    renamed = [name for name in read_schema(job[0], "images").names if "image" in name and name not in ours]
    (name,) = (name for name in renamed if name != "image_index")
    assert {row[name] for row in read_table(job[0], "images")} == {"mine.png"}


def test_pixels_are_those_of_the_pipeline_given_each_row_alone(
    job: tuple[Path, JobSummary], tiny_pipeline: Any
) -> None:
    for image in read_table(job[0], "images"):
        pixels = tiny_pipeline(
            prompt=image["prompt"],
            negative_prompt=image["negative_prompt"],
            true_cfg_scale=image["true_cfg_scale"],
            height=image["height"],
            width=image["width"],
            num_inference_steps=image["num_inference_steps"],
            generator=torch.Generator("cpu").manual_seed(image["seed"]),
            output_type="pil",
        ).images[0]
        apart = np.abs(np.asarray(pixels).astype(int) - decode(image["image"]).astype(int)).max()
        assert apart <= 1, (image["id"], image["image_index"])
        assert np.asarray(pixels).std() > 1, "a flat picture would be equal to any other"


def test_sha256_is_of_the_decoded_pixels_and_all_pictures_differ(job: tuple[Path, JobSummary]) -> None:
    pixels = pixels_by_key(job[0])
    # guidance 1 and 0 are both off: the same picture; all others differ
    assert pixels["cfg-one", 0] == pixels["cfg-zero", 0]
    assert len(set(pixels.values())) == NUM_IMAGES - 1


def test_metrics(job: tuple[Path, JobSummary]) -> None:
    metrics = read_table(job[0], "metrics")
    images = read_table(job[0], "images")
    keys = [(row["id"], row["row"], row["image_index"]) for row in metrics]
    assert keys == [(row["id"], row["row"], row["image_index"]) for row in images]
    for image, row in zip(images, metrics, strict=True):
        assert (row["status"], row["error_type"], row["error"], row["attempts"]) == ("ok", None, None, 1)
        active = image["true_cfg_scale"] > 1 and image["negative_prompt"] is not None
        assert row["cfg_active"] is active
        assert row["steps_run"] == image["num_inference_steps"]
        image_tokens = image["height"] * image["width"] // 16**2
        if not active:
            assert row["num_tokens"] == image_tokens + row["prompt_tokens"]
        else:
            assert row["num_tokens"] > 2 * image_tokens + row["prompt_tokens"]
        assert (row["truncated_tokens"] > 0) is (image["id"] == "long")
        assert (row["requested_height"], row["requested_width"]) == (image["height"], image["width"])
        assert 1 <= row["mean_batch_seqs"] <= 10
        parts = row["queue_s"] + row["denoise_s"] + row["decode_s"]
        assert min(row[name] for name in ("queue_s", "encode_s", "device_s", "decode_s", "write_s")) >= 0
        assert row["device_s"] <= row["denoise_s"] <= parts <= row["total_s"] * 1.01 + 0.01
        assert (row["task"], row["worker"].count(":")) == (0, 2)
    (long,) = (row for row in metrics if row["id"] == "long")
    assert long["prompt_tokens"] == 512


def test_opens_with_datasets(job: tuple[Path, JobSummary]) -> None:
    images = datasets.load_dataset(str(job[0]), "images", split="train")
    assert images.features["image"] == datasets.Image()
    assert images.features["seed"] == datasets.Value("uint64")
    assert len(images) == NUM_IMAGES
    assert images[2]["image"].size == (32, 80)
    assert images[2]["seed"] == 2**64 - 1
    assert images[3]["nested"] == NESTED
    metrics = datasets.load_dataset(str(job[0]), "metrics", split="train")
    assert set(metrics["status"]) == {"ok"}
    assert datasets.load_dataset(str(job[0]), split="train").features["image"] == datasets.Image()


def test_datasets_does_not_mix_up_folders_or_states(tmp_path: Path) -> None:
    """``datasets`` caches by the folder's last name; an earlier state or another job must not come back."""

    def run(folder: str, count: int) -> list[str]:
        out = tmp_path / folder / "out"
        out.parent.mkdir(exist_ok=True)
        rows = [{"id": f"{folder}{n}", "prompt": "a cup"} for n in range(count)]
        manifest = write_jsonl(out.parent / "m.jsonl", rows)
        Runner().run(manifest, out, allow_manifest_change=True, **SMALL)
        return list(datasets.load_dataset(str(out), "images", split="train")["id"])

    assert run("a", 2) == ["a0", "a1"]
    assert run("b", 2) == ["b0", "b1"]
    assert run("b", 3) == ["b0", "b1", "b2"]


def test_the_card_speaks_of_the_finished_dataset(job: tuple[Path, JobSummary]) -> None:
    card = (job[0] / "README.md").read_text(encoding="utf-8")
    assert "| images | 15 |" in card
    assert "| shards done | 3 of 3 |" in card
    assert "not finished" not in card


def test_other_shards_and_packs_draw_the_same(
    manifest: Path, job: tuple[Path, JobSummary], tmp_path: Path
) -> None:
    Runner().run(manifest, tmp_path, seed=JOB_SEED, shard_size=500, max_num_seqs=1, scheduling_policy="fifo")
    assert contents(tmp_path) == contents(job[0])


def test_a_task_helps_the_others_and_they_find_nothing_left(
    manifest: Path, job: tuple[Path, JobSummary], tmp_path: Path
) -> None:
    options = {"seed": JOB_SEED, "shard_size": 2, "max_num_seqs": 5, "num_tasks": 3}
    first, *others = [Runner() for _ in range(3)]
    summary = first.run(manifest, tmp_path, task_index=2, **options)
    assert (summary.num_ok, summary.num_images, summary.num_resumed) == (NUM_IMAGES, NUM_IMAGES, 0)
    assert (summary.num_rows, summary.num_shards, summary.interrupted) == (len(ROWS), 6, False)
    assert sum(first.finished.values()) == NUM_IMAGES
    later = [runner.run(manifest, tmp_path, task_index=task, **options) for task, runner in enumerate(others)]
    assert [runner.engine for runner in others] == [None, None]
    for summary in later:  # each tells of its own share
        assert summary.num_ok == summary.num_resumed == summary.num_images > 0
        assert 0 < summary.num_shards < 6
    assert verify(tmp_path).problems == []
    assert contents(tmp_path) == contents(job[0])
    assert not list((tmp_path / "_state" / "claims").iterdir())


def test_the_number_of_tasks_may_change_from_start_to_start(
    manifest: Path, job: tuple[Path, JobSummary], tmp_path: Path
) -> None:
    """Each stops early and lets go of what it had begun; the next is one of another number."""
    options = {"seed": JOB_SEED, "shard_size": 2, "max_num_seqs": 1, "scheduling_policy": "fifo"}
    for num_tasks, task in ((3, 2), (3, 0), (2, 1)):
        stop, runner = StopFlag(), Runner()
        runner.on_step = stop_at(stop, 2)
        assert runner.run(
            manifest, tmp_path, stop=stop, num_tasks=num_tasks, task_index=task, **options
        ).interrupted
    last = Runner().run(manifest, tmp_path, num_tasks=4, task_index=3, **options)
    assert not last.interrupted
    assert verify(tmp_path).pending == verify(tmp_path).problems == []
    assert contents(tmp_path) == contents(job[0])
    assert {row["task"] for row in read_table(tmp_path, "metrics")} == {0, 1, 2, 3}


def test_request_mode_draws_the_same(manifest: Path, job: tuple[Path, JobSummary], tmp_path: Path) -> None:
    Runner().run(manifest, tmp_path, seed=JOB_SEED, step_execution=False, request_batch_max_wait_ms=2)
    assert contents(tmp_path) == contents(job[0])


@pytest.mark.parametrize("image_format", ["jpeg", "webp"])
def test_other_formats(manifest: Path, tmp_path: Path, image_format: str) -> None:
    Runner().run(manifest, tmp_path, limit=2, image_format=image_format)
    pixels_by_key(tmp_path)
    magic = {"jpeg": b"\xff\xd8\xff", "webp": b"RIFF"}[image_format]
    images = read_table(tmp_path, "images")
    assert len(images) == 2
    assert all(row["image"]["bytes"].startswith(magic) for row in images)
    loaded = datasets.load_dataset(str(tmp_path), "images", split="train")
    assert loaded[0]["image"].size == (64, 48)
