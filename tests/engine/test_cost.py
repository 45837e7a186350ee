"""The cost model against closed forms: samples made from known terms."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import astuple, replace

import pytest

from offline_diffusion.engine.cost import (
    MIN_STEPS,
    CostMeter,
    CostModel,
    StepSample,
    square_ratio,
)

HIDDEN = 3072
RATIO = 1 / (6 * HIDDEN)
"""4·S²·H over 24·H²·S."""

TERMS = CostModel(
    fixed_s=0.02, token_s=2e-5, square_s=3e-9, image_s=0.005, pixel_s=8e-8, prompt_s=0.03
)  # fmt: skip
"""A step of 8 × 1,100 tokens is 0.2 s and a decode of 512² is 0.026 s."""


def fit_cost_model(samples: Iterable[StepSample], square_ratio: float = 0.0) -> CostModel | None:
    meter = CostMeter()
    for sample in samples:
        meter.add(sample)
    return meter.fit(square_ratio)


def step_seconds(terms: CostModel, num_tokens: float, sum_squares: float) -> float:
    return terms.seconds(num_steps=1, num_tokens=num_tokens, sum_squares=sum_squares)


def seconds_of(work: StepSample, terms: CostModel = TERMS) -> float:
    """By hand, in the order of the fields."""
    amounts = (
        work.num_steps,
        work.num_tokens,
        work.sum_squares,
        work.num_images,
        work.num_pixels,
        work.num_prompts,
    )
    return sum(amount * term for amount, term in zip(amounts, astuple(terms), strict=True))


def make_samples(
    count: int = 400, *, lengths: tuple[int, ...] = (300, 1100, 2400, 4160), noise: float = 0.0, seed: int = 0
) -> list[StepSample]:
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        in_step = rng.choices(lengths, k=rng.randint(1, 12))
        images = rng.choice([0, 0, 1, 2])
        pixels = sum(rng.choices([256**2, 512**2, 1024**2], k=images))
        work = StepSample(
            sum(in_step), sum(s * s for s in in_step), 0.0, 1, images, pixels, rng.choice([0, 0, 0, 1])
        )
        samples.append(replace(work, seconds=seconds_of(work) * rng.gauss(1, noise)))
    return samples


def test_the_terms_are_found_again() -> None:
    fitted = fit_cost_model(make_samples(), RATIO)
    assert fitted is not None
    assert astuple(fitted) == pytest.approx(astuple(TERMS), rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_the_time_of_a_step_little(seed: int) -> None:
    fitted = fit_cost_model(make_samples(noise=0.1, seed=seed), RATIO)
    assert fitted is not None
    for length, count in ((300, 20), (1100, 8), (4160, 2), (4160, 4)):
        step = StepSample(length * count, length**2 * count, 0.0)
        assert step_seconds(fitted, step.num_tokens, step.sum_squares) == pytest.approx(
            seconds_of(step), rel=0.1
        )


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_terms_come_to_the_measured_time(noise: float) -> None:
    """Least squares of relative errors alone come out too low by about the noise squared."""
    samples = make_samples(noise=noise)
    fitted = fit_cost_model(samples, RATIO)
    assert fitted is not None
    assert sum(seconds_of(sample, fitted) for sample in samples) == pytest.approx(
        sum(s.seconds for s in samples)
    )


def test_steps_that_are_all_alike_split_as_the_flops_do() -> None:
    """16 equal sequences a step: one equation, so a fourth of the length is a fourth of the FLOPs."""
    work = StepSample(16 * 4160, 16 * 4160**2, seconds=2.0)
    fitted = fit_cost_model([work] * 40, RATIO)
    assert fitted is not None
    assert step_seconds(fitted, work.num_tokens, work.sum_squares) == pytest.approx(2.0, rel=1e-3)
    shorter = (
        2.0 * (24 * HIDDEN**2 * 1040 + 4 * 1040**2 * HIDDEN) / (24 * HIDDEN**2 * 4160 + 4 * 4160**2 * HIDDEN)
    )
    assert step_seconds(fitted, 16 * 1040, 16 * 1040**2) == pytest.approx(shorter, rel=1e-3)


def test_one_length_in_steps_of_unlike_size_tells_the_fixed_time() -> None:
    samples = [
        replace(s, seconds=seconds_of(s))
        for n in range(1, 41)
        for s in [StepSample(1100 * n, 1100**2 * n, 0)]
    ]
    fitted = fit_cost_model(samples, RATIO)
    assert fitted is not None
    assert fitted.fixed_s == pytest.approx(TERMS.fixed_s, rel=0.05)
    for n in (1, 8, 40):
        assert step_seconds(fitted, 1100 * n, 1100**2 * n) == pytest.approx(
            seconds_of(samples[n - 1]), rel=0.03
        )


def test_images_of_one_size_cost_by_their_pixels() -> None:
    """Count and pixels always come together; a larger image is then taken to cost more."""
    steps = make_samples(lengths=(300, 1100))
    samples = [replace(s, num_images=1, num_pixels=256**2, num_prompts=0) for s in steps[::2]] + [
        replace(s, num_images=0, num_pixels=0, num_prompts=0) for s in steps[1::2]
    ]
    fitted = fit_cost_model([replace(s, seconds=seconds_of(s)) for s in samples], RATIO)
    assert fitted is not None
    one = fitted.image_s + fitted.pixel_s * 256**2
    assert one == pytest.approx(TERMS.image_s + TERMS.pixel_s * 256**2, rel=0.1)
    assert fitted.image_s < 0.1 * one


def test_no_term_is_negative() -> None:
    """Long sequences that are cheaper than short ones: the best plain fit has a negative square."""
    samples = []
    for length in (100, 500, 1000, 2000):
        samples += [StepSample(length, length**2, 1e-3 * length - 2e-7 * length**2)] * 20
    fitted = fit_cost_model(samples)
    assert fitted is not None
    assert min(astuple(fitted)) == 0.0
    assert fitted.square_s == 0.0
    assert fitted.token_s > 0


def test_too_few_steps_determine_nothing() -> None:
    assert fit_cost_model([]) is None
    assert fit_cost_model(make_samples(MIN_STEPS - 1)) is None
    assert fit_cost_model(make_samples(MIN_STEPS)) is not None
    images = [StepSample(0, 0, 1.0, num_steps=0, num_images=1, num_pixels=9)] * 100
    assert fit_cost_model(images) is None


def test_what_a_step_began_and_the_next_felt_is_told_by_longer_samples() -> None:
    """Decodes slow the step after the one in whose time they were counted."""
    samples = make_samples(3_000)
    late = [
        replace(
            this,
            seconds=seconds_of(replace(this, num_images=before.num_images, num_pixels=before.num_pixels)),
        )
        for before, this in zip([StepSample(0, 0, 0), *samples], samples, strict=False)
    ]
    meter = CostMeter(sample_s=2.0)
    for sample in late:
        meter.add(sample)
    longer, as_they_are = meter.fit(RATIO), fit_cost_model(late, RATIO)
    assert longer is not None
    assert as_they_are is not None
    image = StepSample(0, 0, 0, 0, 1, 512**2)
    assert seconds_of(image, longer) == pytest.approx(seconds_of(image), rel=0.25)
    assert seconds_of(image, as_they_are) < 0.5 * seconds_of(image)


def test_what_a_fit_rests_on() -> None:
    meter = CostMeter(sample_s=10.0)
    for _ in range(20):
        meter.add(StepSample(5, 25, 0.25))
    meter.add(StepSample(0, 0, 1.0, num_steps=0, num_images=1))
    assert (meter.num_steps, meter.seconds) == (20, pytest.approx(6.0))
    meter.fit()
    assert (meter.num_steps, meter.seconds) == (20, pytest.approx(6.0))


def test_the_square_ratio_of_a_formula() -> None:
    assert square_ratio(lambda s: 24 * HIDDEN**2 * s * 60 + 4 * s**2 * HIDDEN * 60) == pytest.approx(RATIO)
