"""The simulated schedule against brute force, and against the engine's own scheduler."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.data.packing import PackingModel
from offline_diffusion.engine.scheduler import LOOK_AHEAD, ScheduledRequest, Scheduler

Images = list[tuple[int, int]]
"""Tokens and steps of each."""


def simulated(
    images: Images, budget: int, max_num_seqs: int, look_ahead: int, keys: list[int] | None = None
) -> PackingModel:
    model = PackingModel(budget, max_num_seqs, look_ahead)
    for (tokens, steps), key in zip(images, keys or [0] * len(images), strict=True):
        model.add(tokens, steps, key)
    model.drain()
    return model


def brute_force_steps(images: Images, budget: int, max_num_seqs: int, look_ahead: int) -> tuple[int, float]:
    """Step by step: whoever of the first ``look_ahead`` waiting fits joins, most work first."""
    waiting = [(min(tokens, budget), steps) for tokens, steps in images]
    running: Images = []
    used = []
    while waiting or running:
        while True:
            room = budget - sum(tokens for tokens, _ in running)
            fits = [image for image in waiting[:look_ahead] if image[0] <= room]
            if not fits or len(running) == max_num_seqs:
                break
            chosen = max(fits, key=lambda image: image[0] * image[1])  # the first of equals
            waiting.remove(chosen)
            running.append(chosen)
        used.append(sum(tokens for tokens, _ in running))
        running = [(tokens, steps - 1) for tokens, steps in running if steps > 1]
    return len(used), sum(used) / (len(used) * budget)


image_lists = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=30)


@given(image_lists, st.integers(1, 100), st.integers(1, 5))
def test_without_looking_ahead_it_is_first_in_first_out(
    images: Images, budget: int, max_num_seqs: int
) -> None:
    model = simulated(images, budget, max_num_seqs, 1)
    num_steps, fill = brute_force_steps(images, budget, max_num_seqs, 1)
    assert model.num_steps == num_steps
    assert model.step_fill == pytest.approx(fill)


@given(image_lists, st.integers(1, 100), st.integers(1, 5), st.integers(1, 8))
def test_no_image_is_lost(images: Images, budget: int, max_num_seqs: int, look_ahead: int) -> None:
    model = simulated(images, budget, max_num_seqs, look_ahead)
    work = sum(min(tokens, budget) * steps for tokens, steps in images)
    assert model.step_fill * model.num_steps * budget == pytest.approx(work)
    assert model.step_fill <= 1 + 1e-9
    assert max(steps for _, steps in images) <= model.num_steps <= sum(steps for _, steps in images)


def test_no_images_take_no_steps() -> None:
    model = simulated([], 100, 4, 8)
    assert (model.num_steps, model.step_fill) == (0, 0.0)


def scheduled_steps(images: Images, budget: int, max_num_seqs: int, keys: list[int] | None = None) -> int:
    """What the engine's scheduler makes of it when the queue is kept as long as the job keeps it."""
    scheduler = Scheduler(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, policy="pack")
    source: Iterator[tuple[int, tuple[int, int]]] = iter(enumerate(images))
    num_steps = 0
    while True:
        while not scheduler.no_more_requests and len(scheduler.waiting) < LOOK_AHEAD:
            if (item := next(source, None)) is None:
                scheduler.no_more_requests = True
                break
            key = 0 if keys is None else keys[item[0]]
            scheduler.add(ScheduledRequest(str(item[0]), *item[1], batch_key=key))
        if not scheduler.schedule().running:
            return num_steps
        num_steps += 1
        scheduler.advance()


SIZES = {
    "256 to 1024 px": [256, 576, 1024, 1600, 2304, 4096],
    "small": [256, 320, 400],
    "with 1536 px": [1024, 2304, 4096, 4096, 9216],
    "one size": [1024],
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("count", "max_num_seqs"), [(80, 128), (300, 64), (600, 16)])
def test_the_engine_takes_as_many_steps(name: str, count: int, max_num_seqs: int) -> None:
    rng = random.Random(7)
    images = []
    for _ in range(count):
        branches = 2 if rng.random() < 0.8 else 1
        images.append(((rng.choice(SIZES[name]) + rng.randint(3, 60)) * branches, rng.choice([8, 12, 20])))
    expected = scheduled_steps(images, 16_384, max_num_seqs)
    model = simulated(images, 16_384, max_num_seqs, LOOK_AHEAD)
    assert model.num_steps == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("count", [40, 300, 600])
def test_the_engine_takes_as_many_steps_where_only_one_shape_shares_a_step(count: int) -> None:
    rng = random.Random(3)
    keys = [rng.choice([1024, 2304, 4096]) for _ in range(count)]
    images = [((key + 77) * rng.choice([1, 2]), rng.choice([8, 12, 20])) for key in keys]
    expected = scheduled_steps(images, 16_384, 64, keys)
    model = simulated(images, 16_384, 64, LOOK_AHEAD, keys)
    mixed = simulated(images, 16_384, 64, LOOK_AHEAD)
    assert model.num_steps == pytest.approx(expected, rel=0.1)
    assert model.num_steps > mixed.num_steps


def test_each_shape_has_steps_of_its_own() -> None:
    """By hand: two images of a shape fit a step, so three shapes of two take three chains of 5 steps."""
    model = simulated([(10, 5)] * 6, 100, 8, 8, keys=[1, 2, 3, 1, 2, 3])
    assert model.num_steps == 15
    assert model.step_fill == pytest.approx(0.2)
