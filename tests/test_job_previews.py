"""``--diffusion-streaming-output`` in a whole job: previews lie beside it, and the dataset is the same."""

from __future__ import annotations

from pathlib import Path

import PIL.Image
import pytest
from job_fakes import CountingEngine, Runner, make_rows, pixels_by_key, write_jsonl

from offline_diffusion.errors import ConfigError
from offline_diffusion.job import StopFlag

OPTIONS = {"height": 32, "width": 32, "num_inference_steps": 12, "max_num_seqs": 3, "device": "cpu"}
PREVIEWS = {"diffusion_streaming_output": True, "preview_interval": 2}


def test_the_dataset_is_the_same_and_no_preview_is_left(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(6, num_images_per_prompt=2))
    Runner().run(manifest, tmp_path / "plain", **OPTIONS)
    runner, most = Runner(), [0]

    def look(_: CountingEngine) -> None:
        most[0] = max(most[0], len(list((tmp_path / "out/_state/previews").glob("*.jpg"))))

    runner.on_step = look
    summary = runner.run(manifest, tmp_path / "out", **OPTIONS, **PREVIEWS)
    assert summary.num_ok == 12
    assert most[0] > 0
    assert pixels_by_key(tmp_path / "out") == pixels_by_key(tmp_path / "plain")
    assert not (tmp_path / "out/_state/previews").exists()


def test_what_is_unfinished_at_a_stop_can_be_seen_and_goes_on(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(3))
    stop, runner = StopFlag(), Runner()

    def stop_at_the_ninth(engine: CountingEngine) -> None:
        if engine.num_steps == 9:
            stop.request("test")

    runner.on_step = stop_at_the_ninth
    first = runner.run(manifest, tmp_path / "out", stop=stop, **OPTIONS, **PREVIEWS)
    assert first.interrupted
    files = sorted((tmp_path / "out/_state/previews").iterdir())
    assert [path.name for path in files] == [f"0000000{row}-0.jpg" for row in range(3)]
    for path in files:
        with PIL.Image.open(path) as image:
            assert image.size == (32, 32)
    assert Runner().run(manifest, tmp_path / "out", **OPTIONS).num_ok == 3  # without previews
    assert not (tmp_path / "out/_state/previews").exists()
    Runner().run(manifest, tmp_path / "plain", **OPTIONS)
    assert pixels_by_key(tmp_path / "out") == pixels_by_key(tmp_path / "plain")


def test_previews_need_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs step execution: leave --no-step-execution away"):
        Runner().run("m.jsonl", tmp_path, step_execution=False, **PREVIEWS)


def test_a_mode_that_the_family_lacks_is_refused_before_the_output_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from offline_diffusion import preparation
    from offline_diffusion.models.capabilities import BatchKind

    def stacked(model: str, revision: str | None) -> object:
        found = find(model, revision)
        return replace(found, capabilities=replace(found.capabilities, batch_kind=BatchKind.STACKED))

    find = preparation.find_checkpoint
    monkeypatch.setattr(preparation, "find_checkpoint", stacked)
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(1))
    with pytest.raises(ConfigError, match="batching packed is not supported for model family 'qwen_image'"):
        Runner().run(manifest, tmp_path / "out", batching="packed", **OPTIONS)
    assert not (tmp_path / "out").exists()
