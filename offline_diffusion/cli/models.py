"""``offdiff models``: what can be drawn with, and what works on this machine."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import Any, get_args

import click

from offline_diffusion.cli.options import build_model, model_options
from offline_diffusion.cli.text import table
from offline_diffusion.config import EngineConfig


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
    from offline_diffusion.models.registry import FAMILIES, capabilities_for

    device = resolve_device("auto")
    dtype = resolve_dtype("auto", device)
    return {
        "families": [
            {"name": f.name, "pipeline": f.pipeline, "batching": f.batch_kind.value, "example": f.example}
            for f in FAMILIES
        ],
        "model": model,
        "capabilities": dataclasses.asdict(capabilities_for(model, revision)),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "attention_backends": [dataclasses.asdict(status) for status in available_backends(device, dtype)],
        "quantization": list(get_args(EngineConfig.model_fields["quantization"].annotation)),
    }


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else str(value)


def _print_report(report: dict[str, Any]) -> None:
    families = [list(family.values()) for family in report["families"]]
    click.echo(table(["family", "pipeline", "batching", "example"], families))
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
