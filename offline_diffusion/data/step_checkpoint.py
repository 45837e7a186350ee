"""Step checkpoints on disk: how far the unfinished images of a shard have come. Free of torch.

``_state/steps/<shard>.<generation>.safetensors`` holds the latents of every image that was in the middle of
its denoise steps, and in its metadata the rest. A file is replaced as a whole, so it is there whole or not at
all; every owner of a shard, a generation, has its own. Nothing here is needed: what cannot be read is drawn
again from its noise.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from offline_diffusion.data.files import disk_errors, replace_file
from offline_diffusion.data.layout import SCRATCH, STEPS, Shard
from offline_diffusion.data.partial import ImageKey
from offline_diffusion.request import RequestMetrics, StepState

FORMAT, VERSION = "offdiff step checkpoint", "1"

_NAME = re.compile(r"shard-\d{5,}\.(\d{6,})\.safetensors")


@dataclass(frozen=True, slots=True)
class ExpectedImage:
    """What a job asks of an image now.

    Args:
        row_hash: Content hash of its row.
        num_inference_steps: All its steps.
        latents_shape: Tokens and channels.
    """

    row_hash: str
    num_inference_steps: int
    latents_shape: tuple[int, int]


class _Unfit(Exception):
    """Why a file or one of its images is of no use."""


class StepFiles:
    """The step checkpoints of one output folder.

    Args:
        out: The folder.
        job_id: Of the job it belongs to; files of another are ignored.
    """

    def __init__(self, out: Path, job_id: str) -> None:
        self.folder = out / STEPS
        self._scratch, self._job_id = out / SCRATCH, job_id

    def path(self, shard: Shard, generation: int) -> Path:
        return self.folder / f"{shard.stem}.{generation:06d}.safetensors"

    def read(
        self, shard: Shard, expected: Callable[[ImageKey], ExpectedImage | None]
    ) -> tuple[dict[ImageKey, StepState], list[str]]:
        """All that is left of a shard's unfinished images, whoever had it; never raises for a file.

        Args:
            shard: Which.
            expected: What is asked of an image; None for one that is not asked for.

        Returns:
            Of each image the furthest state, and a line for each file in which something does not fit.
        """
        furthest: dict[ImageKey, StepState] = {}
        notes = []
        for path in step_paths(self.folder, shard.stem):
            unfit: Counter[str] = Counter()
            try:
                for key, state in self._read_file(path, expected, unfit):
                    known = furthest.get(key)
                    if known is None or known.step_index < state.step_index:
                        furthest[key] = state
            except _Unfit as reason:
                notes.append(f"step checkpoint {path.name} is ignored: {reason}")
            if unfit:
                reasons = ", ".join(f"{reason} ({count})" for reason, count in unfit.items())
                notes.append(f"step checkpoint {path.name}: {unfit.total()} of its images ignored: {reasons}")
        return furthest, notes

    def _read_file(
        self, path: Path, expected: Callable[[ImageKey], ExpectedImage | None], unfit: Counter[str]
    ) -> Iterator[tuple[ImageKey, StepState]]:
        entries, tensors = self._load(path)
        for name, entry in entries.items():
            try:
                yield _check_image(entry, tensors.get(name), expected)
            except _Unfit as reason:
                unfit[str(reason)] += 1

    def _load(self, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The entries of a file by name, and its tensors."""
        try:
            data = path.read_bytes()
            metadata = _metadata(data)
            for name, value in (("format", FORMAT), ("version", VERSION)):
                if metadata.get(name) != value:
                    raise _Unfit(f"its {name} is {metadata.get(name)!r}, not {value!r}")
            if metadata.get("job_id") != self._job_id:
                raise _Unfit("it is of another job")
            entries = json.loads(metadata["images"])
            tensors = safetensors.numpy.load(data)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError, RecursionError) as error:
            raise _Unfit(f"it is damaged: {error}") from None
        if not isinstance(entries, dict):
            raise _Unfit("it is damaged: no images are listed")
        return entries, tensors

    def write(self, shard: Shard, generation: int, images: Mapping[ImageKey, tuple[str, StepState]]) -> None:
        """Replaces the file of a generation, and then removes those of the generations before.

        Args:
            shard, generation: Whose.
            images: Row hash and state of each unfinished image of the shard, those that were read of earlier
                generations too; without any the file goes.

        Raises:
            JobError: The disk is full or failed; an earlier file is as it was.
        """
        with disk_errors(self.folder):
            if images:
                self.folder.mkdir(exist_ok=True)
                replace_file(self.path(shard, generation), self._serialize(images), self._scratch)
            self._remove(shard, below=generation if images else generation + 1)

    def _serialize(self, images: Mapping[ImageKey, tuple[str, StepState]]) -> bytes:
        entries, tensors = {}, {}
        for (row, image_index), (row_hash, state) in images.items():
            name = f"{row}-{image_index}"
            entry = {
                "row": row,
                "image_index": image_index,
                "row_hash": row_hash,
                "step_index": state.step_index,
                "metrics": asdict(state.metrics),
            }
            tensors[name] = np.ascontiguousarray(state.latents, dtype=np.float32)
            entries[name] = entry | {"crc32": _checksum(entry, tensors[name])}
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "job_id": self._job_id,
            "images": json.dumps(entries),
        }
        return safetensors.numpy.save(tensors, metadata)

    def _remove(self, shard: Shard, *, below: int) -> None:
        for path in step_paths(self.folder, shard.stem):
            if _generation(path) < below:
                path.unlink(missing_ok=True)


def step_paths(folder: Path, stem: str) -> list[Path]:
    """A shard's step checkpoints, oldest generation first."""
    return sorted(path for path in folder.glob(f"{stem}.*.safetensors") if _NAME.fullmatch(path.name))


def _generation(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _metadata(data: bytes) -> dict[str, Any]:
    """What safetensors puts under ``__metadata__`` in its header: its length in 8 bytes, then JSON."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise ValueError("it has no metadata")
    return metadata


def _check_image(
    entry: Any,
    latents: np.ndarray | None,
    expected: Callable[[ImageKey], ExpectedImage | None],
) -> tuple[ImageKey, StepState]:
    try:
        content = {key: value for key, value in entry.items() if key != "crc32"}
        if latents is None or latents.dtype != np.float32 or entry["crc32"] != _checksum(content, latents):
            raise _Unfit("damaged")
        key, step_index = (int(entry["row"]), int(entry["image_index"])), int(entry["step_index"])
        metrics = RequestMetrics(**entry["metrics"])
        row_hash = entry["row_hash"]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _Unfit("damaged") from None
    asked = expected(key)
    if asked is None:
        raise _Unfit("not asked for")
    if row_hash != asked.row_hash:
        raise _Unfit("the row has changed")
    if not 0 < step_index < asked.num_inference_steps:
        raise _Unfit(f"at step {step_index} of {asked.num_inference_steps}")
    if latents.shape != asked.latents_shape:
        raise _Unfit(f"latents are {list(latents.shape)}, not {list(asked.latents_shape)}")
    if not np.isfinite(latents).all():
        raise _Unfit("latents hold NaN or infinity")
    return key, StepState(step_index, latents, metrics)


def _checksum(content: Mapping[str, Any], latents: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(latents).data, zlib.crc32(json.dumps(content).encode()))
