"""The plan against closed forms, brute force and ``resolve_row``."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_diffusion.data.plan import PlanBuilder, assign_shards
from offline_diffusion.data.rows import ManifestRow, RowDefaults, RowFault, resolve_row
from offline_diffusion.data.work import ShardCosts, WorkMeter, estimate_text_tokens
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import SamplingParams

CAPABILITIES = Capabilities(
    family="test", pipeline="Test", default_height=64, default_width=32, default_num_inference_steps=5,
    max_size=512, num_layers=2, hidden_size=8,
)  # fmt: skip


def make_row(number: int, prompt: str = "abcd", **params: object) -> ManifestRow:
    return ManifestRow(number, str(number), "m.jsonl", number + 1, "0", prompt, SamplingParams(**params), {})


def make_fault(number: int) -> RowFault:
    return RowFault(number, str(number), "m.jsonl", number + 1, "seed", "-1", "must be 0 or more")


def make_builder(defaults: RowDefaults | None = None, **options: object) -> PlanBuilder:
    limits = {"shard_size": 2, "max_num_batched_tokens": 1000, "max_num_seqs": 8} | options
    return PlanBuilder(CAPABILITIES, defaults or RowDefaults(), **limits)


@given(st.lists(st.floats(0, 100), max_size=200), st.integers(1, 20))
def test_every_shard_has_one_owner_and_shares_are_in_order(costs: list[float], num_tasks: int) -> None:
    shares = assign_shards(costs, num_tasks)
    assert len(shares) == num_tasks
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    assert all(owned == sorted(owned) for owned in shares)


@given(st.lists(st.floats(0, 100), max_size=7), st.integers(1, 3))
@settings(max_examples=60)
def test_assignment_is_a_partition_within_four_thirds_of_the_optimum(
    costs: list[float], num_tasks: int
) -> None:
    shards = assign_shards(costs, num_tasks)
    assert sorted(itertools.chain(*shards)) == list(range(len(costs)))
    busiest = max(sum(costs[shard] for shard in owned) for owned in shards)
    best = min(
        max(
            sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == task)
            for task in range(num_tasks)
        )
        for owners in itertools.product(range(num_tasks), repeat=len(costs))
    )
    assert busiest <= best * 4 / 3 + 1e-9


def test_assignment_is_deterministic_with_equal_costs() -> None:
    assert assign_shards([1.0] * 5, 2) == [[0, 2, 4], [1, 3]]


def test_a_plan_deals_the_shards_that_a_task_draws() -> None:
    """The plan of a share is what the shares from the costs of a scan are: one dear shard outweighs three."""
    rows = [make_row(n, num_inference_steps=30 if n < 2 else 10) for n in range(8)]
    costs = ShardCosts(WorkMeter(CAPABILITIES, RowDefaults()), 2)
    for row in rows:
        costs.add(row)
    shares = assign_shards(costs.values, 2)
    assert shares == [[0], [1, 2, 3]]
    builder = make_builder(shares=shares)
    for row in rows:
        builder.add(row)
    plan = builder.finish()
    assert [task.num_shards for task in plan.tasks] == [1, 3]
    assert [task.flops for task in plan.tasks] == pytest.approx([plan.flops / 2] * 2)
    assert plan.slowest_task_flops == pytest.approx(plan.flops / 2)


def test_an_empty_manifest_has_a_plan() -> None:
    plan = make_builder(shares=assign_shards([], 3)).finish()
    assert (plan.num_rows, plan.num_images, plan.num_shards, plan.step_fill) == (0, 0, 0, 0.0)
    assert [task.num_shards for task in plan.tasks] == [0, 0, 0]


def test_flops_and_tokens_of_one_row_by_hand() -> None:
    builder = make_builder()
    builder.add(
        make_row(0, "a" * 40, height=64, width=32, num_inference_steps=3, true_cfg_scale=2.0,
                 negative_prompt="", num_images_per_prompt=2)
    )  # fmt: skip
    plan = builder.finish()
    # 4 × 2 image tokens, 40 bytes are 10 tokens, an empty negative prompt is 1; H=8, L=2.
    forward = sum(24 * 8 * 8 * s * 2 + 4 * s * s * 8 * 2 for s in (8 + 10, 8 + 1))
    assert plan.flops == forward * 3 * 2
    assert (plan.image_tokens, plan.text_tokens, plan.step_tokens) == (32, 22, (18 + 9) * 3 * 2)
    assert (plan.num_images, plan.num_cfg_images) == (2, 2)
    assert plan.output_bytes == round(64 * 32 * 2 * 1.45)
    assert plan.resolutions == {(32, 64): 2}
    assert plan.inference_steps == {3: 2}


def test_what_a_cost_model_asks_by_hand() -> None:
    """Of three shards of two rows the second is another task's."""
    builder = make_builder(shard_size=2, shares=[[0, 2], [1]])
    guided = {"true_cfg_scale": 2.0, "negative_prompt": "bad!"}
    builder.add(make_row(0, "abcd", height=32, width=32, num_inference_steps=3, num_images_per_prompt=4))
    builder.add(make_row(1, "abcd" * 2, height=64, width=32, num_inference_steps=5, **guided))
    builder.add(make_row(2, "abcd", height=16, width=16, num_inference_steps=7))
    builder.add(make_row(4, "abcd" * 3, height=16, width=16, num_inference_steps=2, **guided))
    first, second = builder.finish().tasks
    # Sequences: 4 + 1 tokens, four times, 3 steps; 8 + 2 and 8 + 1, 5 steps; 1 + 3 and 1 + 1, 2 steps.
    assert first.step_tokens == 4 * 5 * 3 + 19 * 5 + 6 * 2
    assert first.step_squares == 4 * 25 * 3 + (100 + 81) * 5 + (16 + 4) * 2
    assert (first.num_images, first.num_pixels) == (6, 4 * 32 * 32 + 64 * 32 + 16 * 16)
    assert first.num_prompts == 1 + 2 + 1  # the negative prompt once
    assert first.num_steps == 5  # all fit together
    assert first.step_fill == pytest.approx(first.step_tokens / 5 / 1000)
    assert (second.step_tokens, second.step_squares, second.num_pixels) == (2 * 7, 4 * 7, 256)
    assert (second.num_images, second.num_steps) == (1, 7)
    plan = builder.finish()
    assert (plan.num_steps, plan.step_tokens) == (12, first.step_tokens + second.step_tokens)
    assert plan.step_fill == pytest.approx(plan.step_tokens / 12 / 1000)


