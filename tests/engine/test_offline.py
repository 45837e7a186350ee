"""The Python entry point, over the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fakes import FakeModel, make_request

from offline_diffusion import OfflineDiffusion, SamplingParams
from offline_diffusion.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from offline_diffusion.engine import offline
from offline_diffusion.errors import ConfigError, ModelError
from offline_diffusion.request import MAX_SEED

SMALL = SamplingParams(height=48, width=64, num_inference_steps=2, seed=7)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> OfflineDiffusion:
    return OfflineDiffusion(str(tiny_model), max_num_seqs=4)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> OfflineDiffusion:
    """The entry point over the model with a closed form."""
    monkeypatch.setattr(offline, "load_model", lambda config: FakeModel())
    return OfflineDiffusion(max_num_seqs=3)


def test_prompts_become_images(engine: OfflineDiffusion) -> None:
    outputs = {o.request_id: o for o in engine.generate(["a cup of coffee", "a toy dinosaur"], SMALL)}
    assert outputs.keys() == {"0", "1"}
    assert all(output.image.size == (64, 48) for output in outputs.values())
    assert outputs["0"].request.prompt == "a cup of coffee"
    assert outputs["0"].image.tobytes() != outputs["1"].image.tobytes()


def test_one_prompt_may_be_a_string(engine: OfflineDiffusion) -> None:
    (output,) = engine.generate("a cup", SMALL)
    assert (output.request_id, output.request.prompt) == ("0", "a cup")


def test_no_prompts_no_images(engine: OfflineDiffusion) -> None:
    assert list(engine.generate([])) == []


def test_images_of_a_prompt_have_seeds_in_a_row_and_can_be_made_alone(engine: OfflineDiffusion) -> None:
    params = SamplingParams(
        height=48, width=48, num_inference_steps=2, seed=MAX_SEED, num_images_per_prompt=3
    )
    outputs = list(engine.generate(["a cup"], params, ordered=True))
    assert [output.request_id for output in outputs] == ["0-0", "0-1", "0-2"]
    assert [output.request.seed for output in outputs] == [MAX_SEED, 0, 1]
    again = SamplingParams(height=48, width=48, num_inference_steps=2, seed=1)
    (alone,) = engine.generate("a cup", again)
    assert alone.image.tobytes() == outputs[2].image.tobytes()


def test_seeds_that_are_not_given_are_random_and_recorded(engine: OfflineDiffusion) -> None:
    params = SamplingParams(height=48, width=48, num_inference_steps=1)
    outputs = list(engine.generate(["a"] * 3, params))
    assert len({output.request.seed for output in outputs}) == 3


def test_parameters_one_a_prompt(engine: OfflineDiffusion) -> None:
    params = [SMALL, SamplingParams(height=64, width=48, num_inference_steps=1, seed=1)]
    outputs = list(engine.generate(["a", "b"], params, ordered=True))
    assert [output.image.size for output in outputs] == [(64, 48), (48, 64)]
    assert [output.metrics.steps_run for output in outputs] == [2, 1]


@pytest.mark.parametrize("ordered", [True, False])
def test_order(fake: OfflineDiffusion, ordered: bool) -> None:
    params = [SamplingParams(num_inference_steps=n) for n in (9, 2, 5, 1)]
    names = [output.request_id for output in fake.generate(list("abcd"), params, ordered=ordered)]
    assert sorted(names) == ["0", "1", "2", "3"]
    assert (names == ["0", "1", "2", "3"]) is ordered


def test_a_failed_image_keeps_its_place_in_the_order(fake: OfflineDiffusion) -> None:
    def fail(height: int, width: int) -> None:
        if height == 64:
            raise RuntimeError("no")

    model: Any = fake.engine.model
    model.on_decode = fail
    params = [SamplingParams(height=height) for height in (32, 64, 48)]
    outputs = list(fake.generate(["a", "b", "c"], params, ordered=True))
    assert [output.status for output in outputs] == ["ok", "failed", "ok"]


def test_stopping_early_leaves_a_usable_engine(fake: OfflineDiffusion) -> None:
    outputs = fake.generate(["a"] * 10)
    assert isinstance(outputs, Iterator)
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    assert len(list(fake.generate(["a"] * 10))) == 10


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", "b"], [SMALL], "2 prompts but 1 sampling params"),
        (["a", " \n"], SMALL, "prompt 1 is blank"),
        (["a"], SamplingParams(height=100), "height must be a multiple of 16, got 100"),
        (["a"], SamplingParams(lora="x"), "lora is not supported"),
        ([5], SMALL, "prompt 0 must be a string, got 5"),
        (["a", None], SMALL, "prompt 1 must be a string, got None"),
        (5, SMALL, "prompts must be a string or a sequence of strings, got 5"),
        (["a"], {"height": 64}, "params must be SamplingParams, one or a sequence"),
        (["a"], [{"height": 64}], "params must be SamplingParams, one or a sequence"),
        (["a"], 5, "params must be SamplingParams, one or a sequence, got 5"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    fake: OfflineDiffusion, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fake.generate(prompts, params)


def test_wrong_options_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="OfflineDiffusion: unknown option 'max_num_seq'") as caught:
        OfflineDiffusion(max_num_seq=3)
    assert caught.value.hint == "did you mean 'max_num_seqs'?"
    with pytest.raises(ConfigError, match=r"max_num_seqs: .*got 0"):
        OfflineDiffusion(max_num_seqs=0)


def test_a_model_that_is_nowhere() -> None:
    with pytest.raises(ModelError):
        OfflineDiffusion("/no/such/folder")


def test_options_reach_the_engine(fake: OfflineDiffusion) -> None:
    assert fake.engine.scheduler.max_num_seqs == 3
    assert fake.engine.scheduler.max_num_batched_tokens == DEFAULT_MAX_NUM_BATCHED_TOKENS


def test_drawing_needs_no_grad_mode_of_the_callers(fake: OfflineDiffusion) -> None:
    with torch.enable_grad():
        fake.engine.add_request(make_request("x"))
        while fake.engine.has_unfinished:
            outputs = fake.engine.step()
    assert outputs[0].status == "ok"
