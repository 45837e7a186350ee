"""The plan against closed forms, brute force and ``resolve_row``."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_diffusion.data.plan import (
    PackingModel,
    PlanBuilder,
    assign_shards,
    estimate_text_tokens,
    task_shards,
)
from offline_diffusion.data.rows import ManifestRow, RowDefaults, RowFault, resolve_row
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


@given(st.integers(0, 200), st.integers(1, 20))
def test_every_shard_has_one_owner(num_shards: int, num_tasks: int) -> None:
    owned = [shard for task in range(num_tasks) for shard in task_shards(num_shards, num_tasks, task)]
    assert sorted(owned) == list(range(num_shards))


@given(st.integers(1, 100), st.integers(1, 20), st.integers(1, 50))
def test_more_shards_do_not_move_the_old_ones(num_shards: int, num_tasks: int, more: int) -> None:
    for task in range(num_tasks):
        old = list(task_shards(num_shards, num_tasks, task))
        assert list(task_shards(num_shards + more, num_tasks, task))[: len(old)] == old


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


def brute_force_steps(images: list[tuple[int, int]], budget: int, max_num_seqs: int) -> tuple[int, float]:
    """Step by step: admit in order while there is room, then every running image does a step."""
    waiting, running, used = list(images), [], []
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            tokens = min(waiting[0][0], budget)
            if tokens + sum(token for token, _ in running) > budget:
                break
            running.append((tokens, waiting.pop(0)[1]))
        used.append(sum(tokens for tokens, _ in running))
        running = [(tokens, steps - 1) for tokens, steps in running if steps > 1]
    return len(used), sum(used) / (len(used) * budget)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=30),
    st.integers(1, 100),
    st.integers(1, 5),
)
def test_packing_model_is_first_in_first_out(
    images: list[tuple[int, int]], budget: int, max_num_seqs: int
) -> None:
    model = PackingModel(budget, max_num_seqs)
    for tokens, steps in images:
        model.add(tokens, steps)
    num_steps, fill = brute_force_steps(images, budget, max_num_seqs)
    assert model.num_steps == num_steps
    assert model.step_fill == pytest.approx(fill)


def test_an_empty_manifest_has_a_plan() -> None:
    plan = make_builder().finish(num_tasks=3)
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
    builder = make_builder(shard_size=2)
    for number in range(5):
        builder.add(make_fault(number) if number in (2, 3) else make_row(number))
    plan = builder.finish(num_tasks=3)
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
