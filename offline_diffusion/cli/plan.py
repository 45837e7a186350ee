"""``offdiff plan``: what a job would cost."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from offline_diffusion.cli.options import (
    budget_options,
    build_config,
    job_option,
    manifest_options,
    model_options,
    row_options,
    shard_options,
)
from offline_diffusion.cli.progress import ticking
from offline_diffusion.cli.text import duration, quantity, table
from offline_diffusion.cli.throughput import recall
from offline_diffusion.progress import plural

if TYPE_CHECKING:
    from offline_diffusion.config import JobConfig
    from offline_diffusion.data.plan import Plan

ASSUMED_TFLOPS = 400.0
"""About what one H200 reaches in bfloat16 when its steps are full."""

MAX_LINES = 12
"""Of each histogram; ``--json`` has all."""


class Rate(NamedTuple):
    """How fast a task works, and why that is believed."""

    flops_per_s: float
    basis: str


@click.command("plan")
@manifest_options
@model_options
@row_options
@budget_options
@shard_options
@job_option("--num-tasks", "Tasks that share the job, each on a device of its own.", metavar="N")
@click.option(
    "--tflops",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="TFLOP/s that a task reaches, for the time estimate.  [default: measured by an earlier run of the "
    f"model, else {ASSUMED_TFLOPS:.0f}]",
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
    rate = _rate(config, tflops)
    plan = _scan(config)
    if as_json:
        click.echo(json.dumps(_to_dict(config, plan, rate)))
    else:
        click.echo(_to_text(config, plan, rate))


def _scan(config: JobConfig) -> Plan:
    from offline_diffusion.data.manifest import open_manifest
    from offline_diffusion.data.plan import PlanBuilder
    from offline_diffusion.data.scan import scan
    from offline_diffusion.job import row_defaults
    from offline_diffusion.models.registry import capabilities_for

    builder = PlanBuilder(
        capabilities_for(config.model, config.revision),
        row_defaults(config),
        shard_size=config.shard_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        image_format=config.image_format,
    )
    manifest = open_manifest(config.manifests, column_map=config.map, limit=config.limit)
    with ticking(lambda: f"scanning the manifest: {plural(builder.num_rows, 'row')}"):
        scan(manifest, on_row=builder.add)
    for note in manifest.notes:
        click.echo(note, err=True)
    return builder.finish(config.num_tasks)


def _rate(config: JobConfig, tflops: float | None) -> Rate:
    if tflops is not None:
        return Rate(tflops * 1e12, f"--tflops {tflops:g}")
    if record := recall(config.model):
        day = time.strftime("%Y-%m-%d", time.localtime(record.measured_at))
        images = plural(record.num_images, "image")
        length = f"{images} in {duration(record.seconds)}"
        return Rate(record.flops_per_s, f"measured on {record.device} over {length} on {day}")
    return Rate(
        ASSUMED_TFLOPS * 1e12,
        f"assumed {ASSUMED_TFLOPS:.0f} TFLOP/s, about one H200 in bfloat16; give --tflops, or run once",
    )


def _to_dict(config: JobConfig, plan: Plan, rate: Rate) -> dict[str, Any]:
    return {
        "model": config.model,
        "num_tasks": config.num_tasks,
        **plan.to_dict(),
        "num_faulty_rows": plan.num_rows - plan.num_good_rows,
        "flops_per_s": rate.flops_per_s,
        "time_basis": rate.basis,
        "seconds": plan.slowest_task_flops / rate.flops_per_s,
        "device_seconds": plan.flops / rate.flops_per_s,
    }


def _to_text(config: JobConfig, plan: Plan, rate: Rate) -> str:
    parts = [
        _summary(config, plan, rate),
        _histogram("size", [(f"{w}x{h}", n) for (w, h), n in plan.resolutions.items()]),
        _histogram("steps", [(str(steps), n) for steps, n in plan.inference_steps.items()]),
        _tasks(plan, rate),
    ]
    return "\n\n".join(part for part in parts if part)


def _summary(config: JobConfig, plan: Plan, rate: Rate) -> str:
    seconds = plan.slowest_task_flops / rate.flops_per_s
    per_pixel = f"estimated from the pixels, {config.image_format}"
    lines = [
        ("model", config.model),
        ("rows", f"{plan.num_rows:,}, of them {plan.num_rows - plan.num_good_rows:,} faulty"),
        ("images", f"{plan.num_images:,}, of them {plan.num_cfg_images:,} with guidance"),
        ("tokens", f"{quantity(plan.image_tokens)} image, {quantity(plan.text_tokens)} text (estimated: "
                   f"a token is 4 bytes of UTF-8); {quantity(plan.step_tokens)} over all steps"),
        ("work", f"{quantity(plan.flops, 'FLOP')} in denoise steps"),
        ("packing", f"{plan.step_fill:.0%} of {config.max_num_batched_tokens:,} tokens filled over "
                    f"{plural(plan.num_steps, 'step')} (one worker, in the manifest's order)"),
        ("output", f"{quantity(plan.output_bytes, 'B')} ({per_pixel})"),
        ("shards", f"{plan.num_shards:,} of {plural(config.shard_size, 'row')}"),
        ("time", f"{duration(seconds)} on {plural(config.num_tasks, 'task')} ({rate.basis})"),
    ]  # fmt: skip
    if plan.num_guidance_off_rows:
        rows = plural(plan.num_guidance_off_rows, "row")
        lines.append(("warning", f"guidance is off in {rows}: true_cfg_scale > 1 without a negative prompt"))
    lines += [("cannot draw", f"{plural(count, 'row')}: {why}") for why, count in _first(plan.faults)]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


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


def _tasks(plan: Plan, rate: Rate) -> str:
    if len(plan.tasks) == 1 or not plan.flops:
        return ""
    rows = [
        [
            str(task.task_index),
            f"{task.num_shards:,}",
            quantity(task.flops, "FLOP"),
            duration(task.flops / rate.flops_per_s),
        ]
        for task in plan.tasks[:MAX_LINES]
    ]
    if len(plan.tasks) > MAX_LINES:
        rows.append([f"{len(plan.tasks) - MAX_LINES:,} more", "", "", ""])
    mean = plan.flops / len(plan.tasks)
    balance = (
        f"busiest task: {plan.slowest_task_flops / mean:.2f} of the mean; with shards dealt out by cost it "
        f"would be {plan.balanced_flops / mean:.2f}"
    )
    return f"{table(['task', 'shards', 'work', 'time'], rows)}\n{balance}"
