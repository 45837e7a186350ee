"""The folder of previews: whole files, only of what is unfinished, and no harm when it cannot be written."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from offline_diffusion.data import previews
from offline_diffusion.data.previews import PreviewFolder
from offline_diffusion.request import Request, RequestOutput

REQUEST = Request(
    request_id="../../a", prompt="a", height=32, width=48, num_inference_steps=9, true_cfg_scale=1.0, seed=1
)


def preview(level: int) -> RequestOutput:
    return RequestOutput(REQUEST, "running", np.full((32, 48, 3), level, np.uint8))


def grey(path: Path) -> int:
    with PIL.Image.open(path) as image:
        assert image.format == "JPEG"
        assert image.size == (48, 32)
        return round(np.asarray(image).mean())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_latest_preview_of_each_unfinished_image(tmp_path: Path) -> None:
    folder = PreviewFolder(tmp_path / "previews", print)
    folder.show((12, 0), preview(50))
    folder.show((12, 1), preview(60))
    folder.show((123_456_789, 0), preview(70))
    folder.show((12, 0), preview(200))
    folder.drop((12, 1))
    folder.drop((99, 0))  # had none
    folder.close()
    assert names(tmp_path / "previews") == ["00000012-0.jpg", "123456789-0.jpg"]
    assert abs(grey(tmp_path / "previews" / "00000012-0.jpg") - 200) <= 2


def test_without_a_preview_there_is_no_folder(tmp_path: Path) -> None:
    folder = PreviewFolder(tmp_path / "previews", print)
    folder.drop((1, 0))
    folder.close()
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "previews").write_text("in the way")
    said: list[str] = []
    folder = PreviewFolder(tmp_path / "previews", said.append)
    for row in range(3):
        folder.show((row, 0), preview(1))
    folder.close()
    assert said[0] == f"previews of unfinished images: {tmp_path / 'previews'}"
    assert said[1].startswith("warning: a preview cannot be written: ")
    assert len(said) == 2


def test_whoever_shows_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, written = threading.Event(), []

    def write(self: PreviewFolder, key: tuple[int, int], output: RequestOutput | None) -> None:
        slow.wait(60)
        written.append((key, output is None))

    monkeypatch.setattr(PreviewFolder, "_write", write)
    folder = PreviewFolder(tmp_path, print)
    for row in range(500):
        folder.show((row, 0), preview(1))
    folder.drop((0, 0))  # no file of it may stay
    slow.set()
    folder.close()
    assert len(written) <= previews.MAX_QUEUED + 2
    assert written[0] == ((0, 0), False)
    assert written[-1] == ((0, 0), True)
