"""The checks find what they are there to find."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import checks
import pytest
import torch
from checks import (
    Drawing,
    draw,
    error_requests,
    exactness,
    psnr,
    quantization_error,
    relative_l2,
    without_padding,
)
from compositions import prepared_composition, random_job
from full_size import build_transformer

from offline_diffusion.kernels import linear
from offline_diffusion.models.loader import model_from_pipeline
from offline_diffusion.models.registry import find_checkpoint

SIZES = [(32, 32), (64, 32), (48, 80)]


@pytest.fixture
def model(tiny_pipeline: Any) -> Any:
    from offline_diffusion.models.tiny import tiny_model_folder

    return model_from_pipeline(tiny_pipeline, find_checkpoint(str(tiny_model_folder())), torch.device("cpu"))


def test_packed_equals_alone(model: Any) -> None:
    found = exactness(model, num_compositions=2, num_jobs=1, sizes=SIZES)
    assert found["max_abs_noise_pred"] < 1e-5
    assert found["max_abs_latents"] < 1e-5
    assert found["max_abs_pixels"] <= 1
    assert found["num_requests"] >= 4


def test_a_row_that_knows_its_company_is_found(model: Any) -> None:
    denoise_step = model.denoise_step

    def leaky(batch: Any) -> torch.Tensor:
        out = denoise_step(batch)
        return out + 1e-3 * out.shape[0]

    model.denoise_step = leaky
    found = exactness(model, num_compositions=1, num_jobs=0, sizes=SIZES)
    assert found["max_abs_noise_pred"] > 1e-3
    assert found["max_abs_latents"] > 0
    assert found["max_abs_pixels"] is None


def test_nan_is_a_difference(model: Any) -> None:
    denoise_step = model.denoise_step
    model.denoise_step = lambda batch: denoise_step(batch) * float("nan")
    found = exactness(model, num_compositions=1, num_jobs=0, sizes=SIZES)
    assert found["max_abs_noise_pred"] == sys.float_info.max


def test_compositions_are_as_unlike_as_they_claim(model: Any) -> None:
    prepared = [own for seed in range(30) for own in prepared_composition(model, seed, SIZES[:1])]
    assert {own.negative_embeds is None for own in prepared} == {True, False}
    assert {own.step_index for own in prepared} > {0, 1, 2}
    assert all(own.step_index < own.request.num_inference_steps for own in prepared)
    assert len({own.prompt_embeds.num_tokens for own in prepared}) > 10
    assert len({len(random_job(seed)) for seed in range(20)}) == 3


def test_padding_is_off_inside_and_on_again_after(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, 2)
    monkeypatch.setattr(linear, "pad_rows", lambda x, min_rows: x.new_zeros(min_rows, x.shape[1]))
    with without_padding():
        assert linear.pad_rows(x, 64) is x
    assert linear.pad_rows(x, 64).shape == (64, 2)


def test_the_price_of_padding_is_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded steps that take a tenth longer, on a clock that counts calls."""

    class CountingClock:
        now = 0.0

        def mark(self) -> float:
            return self.now

        def seconds(self, start: float, end: float) -> float:
            return end - start

    clock = CountingClock()
    runner = checks.ModelRunner(model)

    def denoise(requests: Any) -> int:
        is_padded = linear.pad_rows is not checks._as_they_are
        clock.now += 1.1 if is_padded else 1.0
        return 1

    monkeypatch.setattr(runner, "denoise", denoise)
    assert checks._padding_cost(runner, [], clock, 2) == pytest.approx(0.1)  # type: ignore[arg-type]


def test_errors_in_closed_form() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_l2(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert psnr(torch.full((4, 4, 3), 0.6), torch.full((4, 4, 3), 0.5)) == pytest.approx(20.0, abs=1e-4)
    assert psnr(torch.ones(2), torch.ones(2)) is None


def test_quantization_error_is_over_requests() -> None:
    ones = torch.ones(4)
    reference = [Drawing(ones, ones, 0.5 * ones)] * 2
    drawn = [Drawing(1.1 * ones, ones, 0.6 * ones), Drawing(1.3 * ones, 1.2 * ones, 0.5 * ones)]
    found = quantization_error(reference, drawn)
    assert found["noise_pred_relative_l2"] == pytest.approx(0.2)
    assert found["noise_pred_relative_l2_max"] == pytest.approx(0.3)
    assert found["latents_relative_l2"] == pytest.approx(0.1)
    assert found["psnr_db"] == pytest.approx(20.0, abs=1e-4)


def test_drawings_are_the_engine_s_images(model: Any) -> None:
    """The engine is another way to the same pixels."""
    from compositions import pixels
    from ours import make_engine

    requests = error_requests(2, scale=16)
    assert [request.cfg_active for request in requests] == [True, True, True, False]
    drawn = draw(model, requests)
    for own, image in zip(drawn, pixels(make_engine(model), requests), strict=True):
        assert abs((own.image * 255).round().numpy() - image).max() <= 1
    same = quantization_error(drawn, [dataclasses.replace(own) for own in drawn])
    assert (same["noise_pred_relative_l2"], same["latents_relative_l2"], same["psnr_db"]) == (0, 0, None)


def test_the_transformer_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    class Small(diffusers.QwenImageTransformer2DModel):  # type: ignore[misc]
        def __init__(self, num_layers: int) -> None:
            super().__init__(
                num_layers=num_layers,
                num_attention_heads=2,
                attention_head_dim=32,
                axes_dims_rope=(8, 12, 12),
                joint_attention_dim=64,
            )

    monkeypatch.setattr(diffusers, "QwenImageTransformer2DModel", Small)
    before = torch.get_rng_state()
    try:
        first = build_transformer(torch.device("cpu"), num_layers=2)
        torch.rand(7)
        second = build_transformer(torch.device("cpu"), num_layers=2)
    finally:
        torch.set_rng_state(before)
    for name, weight in first.state_dict().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, second.state_dict()[name]), name
