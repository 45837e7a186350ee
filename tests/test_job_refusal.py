"""Another job in the same folder is refused; a changed manifest goes on when that is allowed."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from job_fakes import (
    SMALL,
    Rows,
    Runner,
    make_rows,
    read_table,
    write_jsonl,
)
from resume_fakes import OPTIONS, draw_whole, same, stop_at, write_manifest

from offline_diffusion.data.verify import verify
from offline_diffusion.errors import JobError, JobMismatchError
from offline_diffusion.job import StopFlag


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_manifest(tmp_path_factory.mktemp("manifest") / "m.jsonl")


@pytest.fixture(scope="module")
def whole(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_whole(manifest, tmp_path_factory.mktemp("whole") / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 5}, ["options.seed: 0 -> 5"]),
        ({"num_inference_steps": 3}, ["options.num_inference_steps: 2 -> 3"]),
        ({"height": 48, "width": 48}, ["options.height: 32 -> 48", "options.width: 32 -> 48"]),
        ({"negative_prompt": "grey"}, ["options.negative_prompt: null -> grey"]),
        ({"true_cfg_scale": 2.0}, ["options.true_cfg_scale: null -> 2.0"]),
        ({"on_bad_size": "crop"}, ["options.on_bad_size: error -> crop"]),
        ({"image_format": "webp"}, ["options.image_format: png -> webp"]),
        ({"dtype": "bfloat16"}, ["options.dtype: float32 -> bfloat16"]),
        ({"shard_size": 7}, ["options.shard_size: 6 -> 7"]),
        ({"limit": 10}, ["limit: null -> 10", "num_rows: 20 -> 10"]),
        ({"map": {"tag": "negative_prompt"}}, ["tag"]),
    ],
)
def test_other_options_are_refused(
    manifest: Path, whole: Path, change: dict[str, Any], words: list[str]
) -> None:
    runner = Runner()
    with pytest.raises(JobMismatchError) as caught:
        runner.run(manifest, whole, **OPTIONS | change)
    text = str(caught.value)
    assert str(whole) in text
    assert all(word in text for word in words), text
    assert caught.value.hint
    assert runner.engine is None
    assert verify(whole).problems == []


@pytest.mark.parametrize(
    "change", [{"max_num_seqs": 1}, {"scheduling_policy": "fifo"}, {"num_tasks": 2}, {"image_level": 6}]
)
def test_options_that_change_no_pixel_are_taken(manifest: Path, whole: Path, change: dict[str, Any]) -> None:
    runner = Runner()
    assert runner.run(manifest, whole, **OPTIONS | change).num_ok > 0
    assert runner.engine is None


def test_another_quality_of_jpegs_is_refused(tmp_path: Path) -> None:
    """The quality reaches the files and counts as an option that changes pixels; the default has a value."""
    manifest, out = write_jsonl(tmp_path / "m.jsonl", make_rows(1)), tmp_path / "out"
    options = SMALL | {"image_format": "jpeg"}
    Runner().run(manifest, out, **options, image_level=30)
    (row,) = read_table(out, "images")
    reference = io.BytesIO()
    PIL.Image.new("RGB", (8, 8)).save(reference, "JPEG", quality=30)
    with PIL.Image.open(reference) as expected, PIL.Image.open(io.BytesIO(row["image"]["bytes"])) as image:
        assert image.quantization == expected.quantization
    with pytest.raises(JobMismatchError, match="image_level: 30 -> 95"):
        Runner().run(manifest, out, **options)


def test_another_model_is_refused(manifest: Path, whole: Path, tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(tiny_model, other)
    (other / "generation_config.json").write_text('{"true_cfg_scale": 3.0}')
    with pytest.raises(JobMismatchError, match="tiny -> ") as caught:
        Runner().run(manifest, whole, model=str(other), **OPTIONS)
    assert str(other) in str(caught.value)


def test_a_model_whose_configs_changed_is_refused(manifest: Path, tiny_model: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model, model)
    Runner().run(manifest, out, model=str(model), **OPTIONS)
    path = model / "transformer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_layers": 1}))
    with pytest.raises(JobMismatchError, match=r"model\."):
        Runner().run(manifest, out, model=str(model), **OPTIONS)


def test_a_changed_manifest_is_refused(whole: Path, manifest: Path, tmp_path: Path) -> None:
    text = manifest.read_text(encoding="utf-8").replace("view 7", "view 8")
    changed = tmp_path / "m.jsonl"
    changed.write_text(text, encoding="utf-8")
    with pytest.raises(JobMismatchError, match="manifest") as caught:
        Runner().run(changed, whole, **OPTIONS)
    assert "--allow-manifest-change" in str(caught.value.hint)


def test_a_moved_or_touched_manifest_is_the_same(whole: Path, manifest: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.jsonl"
    shutil.copy(manifest, moved)
    runner = Runner()
    assert runner.run(moved, whole, **OPTIONS).num_ok == 20
    assert runner.engine is None


def test_a_folder_of_somebody_else_is_refused(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(JobError, match=r"thesis\.txt") as caught:
        Runner().run(manifest, tmp_path, **OPTIONS)
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


# --- a changed manifest that is allowed --------------------------------------------------------


def changed_rows() -> Rows:
    """Of 18 rows: two deleted, three inserted, two edited, two swapped."""
    rows = make_rows(18)
    del rows[11], rows[2]
    rows.insert(0, {"id": "new-0", "prompt": "a new boat", "seed": 90})
    rows.insert(9, {"id": "new-1", "prompt": "a new sea", "seed": 91})
    rows.append({"id": "new-2", "prompt": "a new tree", "seed": 92})
    rows[5]["prompt"] += " by night"
    rows[7]["seed"] = 1_000
    rows[12], rows[13] = rows[13], rows[12]
    return rows


@pytest.mark.parametrize("finished", [True, False])
def test_a_changed_manifest_keeps_unchanged_rows(tmp_path: Path, finished: bool) -> None:
    out, stop = tmp_path / "out", StopFlag()
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(18))
    first = Runner()
    if not finished:
        first.on_step = stop_at(stop, 9)
    first.run(manifest, out, stop=stop, **OPTIONS)
    write_jsonl(manifest, changed_rows())
    with pytest.raises(JobMismatchError):
        Runner().run(manifest, out, **OPTIONS)
    second = Runner()
    summary = second.run(manifest, out, allow_manifest_change=True, **OPTIONS)
    assert (summary.num_ok, summary.num_images, summary.interrupted) == (19, 19, False)
    unchanged = {row["prompt"] for row in make_rows(18)} & {row["prompt"] for row in changed_rows()}
    unchanged -= {changed_rows()[7]["prompt"]}  # another seed
    expected = {row["prompt"] for row in changed_rows()} - (unchanged & set(first.finished))
    assert set(second.finished) == expected
    if finished:
        assert len(expected) == 5
    Runner().run(manifest, tmp_path / "fresh", **OPTIONS)
    same(out, tmp_path / "fresh")
    assert {row["id"]: row["seed"] for row in read_table(out, "images")} == {
        row["id"]: row["seed"] for row in changed_rows()
    }
    assert Runner().run(manifest, out, **OPTIONS).num_resumed == 19


def test_a_longer_limit_keeps_what_is_there(manifest: Path, whole: Path, tmp_path: Path) -> None:
    first = Runner()
    assert first.run(manifest, tmp_path, limit=8, **OPTIONS).num_rows == 8
    second = Runner()
    summary = second.run(manifest, tmp_path, allow_manifest_change=True, **OPTIONS)
    assert summary.num_ok == 20
    assert not set(first.finished) & set(second.finished)
    same(tmp_path, whole)


def test_a_changed_manifest_excuses_no_other_option(whole: Path, tmp_path: Path) -> None:
    changed = write_jsonl(tmp_path / "m.jsonl", make_rows(3))
    with pytest.raises(JobMismatchError, match=r"options\.seed: 0 -> 1") as caught:
        Runner().run(changed, whole, allow_manifest_change=True, **OPTIONS | {"seed": 1})
    assert "--allow-manifest-change" not in str(caught.value.hint)


def test_a_stopped_change_goes_on(tmp_path: Path) -> None:
    out, stop = tmp_path / "out", StopFlag()
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(18))
    Runner().run(manifest, out, **OPTIONS)
    write_jsonl(manifest, changed_rows())
    cut = Runner()
    cut.on_step = stop_at(stop, 1)
    summary = cut.run(manifest, out, stop=stop, allow_manifest_change=True, **OPTIONS | {"max_num_seqs": 1})
    assert summary.interrupted
    rest = Runner()
    assert rest.run(manifest, out, **OPTIONS).num_ok == 19
    assert sum(cut.finished.values()) + sum(rest.finished.values()) == 5
    Runner().run(manifest, tmp_path / "fresh", **OPTIONS)
    same(out, tmp_path / "fresh")