def test_a_cropped_image_is_decoded_as_it_is_drawn() -> None:
    builder = make_builder(RowDefaults(on_bad_size="crop"))
    builder.add(make_row(0, height=30, width=17))
    plan = builder.finish()
    assert plan.tasks[0].num_pixels == 32 * 32
    assert plan.output_bytes == round(30 * 17 * 1.45)


def test_a_prompt_that_comes_again_soon_is_encoded_once() -> None:
    builder = make_builder()
    for number in range(5_000):
        builder.add(make_row(number, f"prompt {number % 2_000 if number >= 10 else 3}"))
    # The first ten are one; 2,000 in turn are forgotten before they come again.
    assert builder.finish().tasks[0].num_prompts == 1 + 4_990


def test_text_tokens_are_cut_at_the_models_limit() -> None:
    capabilities = replace(CAPABILITIES, max_prompt_tokens=7)
    builder = PlanBuilder(
        capabilities, RowDefaults(), shard_size=1, max_num_batched_tokens=10, max_num_seqs=1
    )
    builder.add(make_row(0, "word " * 1000))
    assert builder.finish().text_tokens == 7


@pytest.mark.parametrize("text", ["", "a", "\ud800"])
def test_a_text_has_at_least_one_token(text: str) -> None:
    assert estimate_text_tokens(text) == 1


