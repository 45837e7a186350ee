"""``offdiff validate``: every fault of every row."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import click

from offline_diffusion.cli.options import gather_values, manifest_options, model_options, row_options
from offline_diffusion.cli.progress import ticking
from offline_diffusion.config import make_job_config
from offline_diffusion.progress import plural

EXIT_FAULTS = 3

_FIELDS = ("file", "line", "row", "id", "column", "value", "reason")


@click.command("validate")
@manifest_options
@model_options
@row_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a fault, one a line.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **given: Any) -> None:
    """List every fault of every row; loads no model weights.

    Prints `file:line: column=value: reason`, as rows are read; the line is the row's number in a
    file that has no lines. What the model cannot draw is a fault too. Exits with 3 when there is a
    faulty row, and with 1 when a file cannot be used at all.

    \b
    Example:
      offdiff validate manifests/quickstart.jsonl
      offdiff validate --job jobs/promptset.yaml --json
    """
    from offline_diffusion.data.validate import validate
    from offline_diffusion.job import row_defaults
    from offline_diffusion.models.registry import capabilities_for
    from offline_diffusion.preparation import manifest_of

    # Nothing is written, so a folder need not be named.
    values, spelling = gather_values({**given, "out": "."})
    config = make_job_config(values, spelling=spelling)
    manifest = manifest_of(config, say=partial(click.echo, err=True))
    capabilities = capabilities_for(config.model, config.revision)
    faults = validate(manifest, capabilities=capabilities, defaults=row_defaults(config))
    num_faults = 0
    with ticking(lambda: f"validating: {plural(faults.num_rows, 'row')}"):
        for fault in faults:
            num_faults += 1
            fields = {name: getattr(fault, name) for name in _FIELDS}
            click.echo(json.dumps(fields) if as_json else str(fault))
    for note in manifest.notes:
        click.echo(note, err=True)
    found = (
        f"{plural(num_faults, 'fault')} in {plural(faults.num_faulty_rows, 'row')}"
        if num_faults
        else "no faults"
    )
    click.echo(f"{plural(faults.num_rows, 'row')}, {plural(faults.num_images, 'image')}: {found}", err=True)
    ctx.exit(EXIT_FAULTS if num_faults else 0)
