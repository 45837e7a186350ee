from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import yaml
from output_fakes import all_images, make_fault, make_pixels, make_rows, open_ledger, run_job

from offline_diffusion.data.card import write_card
from offline_diffusion.data.rows import ManifestRow
from offline_diffusion.data.sink import Sink


def load(out: Path, name: str, cache: Path) -> datasets.Dataset:
    return datasets.load_dataset(str(out), name, split="train", cache_dir=str(cache))


def header(out: Path) -> dict[str, object]:
    return yaml.safe_load((out / "README.md").read_text().split("---")[1])


def test_load_dataset_opens_pictures_metrics_and_failures(tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = make_rows(9, images=2, faults=(4,))
    ledger = open_ledger(out, 9, 4)
    run_job(ledger, rows, failing={(2, 0): "nan"})
    write_card(ledger)
    images = load(out, "images", tmp_path / "cache")
    assert images.features["image"] == datasets.Image()
    assert images.features["scores"] == datasets.List(datasets.Value("int64"))
    expected = [image for image in all_images(rows) if (image.row, image.image_index) != (2, 0)]
    assert images["row"][:] == [image.row for image in expected]
    for row, image in zip(images, expected, strict=True):
        assert row["image"].size == (24, 16)
        np.testing.assert_array_equal(np.array(row["image"]), make_pixels(image))
        assert row["seed"] == image.request.seed
        assert row["tag"] == f"t{image.id}"
    metrics = load(out, "metrics", tmp_path / "cache")
    assert metrics["status"][:].count("failed") == 2
    failures = load(out, "failures", tmp_path / "cache")
    assert failures["reason"][:] == ["nan at step 3", "must be at least 1"]


def test_without_failures_the_card_has_no_such_config(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_job(open_ledger(out, 3, 2), make_rows(3))
    assert [config["config_name"] for config in header(out)["configs"]] == ["images", "metrics"]
    assert load(out, "images", tmp_path / "cache").num_rows == 3
    assert datasets.get_dataset_default_config_name(str(out)) == "images"


def test_a_job_that_is_not_finished_opens_as_far_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ledger = open_ledger(out, 4, 2)
    write_card(ledger)
    assert [config["config_name"] for config in header(out)["configs"]] == ["images", "metrics"]
    sink = Sink(ledger)
    part = [make_fault(0), make_fault(1)]
    sink.open_shard(ledger.shards[0], part)
    sink.close(abandon=True)
    assert [config["config_name"] for config in header(out)["configs"]] == ["metrics", "failures"]
    assert load(out, "failures", tmp_path / "cache").num_rows == 2
    assert "not finished" in (out / "README.md").read_text()
    assert "| shards done | 1 of 2 |" in (out / "README.md").read_text()


def test_carried_columns_that_are_null_in_one_shard_load(tmp_path: Path) -> None:
    out = tmp_path / "out"
    carried = pa.schema([("note", pa.string())])
    rows = [
        ManifestRow(r.row, r.id, r.file, r.line, r.content_hash, r.prompt, r.params, {"note": note})
        for r, note in zip(make_rows(2), [None, "seen"], strict=True)
    ]
    run_job(open_ledger(out, 2, 1, carried_schema=carried), rows)
    assert load(out, "images", tmp_path / "cache")["note"][:] == [None, "seen"]


def test_maps_and_taken_names_load(tmp_path: Path) -> None:
    out = tmp_path / "out"
    carried = pa.schema([("votes", pa.map_(pa.string(), pa.int64())), ("sha256", pa.string())])
    values = {"votes": [("yes", 2**53 + 1), ("no", None)], "sha256": "theirs"}
    row = make_rows(1)[0]
    assert isinstance(row, ManifestRow)
    run_job(open_ledger(out, 1, 1, carried_schema=carried), [replace(row, carried=values)])
    (found,) = load(out, "images", tmp_path / "cache")
    assert found["votes"] == [{"key": "yes", "value": 2**53 + 1}, {"key": "no", "value": None}]
    assert found["manifest_sha256"] == "theirs"
    assert len(found["sha256"]) == 64


def test_a_card_that_somebody_edited_stays(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 1, 1)
    assert write_card(ledger)
    (tmp_path / "README.md").write_text("# my own words")
    assert not write_card(ledger)
    assert (tmp_path / "README.md").read_text() == "# my own words"


@pytest.mark.parametrize("name", ["x`\n---\n# h1", "<script>alert(1)</script>`", "|"])
def test_a_model_name_cannot_break_the_card(tmp_path: Path, name: str) -> None:
    ledger = open_ledger(tmp_path, 1, 1, model={"model": name})
    write_card(ledger)
    text = (tmp_path / "README.md").read_text()
    assert text.count("\n---\n") == 1
    (line,) = [line for line in text.splitlines() if line.startswith("Drawn by")]
    assert line.count("`") == 2