def test_faulty_rows_cost_nothing_but_keep_their_shard() -> None:
    builder = make_builder(shard_size=2, shares=[[0], [1], [2]])
    for number in range(5):
        builder.add(make_fault(number) if number in (2, 3) else make_row(number))
    plan = builder.finish()
    assert (plan.num_rows, plan.num_good_rows, plan.num_shards) == (5, 3, 3)
    assert [task.flops > 0 for task in plan.tasks] == [True, False, True]
    assert sum(task.flops for task in plan.tasks) == pytest.approx(plan.flops)


def test_what_the_model_cannot_draw_is_counted_by_reason() -> None:
    builder = make_builder()
    for number, height in enumerate((50, 50, 48, 1024)):
        builder.add(make_row(number, height=height))
    builder.add(make_row(4, lora="pixel-art"))
    plan = builder.finish()
    assert plan.faults == {
        "height must be a multiple of 16, got 50": 2,
        "height must be at most 512, got 1024": 1,
        "lora is not supported for model family 'test'": 1,
    }
    assert plan.num_good_rows == 1


def test_rows_whose_guidance_is_off_for_want_of_a_negative_prompt() -> None:
    builder = make_builder()
    for number, params in enumerate(
        (
            {"true_cfg_scale": 4.0},
            {"true_cfg_scale": 1.0},
            {},
            {"true_cfg_scale": 4.0, "negative_prompt": " "},
        )
    ):
        builder.add(make_row(number, **params))
    plan = builder.finish()
    assert (plan.num_guidance_off_rows, plan.num_cfg_images) == (2, 1)  # the model's default is 4


def test_dict_has_json_types() -> None:
    builder = make_builder()
    builder.add(make_row(0))
    values = builder.finish().to_dict()
    assert values["resolutions"] == {"32x64": 1}
    assert values["inference_steps"] == {"5": 1}
    assert values["tasks"][0]["num_shards"] == 1


maybe = st.none()
params = st.builds(
    SamplingParams,
    height=maybe | st.integers(1, 600),
    width=maybe | st.sampled_from([16, 64, 100, 512]),
    num_inference_steps=maybe | st.integers(1, 60),
    true_cfg_scale=maybe | st.floats(0, 9),
    negative_prompt=maybe | st.sampled_from(["", " ", "blurry"]),
    num_images_per_prompt=st.integers(1, 4),
    lora=maybe | st.just("x"),
)
row_defaults = st.builds(
    RowDefaults,
    height=maybe | st.sampled_from([32, 33]),
    true_cfg_scale=maybe | st.floats(0, 9),
    negative_prompt=maybe | st.just("bad"),
    num_inference_steps=maybe | st.integers(1, 9),
    on_bad_size=st.sampled_from(["error", "round", "crop"]),
)


@given(st.lists(params, max_size=8), row_defaults)
def test_the_plan_counts_what_the_job_will_draw(rows: list[SamplingParams], defaults: RowDefaults) -> None:
    builder = make_builder(defaults)
    tasks = []
    for number, row_params in enumerate(rows):
        row = replace(make_row(number), params=row_params)
        builder.add(row)
        resolved = resolve_row(row, CAPABILITIES, defaults)
        tasks += [] if isinstance(resolved, RowFault) else resolved
    plan = builder.finish()
    requests = [task.request for task in tasks]
    assert plan.num_images == len(requests)
    assert plan.num_cfg_images == sum(request.cfg_active for request in requests)
    sizes = [(request.width, request.height) for request in requests]
    assert plan.resolutions == {size: sizes.count(size) for size in sizes}
    steps = [request.num_inference_steps for request in requests]
    assert plan.inference_steps == {count: steps.count(count) for count in steps}
    written = sum(task.final_height * task.final_width for task in tasks)
    assert plan.output_bytes == round(written * 1.45)
