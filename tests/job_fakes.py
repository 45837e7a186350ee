"""What tests of whole jobs share: manifests, an engine that counts, a model that fails on demand, readers.

Published tables are read with plain pyarrow and PIL, never with the code under test.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from offline_diffusion.config import TINY_MODEL, EngineConfig, JobConfig, make_job_config
from offline_diffusion.engine.engine import Engine
from offline_diffusion.job import JobSummary, run_task
from offline_diffusion.models.loader import load_model
from offline_diffusion.models.registry import Checkpoint
from offline_diffusion.request import RequestOutput

SMALL = {"height": 32, "width": 32, "num_inference_steps": 2}
"""Options of a job whose images are quickly drawn."""

SPOILED = 12_345.0
"""First latent of an image that is to fail in a step."""

Rows = list[dict[str, Any]]


def make_rows(count: int, **columns: Any) -> Rows:
    return [{"id": f"r{n:03d}", "prompt": f"a red cup, view {n}", "seed": n} | columns for n in range(count)]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Rows as JSON lines; a string is written as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@functools.cache
def loaded_model() -> Any:
    """The tiny model, loaded once a process."""
    return load_model(EngineConfig(model=TINY_MODEL, device="cpu"))


class CountingEngine(Engine):
    """Counts what it finishes, and the steps of all its images (``num_image_steps``)."""

    def __init__(self, model: Any, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.finished: Counter[str] = Counter()
        self.num_image_steps = 0
        self.num_steps = 0
        self.on_step: Callable[[CountingEngine], None] = lambda engine: None

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        self.on_step(self)
        outputs = super().step()
        for output in outputs:
            if output.status not in ("aborted", "running"):
                self.finished[output.request.prompt] += 1
        return outputs

    def _count_step(self, running: Any, num_seqs: int) -> None:
        super()._count_step(running, num_seqs)
        self.num_image_steps += len(running)


OnStep = Callable[[CountingEngine], None]


def at_step(step: int, action: Callable[[], Any]) -> OnStep:
    """Does something before a step of the engine, counted from 1."""
    return lambda engine: action() if engine.num_steps == step else None


def fail_at_step(step: int, error: BaseException) -> OnStep:
    """Raises before a step of the engine, counted from 1."""

    def fail() -> None:
        raise error

    return at_step(step, fail)


class FailingModel:
    """The tiny model; prompts that hold one of these words fail at that stage.

    ``TOKENIZE``, ``ENCODE`` and ``STEP`` raise, ``MEMORY`` runs out of memory in a step and ``NAN``
    has latents that are no numbers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._to_fail: set[tuple[int, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def tokenize(self, prompt: str) -> Any:
        if "TOKENIZE" in prompt:
            raise RuntimeError("a made-up tokenizer fault")
        tokens = self._model.tokenize(prompt)
        if "ENCODE" in prompt:
            self._to_fail.add(tokens.input_ids)
        return tokens

    def prepare_encode(self, prompts: Any) -> Any:
        if any(prompt.input_ids in self._to_fail for prompt in prompts):
            raise RuntimeError("a made-up encoder fault")
        return self._model.prepare_encode(prompts)

    def prepare_latents(self, request: Any) -> torch.Tensor:
        latents = self._model.prepare_latents(request)
        if "NAN" in request.prompt:
            return torch.full_like(latents, torch.nan)
        if "STEP" in request.prompt or "MEMORY" in request.prompt:
            latents = latents.clone()
            latents[0, 0] = SPOILED if "STEP" in request.prompt else -SPOILED
        return latents

    def denoise_step(self, batch: Any) -> torch.Tensor:
        if (batch.latents == SPOILED).any():
            raise RuntimeError("a made-up fault in a step")
        if (batch.latents == -SPOILED).any():
            raise torch.OutOfMemoryError("made up")
        return self._model.denoise_step(batch)


class Runner:
    """Runs jobs with one loaded model; ``engine`` is the one of the last run, None when none was needed."""

    def __init__(self, model: Any = None) -> None:
        self.model = loaded_model() if model is None else model
        self.engine: CountingEngine | None = None
        self.on_step: Callable[[CountingEngine], None] = lambda engine: None

    def make_engine(self, config: JobConfig, checkpoint: Checkpoint) -> Engine:
        self.engine = CountingEngine(self.model, config)
        self.engine.on_step = self.on_step
        return self.engine

    @property
    def finished(self) -> Counter[str]:
        """Prompt → images finished in the last run."""
        return Counter() if self.engine is None else self.engine.finished

    def run_task(self, config: JobConfig, **others: Any) -> JobSummary:
        """``job.run_task`` with this model; also stands in for it in ``offdiff run``."""
        self.engine = None
        return run_task(config, make_engine=self.make_engine, **others)

    def run(self, manifest: Path | str | list[str], out: Path, **options: Any) -> JobSummary:
        """Runs a job; ``observer``, ``stop`` and ``say`` go to ``run_task``."""
        others = {name: options.pop(name) for name in ("observer", "stop", "say") if name in options}
        manifests = manifest if isinstance(manifest, list) else [str(manifest)]
        values = {"model": TINY_MODEL, "manifests": manifests, "out": out, **options}
        return self.run_task(make_job_config(values), **others)


def read_table(out: Path, table: str) -> Rows:
    """All rows of a published table, file by file."""
    return [
        row for path in sorted((out / table).glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def read_schema(out: Path, table: str) -> pa.Schema:
    schemas = [pq.read_schema(path) for path in sorted((out / table).glob("*.parquet"))]
    assert all(schema.equals(schemas[0], check_metadata=True) for schema in schemas)
    return schemas[0]


def decode(image: dict[str, Any]) -> np.ndarray:
    with PIL.Image.open(io.BytesIO(image["bytes"])) as opened:
        assert opened.mode == "RGB"
        return np.array(opened)


def pixels_by_key(out: Path) -> dict[tuple[str, int], str]:
    """``(id, image_index)`` → SHA-256 of the decoded pixels, which is checked against the table's."""
    found: dict[tuple[str, int], str] = {}
    for row in read_table(out, "images"):
        key = row["id"], row["image_index"]
        assert key not in found, f"{key} is there twice"
        found[key] = hashlib.sha256(decode(row["image"]).tobytes()).hexdigest()
        assert found[key] == row["sha256"]
    return found


def contents(out: Path) -> tuple[Rows, Rows, Rows]:
    """Everything in which two runs of a job must agree: the tables without times, places and costs."""
    images = read_table(out, "images")
    kept = ("id", "row", "image_index", "status", "error_type", "steps_run", "prompt_tokens", "row_hash")
    metrics = [{name: row[name] for name in kept} for row in read_table(out, "metrics")]
    return images, metrics, read_table(out, "failures")
