"""``offdiff plan``: what a job would cost."""

from __future__ import annotations

import dataclasses
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from offline_diffusion.cli.cost_record import ENOUGH_IMAGES, ENOUGH_SECONDS, CostRecord, recall
from offline_diffusion.cli.options import (
    budget_options,
    build_config,
    compute_options,
    job_option,
    manifest_options,
    model_options,
    row_options,
    schedule_options,
    shard_options,
)
from offline_diffusion.cli.progress import ticking
from offline_diffusion.cli.text import duration, quantity, table
from offline_diffusion.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from offline_diffusion.progress import plural

if TYPE_CHECKING:
    from offline_diffusion.config import JobConfig
    from offline_diffusion.data.plan import Plan, TaskLoad
    from offline_diffusion.engine.cost import CostModel

ASSUMED_TFLOPS = 400.0
"""About what one H200 reaches in bfloat16 when its steps are full."""

MAX_LINES = 12
"""Of each histogram; ``--json`` has all."""


class Estimate(NamedTuple):
    """How long a task takes, by a cost model or else by its FLOPs, and why that is believed."""

    cost: CostModel | None
    flops_per_s: float | None
    basis: str

    def seconds(self, task: TaskLoad) -> float:
        """Of a task from its first step to its last image."""
        if self.cost is None:
            assert self.flops_per_s is not None
            return task.flops / self.flops_per_s
        return self.cost.seconds(
            num_steps=task.num_steps,
            num_tokens=task.step_tokens,
            sum_squares=task.step_squares,
            num_images=task.num_images,
            num_pixels=task.num_pixels,
            num_prompts=task.num_prompts,
        )


@click.command("plan")
@manifest_options
@model_options
@row_options
@schedule_options
@budget_options
@compute_options
@shard_options
@job_option("--num-tasks", "Tasks that share the job, each on a device of its own.", metavar="N")
@click.option(
    "--tflops",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="TFLOP/s that a task reaches, for the time estimate.  [default: a cost model fitted to an earlier "
    f"run of the model, else {ASSUMED_TFLOPS:.0f}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every size, step count and task.")
def command(as_json: bool, tflops: float | None, **given: Any) -> None:
    """Say what a job would cost, without running it.

    Reads the manifest once and the model's configuration files, no weights. Every estimate names
    what it rests on.

    \b
    Example:
      offdiff plan manifests/quickstart.jsonl
      offdiff plan --job jobs/promptset.yaml --num-tasks 8 --json
    """
    # A plan writes nothing, so a folder need not be named.
    config = build_config({**given, "out": "."})
    record = recall(config)
    estimate = _estimate(tflops, record)
    budget_basis = "as given"
    if config.max_num_batched_tokens is None:
        budget, budget_basis = likely_budget(config, record)
        config = config.model_copy(update={"max_num_batched_tokens": budget})
    plan = _scan(config)
    if as_json:
        click.echo(json.dumps({**_to_dict(config, plan, estimate), "budget_basis": budget_basis}))
    else:
        click.echo(_to_text(config, plan, estimate, budget_basis))


def likely_budget(config: JobConfig, record: CostRecord | None) -> tuple[int, str]:
    """What `run` would measure at start, and why that is believed."""
    if record is not None and not record.budget_was_given:
        return record.max_num_batched_tokens, "as the last run measured it"
    from offline_diffusion.models.registry import capabilities_for

    budget = capabilities_for(config.model, config.revision).own_tokens(DEFAULT_MAX_NUM_BATCHED_TOKENS)
    return budget, "the default of a CPU; `run` measures it on a GPU"


def _scan(config: JobConfig) -> Plan:
    """Reads the manifest, twice where several tasks share it: whose a shard is is known only at its end."""
    from offline_diffusion.data.plan import PlanBuilder, assign_shards
    from offline_diffusion.data.scan import scan
    from offline_diffusion.data.work import ShardCosts, WorkMeter
    from offline_diffusion.engine.scheduler import LOOK_AHEAD
    from offline_diffusion.job import row_defaults
    from offline_diffusion.models.registry import capabilities_for
    from offline_diffusion.preparation import manifest_of

    assert config.max_num_batched_tokens is not None
    capabilities, defaults = capabilities_for(config.model, config.revision), row_defaults(config)
    manifest = manifest_of(config, say=partial(click.echo, err=True))
    shares = None
    if config.num_tasks > 1:
        costs = ShardCosts(WorkMeter(capabilities, defaults), config.shard_size)
        with ticking(lambda: f"scanning the manifest: {plural(len(costs.values), 'shard')}"):
            for row in manifest.read():
                costs.add(row)
        shares = assign_shards(costs.values, config.num_tasks)
    builder = PlanBuilder(
        capabilities,
        defaults,
        shard_size=config.shard_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        look_ahead=LOOK_AHEAD if config.scheduling_policy != "fifo" and config.step_execution else 1,
        shares=shares,
        image_format=config.image_format,
    )
    with ticking(lambda: f"scanning the manifest: {plural(builder.num_rows, 'row')}"):
        scan(manifest, on_row=builder.add)
    for note in manifest.notes:
        click.echo(note, err=True)
    return builder.finish()


