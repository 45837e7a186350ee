"""When a step is recorded, and that a replayed step is a step."""

from __future__ import annotations

import pytest
import torch
from engine_fakes import FakeModel, FakeRecorder, expected_latents, make_request

from offline_diffusion.accel import graphs
from offline_diffusion.engine import model_runner
from offline_diffusion.engine.model_runner import ModelRunner


def _run(num_steps: int, recorder: FakeRecorder) -> None:
    model = FakeModel()
    runner = ModelRunner(model)
    runner._recorder = recorder  # type: ignore[assignment]
    request = make_request("a", "abc", num_inference_steps=num_steps)
    prepared = runner.prepare(request, model.tokenize(request.prompt), None)
    for _ in range(num_steps):
        runner.denoise([prepared])
    runner.drop_batch()
    assert torch.allclose(prepared.latents.double(), expected_latents(request), atol=1e-4)


def test_a_pack_is_recorded_at_its_second_step_and_replayed_from_then_on() -> None:
    recorder = FakeRecorder()
    _run(7, recorder)
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 6)


def test_a_pack_that_ends_soon_is_not_recorded() -> None:
    recorder = FakeRecorder()
    _run(1 + graphs.MIN_REPLAYS - 1, recorder)
    assert recorder.num_recorded == 0


def test_a_large_pack_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FakeRecorder()
    monkeypatch.setattr(model_runner, "MAX_GRAPH_TOKENS", 6)  # it has 3 text and 4 image tokens
    _run(7, recorder)
    assert recorder.num_recorded == 0


def test_on_a_cpu_nothing_is_recorded() -> None:
    recorder = graphs.StepRecorder(torch.device("cpu"))
    assert recorder.record(lambda: None) is None
