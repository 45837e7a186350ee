"""``offdiff``: finds the command that was asked for and shows errors without a traceback."""

from __future__ import annotations

import errno
import importlib
from typing import Any

import click

from offline_diffusion.cli.signals import STOP_KEY, ignore_late_signals, stop_on_signals
from offline_diffusion.errors import OffdiffError, did_you_mean
from offline_diffusion.progress import StopFlag

COMMANDS = {
    "run": "Draw every image of a manifest into a dataset; the same command again resumes.",
    "validate": "List every fault of every row; loads no model weights.",
    "plan": "Say what a job would cost, without running it.",
    "status": "Show how far a job is, from its output folder alone, or its URL.",
    "verify": "Read every shard again and check that nothing is broken, missing or twice.",
    "submit": "Write a job as a batch script for a cluster, and submit it.",
    "replay": "Replay a trace of traffic, or simulate it, and report throughput and latency.",
    "models": "List the model families and the backends that work here.",
}
"""Command → its line in ``offdiff --help``. Its module is imported only when it is invoked."""


MACHINE_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM)
"""Of a disk, wherever it is met: no fault of this program, so no traceback."""

STOPPABLE = ("run", "replay")
"""The commands that end in good order on a signal."""


def shown(error: OffdiffError) -> click.ClickException:
    """``error`` as click prints it, with its hint and exit code."""
    kind = type(type(error).__name__, (click.ClickException,), {"exit_code": error.exit_code})
    exception: click.ClickException = kind(str(error))
    return exception


class LazyGroup(click.Group):
    """A group that imports a command's module only when the command is invoked."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"offline_diffusion.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = did_you_mean(args[0], COMMANDS)
            hint = f"did you mean {close!r}?" if close else f"commands: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no such command {args[0]!r}\nhint: {hint}", ctx)
        if args and args[0] in STOPPABLE:
            # Before its module is imported: that takes a while, and a signal must not be lost in it.
            stop = ctx.meta[STOP_KEY] = StopFlag()
            ctx.with_resource(stop_on_signals(stop))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OffdiffError as error:
            raise shown(error) from None
        except OSError as error:
            if error.errno in MACHINE_FAULTS:
                raise click.ClickException(str(error)) from None
            raise


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="offline-diffusion", prog_name="offdiff")
def main() -> None:
    """Turn a manifest of unlike text-to-image prompts into a dataset of images.

    \b
    Example:
      offdiff run manifests/quickstart.jsonl --out out/quickstart

    \b
    Exit codes: 0 all rows done, 1 the job could not start or go on, 2 usage,
    3 finished but some rows failed, 75 interrupted (the same command goes on).
    Of validate, 3 is a faulty row; of verify, nothing wrong but shards still to be done.
    """


def run_and_exit() -> None:
    """The command ``offdiff``: ends the process with the command's exit code, whatever signal comes late."""
    try:
        main()
    finally:
        ignore_late_signals()


if __name__ == "__main__":
    run_and_exit()