def _estimate(tflops: float | None, record: CostRecord | None) -> Estimate:
    if tflops is not None:
        return Estimate(None, tflops * 1e12, f"--tflops {tflops:g}")
    if record is not None:
        day = time.strftime("%Y-%m-%d", time.localtime(record.measured_at))
        steps = plural(record.num_steps, "step")
        basis = f"cost model measured on {record.device} over {steps} on {day}"
        return Estimate(record.cost_model(), None, basis)
    return Estimate(
        None,
        ASSUMED_TFLOPS * 1e12,
        f"assumed {ASSUMED_TFLOPS:.0f} TFLOP/s, about one H200 in bfloat16; give --tflops, or let a run "
        f"take {ENOUGH_SECONDS:.0f} s or draw {ENOUGH_IMAGES} images",
    )


def _to_dict(config: JobConfig, plan: Plan, estimate: Estimate) -> dict[str, Any]:
    values = plan.to_dict()
    seconds = [estimate.seconds(task) for task in plan.tasks]
    for task, its_seconds in zip(values["tasks"], seconds, strict=True):
        task["seconds"] = its_seconds
    return {
        "model": config.model,
        "num_tasks": config.num_tasks,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        **values,
        "num_faulty_rows": plan.num_rows - plan.num_good_rows,
        "time_basis": estimate.basis,
        "flops_per_s": estimate.flops_per_s,
        "cost": dataclasses.asdict(estimate.cost) if estimate.cost else None,
        "seconds": max(seconds),
        "device_seconds": sum(seconds),
    }


def _to_text(config: JobConfig, plan: Plan, estimate: Estimate, budget_basis: str) -> str:
    parts = [
        _summary(config, plan, estimate, budget_basis),
        _histogram("size", [(f"{w}x{h}", n) for (w, h), n in plan.resolutions.items()]),
        _histogram("steps", [(str(steps), n) for steps, n in plan.inference_steps.items()]),
        _tasks(plan, estimate),
    ]
    return "\n\n".join(part for part in parts if part)


def _summary(config: JobConfig, plan: Plan, estimate: Estimate, budget_basis: str) -> str:
    seconds = max(estimate.seconds(task) for task in plan.tasks)
    per_pixel = f"estimated from the pixels, {config.image_format}"
    lines = [
        ("model", config.model),
        ("rows", f"{plan.num_rows:,}, of them {plan.num_rows - plan.num_good_rows:,} faulty"),
        ("images", f"{plan.num_images:,}, of them {plan.num_cfg_images:,} with guidance"),
        ("tokens", f"{quantity(plan.image_tokens)} image, {quantity(plan.text_tokens)} text (estimated: "
                   f"a token is 4 bytes of UTF-8); {quantity(plan.step_tokens)} over all steps"),
        ("work", f"{quantity(plan.flops, 'FLOP')} in denoise steps"),
        ("packing", f"{plan.step_fill:.0%} of {config.max_num_batched_tokens:,} tokens ({budget_basis}) "
                    f"filled over {plural(plan.num_steps, 'step')} ({_simulated(config)})"),
        ("memory", f"at least {quantity(plan.step_bytes, 'B')} for such a step and the blocks in 16 bits"),
        ("output", f"{quantity(plan.output_bytes, 'B')} ({per_pixel})"),
        ("shards", f"{plan.num_shards:,} of {plural(config.shard_size, 'row')}"),
        ("time", f"{duration(seconds)} on {plural(config.num_tasks, 'task')} ({estimate.basis})"),
    ]  # fmt: skip
    if plan.num_guidance_off_rows:
        rows = plural(plan.num_guidance_off_rows, "row")
        lines.append(("warning", f"guidance is off in {rows}: true_cfg_scale > 1 without a negative prompt"))
    lines += [("cannot draw", f"{plural(count, 'row')}: {why}") for why, count in _first(plan.faults)]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _simulated(config: JobConfig) -> str:
    if not config.step_execution:
        return "simulated in step mode; waves take more"
    return "simulated as packed; same_shape takes more" if config.batching == "same_shape" else "simulated"


def _first(counts: dict[str, int]) -> list[tuple[str, int]]:
    first = list(counts.items())[:MAX_LINES]
    rest = sum(counts.values()) - sum(count for _, count in first)
    return [*first, ("other reasons", rest)] if rest else first


def _histogram(name: str, counts: list[tuple[str, int]]) -> str:
    if not counts:
        return ""
    total = sum(count for _, count in counts)
    shown, rest = counts[:MAX_LINES], sum(count for _, count in counts[MAX_LINES:])
    rows = [[label, f"{count:,}", f"{count / total:.1%}"] for label, count in shown]
    if rest:
        rows.append([f"{len(counts) - MAX_LINES:,} more", f"{rest:,}", f"{rest / total:.1%}"])
    return table([name, "images", "share"], rows)


def _tasks(plan: Plan, estimate: Estimate) -> str:
    if len(plan.tasks) == 1 or not plan.flops:
        return ""
    rows = [
        [
            str(task.task_index),
            f"{task.num_shards:,}",
            quantity(task.flops, "FLOP"),
            duration(estimate.seconds(task)),
        ]
        for task in plan.tasks[:MAX_LINES]
    ]
    if len(plan.tasks) > MAX_LINES:
        rows.append([f"{len(plan.tasks) - MAX_LINES:,} more", "", "", ""])
    mean = plan.flops / len(plan.tasks)
    balance = (
        f"busiest task: {plan.slowest_task_flops / mean:.2f} of the mean; who is done first helps the others"
    )
    return f"{table(['task', 'shards', 'work', 'time'], rows)}\n{balance}"
