"""``--max-failures`` over faulty rows, and what is told of options without effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_fakes import SMALL, Runner, loaded_model, make_rows, read_table, write_jsonl

from offline_diffusion.errors import TooManyFailuresError


def faulty_manifest(tmp_path: Path, num_faulty: int, num_rows: int = 31, **fault: Any) -> Path:
    rows = make_rows(num_rows)
    for row in rows[:num_faulty]:
        row |= fault or {"prompt": ""}
    return write_jsonl(tmp_path / "m.jsonl", rows)


@pytest.mark.parametrize("limit", ["3", "50%"])
def test_faults_that_the_scan_finds_stop_the_job_before_the_model_is_loaded(
    tmp_path: Path, limit: str
) -> None:
    runner = Runner()
    with pytest.raises(TooManyFailuresError) as caught:
        runner.run(faulty_manifest(tmp_path, 23), tmp_path / "out", max_failures=limit, shard_size=4, **SMALL)
    assert caught.value.message == f"23 of the manifest's 31 rows are faulty, --max-failures is {limit}"
    assert "offdiff validate" in str(caught.value.hint)
    assert runner.engine is None


@pytest.mark.parametrize("limit", ["23", "75%"])
def test_as_many_faults_as_allowed_do_not_stop_it(tmp_path: Path, limit: str) -> None:
    manifest = faulty_manifest(tmp_path, 23)
    summary = Runner().run(manifest, tmp_path / "out", max_failures=limit, **SMALL)
    assert (summary.num_quarantined_rows, summary.num_ok) == (23, 8)
    # A finished job has nothing to stop.
    assert Runner().run(manifest, tmp_path / "out", max_failures="3", **SMALL).num_ok == 8


def test_rows_that_only_the_model_refuses_are_counted_among_all_that_are_begun(tmp_path: Path) -> None:
    manifest = faulty_manifest(tmp_path, 5, height=42)
    with pytest.raises(TooManyFailuresError) as caught:
        Runner().run(manifest, tmp_path / "out", max_failures="3", **SMALL)
    expected = "0 images failed and 5 rows cannot be drawn, of 31 begun; --max-failures is 3"
    assert caught.value.message == expected


def test_a_guidance_scale_that_the_model_ignores_is_told_once_with_a_count(tmp_path: Path) -> None:
    rows = make_rows(4)
    rows[0]["guidance_scale"] = 3.5
    rows[2] |= {"guidance_scale": 1.0, "num_images_per_prompt": 2}
    summary = Runner().run(write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out", **SMALL)
    (warning,) = (line for line in summary.warnings if "guidance_scale is" in line)
    assert warning.startswith("3 images: guidance_scale is without effect")
    scales = [row["guidance_scale"] for row in read_table(tmp_path / "out", "images")]
    assert scales == [3.5, None, 1.0, 1.0, None]


def test_a_guidance_distilled_model_s_scale_is_no_matter_for_a_warning(tmp_path: Path) -> None:
    model = loaded_model()

    class Distilled:
        capabilities = replace(model.capabilities, guidance="embedded")

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(1, guidance_scale=3.5))
    summary = Runner(Distilled()).run(manifest, tmp_path / "out", **SMALL)
    assert not any("guidance_scale is" in line for line in summary.warnings)
