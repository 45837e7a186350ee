"""``offdiff status``: how far a job is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from offline_diffusion.cli.text import duration, table
from offline_diffusion.progress import plural

if TYPE_CHECKING:
    from offline_diffusion.data.status import ShardStatus, Status

WATCH_INTERVAL_S = 2.0
PLAIN_INTERVAL_S = 5.0

MAX_LINES = 20
"""Of each table; ``--json`` has all."""

MAX_HELD = 4
"""Shards of a worker that are named."""


@click.command("status")
@click.argument("out", metavar="DIR|URL")
@click.option("--watch", is_flag=True, help="Show it again every few seconds until the job is finished.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch an object a line.")
def command(out: str, watch: bool, as_json: bool) -> None:
    """Show how far a job is, from its output folder alone, or its URL.

    \b
    Example:
      offdiff status out/quickstart
      offdiff status out/quickstart --watch
    """
    from offline_diffusion.data.ledger import open_to_read
    from offline_diffusion.data.status import status_of

    with open_to_read(out) as ledger:
        status = status_of(ledger, name=out)
        _show(status, as_json=as_json, watch=watch)
        while watch and not status.finished:
            time.sleep(WATCH_INTERVAL_S if sys.stdout.isatty() else PLAIN_INTERVAL_S)
            ledger.pull()
            status = status_of(ledger, name=out)
            _show(status, as_json=as_json, watch=watch)


def _show(status: Status, *, as_json: bool, watch: bool) -> None:
    if as_json:
        click.echo(json.dumps(status.to_dict()))
    elif watch and not sys.stdout.isatty():
        click.echo(_headline(status))
    else:
        if watch:
            click.clear()
        click.echo(
            "\n\n".join(part for part in (_headline(status), _workers(status), _shards(status)) if part)
        )


def _headline(status: Status) -> str:
    parts = [
        f"{status.num_shards_done:,} of {plural(status.num_shards, 'shard')} done",
        f"{status.num_rows_done:,} of {plural(status.num_rows, 'row')}",
        f"{plural(status.num_ok, 'image')} drawn",
        f"{status.num_failed:,} failed",
        f"{plural(status.num_invalid_rows, 'row')} quarantined",
    ]
    if status.images_per_s or not status.finished:
        parts.append(f"{status.images_per_s:.3g} images/s")
    if not status.finished:
        parts.append(f"ETA {duration(status.eta_s)}" if status.num_shards_running else "not running")
    return f"{status.out}: {', '.join(parts)}"


def _workers(status: Status) -> str:
    """Those at work, and of every task the last one."""
    last = {worker.task: worker for worker in status.workers}
    rows = [
        [
            str(worker.task),
            worker.state,
            f"{worker.num_shards_done:,}",
            _some(worker.shards),
            f"{worker.num_ok:,}",
            f"{worker.num_failed:,}",
            f"{worker.images_per_s:.3g}",
            worker.worker,
        ]
        for worker in status.workers
        if worker.state == "running" or worker is last[worker.task]
    ]
    header = ["task", "state", "shards done", "holds", "images", "failed", "images/s", "worker"]
    return _cut_table(header, rows)


def _some(shards: Sequence[int]) -> str:
    shown = ", ".join(map(str, shards[:MAX_HELD]))
    return f"{shown}, … {len(shards) - MAX_HELD:,} more" if len(shards) > MAX_HELD else shown


def _shards(status: Status) -> str:
    """Those that are being worked on or have failures come first."""
    order = {"running": 0, "begun": 1, "done": 3}

    def urgency(shard: ShardStatus) -> tuple[int, int]:
        failed = shard.num_failed or shard.num_invalid_rows
        return (2 if failed and shard.state == "done" else order[shard.state], shard.shard)

    rows = [
        [
            str(shard.shard),
            shard.state,
            f"{shard.num_ok:,}",
            f"{shard.num_failed:,}",
            f"{shard.num_invalid_rows:,}",
            "" if shard.task is None else str(shard.task),
        ]
        for shard in sorted(status.shards, key=urgency)
    ]
    return _cut_table(["shard", "state", "images", "failed", "quarantined", "task"], rows)


def _cut_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    text = table(header, rows[:MAX_LINES])
    return f"{text}\n… {len(rows) - MAX_LINES:,} more" if len(rows) > MAX_LINES else text
