"""``offdiff models``: what can be drawn with, and what works on this machine."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import TYPE_CHECKING, Any, get_args

import click

from offline_diffusion.cli.options import build_model, model_options
from offline_diffusion.cli.text import table
from offline_diffusion.config import BUILT_IN_MODELS, EngineConfig

if TYPE_CHECKING:
    from offline_diffusion.models.registry import Family


@click.command("models")
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool, **given: Any) -> None:
    """List the model families and the backends that work here.

    Limits and defaults are those of --model; only its configuration files are read.

    \b
    Example:
      offdiff models
      offdiff models --model Qwen/Qwen-Image --json
    """
    report = _collect(*build_model(given))
    if as_json:
        click.echo(json.dumps(report, default=_plain))
    else:
        _print_report(report)


def _collect(model: str, revision: str | None) -> dict[str, Any]:
    from offline_diffusion.attention.backends import available_backends
    from offline_diffusion.models.loader import resolve_device, resolve_dtype
    from offline_diffusion.models.modes import ExecutionMode
    from offline_diffusion.models.registry import FAMILIES, capabilities_for

    device = resolve_device("auto")
    dtype = resolve_dtype("auto", device)
    return {
        "families": [_family(family) for family in FAMILIES],
        "built_in": BUILT_IN_MODELS,
        "execution_modes": {mode.value: mode.options for mode in ExecutionMode}
        | {"previews": "--diffusion-streaming-output"},
        "model": model,
        "capabilities": dataclasses.asdict(capabilities_for(model, revision)),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "attention_backends": [dataclasses.asdict(status) for status in available_backends(device, dtype)],
        "quantization": list(get_args(EngineConfig.model_fields["quantization"].annotation)),
    }


def _family(family: Family) -> dict[str, Any]:
    """``modes`` has for each execution mode, and for previews, why the family cannot do it, or None."""
    from offline_diffusion.models.modes import ExecutionMode, mode_fault, preview_fault

    return {
        "name": family.name,
        "pipeline": family.pipeline,
        "batching": family.batch_kind.value,
        "example": family.example,
        "modes": {mode.value: mode_fault(mode, family.batch_kind) for mode in ExecutionMode}
        | {"previews": preview_fault(family.batch_kind)},
    }


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else str(value)


def _print_modes(report: dict[str, Any]) -> None:
    """Which execution modes each family can do, why not, and how to ask for them."""
    modes = report["execution_modes"]
    cells = [
        [family["name"], *("yes" if family["modes"][mode] is None else "no" for mode in modes)]
        for family in report["families"]
    ]
    click.echo(table(["execution mode of", *modes], cells))
    for family in report["families"]:
        for mode, fault in family["modes"].items():
            if fault is not None:
                click.echo(f"  {family['name']} cannot do {mode}: {fault}")
    for mode, options in modes.items():
        click.echo(f"  {mode:<13} {options}")


def _print_report(report: dict[str, Any]) -> None:
    columns = ["name", "pipeline", "batching", "example"]
    families = [[family[column] for column in columns] for family in report["families"]]
    click.echo(table(["family", *columns[1:]], families))
    click.echo()
    click.echo("models by name, nothing to download:")
    for name, about in report["built_in"].items():
        click.echo(f"  {name:<13} {about}")
    click.echo()
    _print_modes(report)
    capabilities = [[name, str(_plain(value))] for name, value in report["capabilities"].items()]
    click.echo()
    click.echo(table([f"capability of {report['model']}", "value"], capabilities))
    click.echo()
    click.echo(f"attention backends on {report['device']} in {report['dtype']}, best first:")
    for status in report["attention_backends"]:
        if status["works"]:
            click.echo(f"  {status['name']:<13} works")
        else:
            click.echo(f"  {status['name']:<13} no: {status['why_not']}")
            click.echo(f"  {'':<13} hint: {status['hint']}")
    click.echo(f"quantization: {', '.join(report['quantization'])}")
