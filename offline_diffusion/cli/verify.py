"""``offdiff verify``: is the dataset whole?"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from offline_diffusion.cli.progress import ticking
from offline_diffusion.progress import plural

if TYPE_CHECKING:
    from offline_diffusion.data.ledger import Ledger
    from offline_diffusion.data.verify import VerifyReport

EXIT_BROKEN = 1
EXIT_UNFINISHED = 3


@click.command("verify")
@click.argument("out", metavar="DIR|URL")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, /, out: str, as_json: bool) -> None:
    """Read every shard again and check that nothing is broken, missing or twice.

    Prints `file: row N: reason`, a problem a line. Exits with 0 when the dataset is whole, with 1
    when something is wrong, and with 3 when nothing is wrong but shards are still to be done.

    \b
    Example:
      offdiff verify out/quickstart
    """
    from offline_diffusion.data.ledger import open_to_read

    with open_to_read(out) as ledger:
        ctx.exit(_verify(ledger, as_json=as_json))


def _verify(ledger: Ledger, *, as_json: bool) -> int:
    from offline_diffusion.data.verify import VerifyReport, redo_hint, verify_shards

    report = VerifyReport(num_shards=len(ledger.shards))

    def counts() -> str:
        seen = report.num_shards_done + len(report.pending)
        return (
            f"verifying: {seen:,}/{plural(report.num_shards, 'shard')}, {plural(report.num_images, 'image')}"
        )

    with ticking(counts):
        for shard in verify_shards(ledger):
            report.add(shard)
        report.add_folder(ledger)
    if as_json:
        click.echo(json.dumps({"ok": report.ok, **dataclasses.asdict(report)}))
    else:
        _print_problems(report)
    verdict = "broken" if not report.ok else "sound" if report.finished else "sound but unfinished"
    click.echo(
        f"{verdict}: {report.num_shards_done:,} of {plural(report.num_shards, 'shard')}, "
        f"{plural(report.num_rows, 'row')}, {plural(report.num_images, 'image')}, "
        f"{plural(report.num_problems, 'problem')}",
        err=True,
    )
    if report.unmoved:
        shards = plural(len(report.unmoved), "shard")
        click.echo(f"{shards}: committed, but the next run has yet to put files into their places", err=True)
    if (hint := redo_hint(ledger, report.broken)) is not None:
        click.echo(f"hint: {hint}", err=True)
    return EXIT_BROKEN if not report.ok else 0 if report.finished else EXIT_UNFINISHED


def _print_problems(report: VerifyReport) -> None:
    for problem in report.problems:
        click.echo(str(problem))
    if report.num_problems > len(report.problems):
        click.echo(f"… {report.num_problems - len(report.problems):,} more", err=True)
