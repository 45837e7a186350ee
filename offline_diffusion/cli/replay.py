"""``offdiff replay``: a trace of traffic on this engine, or on a simulated one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offline_diffusion.bench.arrivals import ARRIVAL_KINDS, DEFAULT_BURSTINESS
from offline_diffusion.bench.records import DEFAULT_NUM_WARM_UPS, DEFAULT_SLO_SCALE
from offline_diffusion.bench.report import Report, Run
from offline_diffusion.cli.cost_record import CostRecord, device_name, recall, remember
from offline_diffusion.cli.options import gather_values, job_option, model_options, row_options
from offline_diffusion.cli.plan import ASSUMED_TFLOPS, likely_budget
from offline_diffusion.cli.progress import ticking
from offline_diffusion.cli.replay_report import describe, facts_of, make_room, show
from offline_diffusion.cli.run import engine_options
from offline_diffusion.cli.signals import STOP_KEY
from offline_diffusion.config import EngineConfig, JobConfig, make_job_config
from offline_diffusion.errors import ConfigError, JobInterrupted
from offline_diffusion.job_yaml import read_job_file
from offline_diffusion.models.modes import ExecutionMode, execution_mode
from offline_diffusion.progress import StopFlag, plural

if TYPE_CHECKING:
    from offline_diffusion.bench.replay import ReplayRequest
    from offline_diffusion.bench.session import Session
    from offline_diffusion.bench.trace import Trace
    from offline_diffusion.data.rows import RowFault
    from offline_diffusion.engine.cost import CostModel, MeasuredCost
    from offline_diffusion.models.capabilities import Capabilities

EXIT_SOME_FAILED = 3
MAX_FAULTS_SHOWN = 20

POSITIVE = click.FloatRange(min=0, min_open=True)
_WINDOW = re.compile(r"(\d+(?:\.\d+)?)?:(\d+(?:\.\d+)?)?")


def _window(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[float, float] | None:
    if value is None:
        return None
    match = _WINDOW.fullmatch(value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not of the form START:END in seconds, such as 600:1200")
    start, end = float(match[1] or 0), float(match[2] or math.inf)
    if not start < end:
        raise click.BadParameter(f"{value!r} ends before it begins")
    return start, end


@click.command("replay")
@click.argument("trace", metavar="TRACE")
@click.option(
    "--arrivals",
    type=click.Choice(["trace", "closed", *ARRIVAL_KINDS]),
    default="trace",
    show_default=True,
    help="trace: at its timestamps. closed: whenever another request is done. The others are made up, see "
    "--request-rate.",
)
@click.option("--request-rate", type=POSITIVE, metavar="R", help="Requests a second of made-up arrivals.")
@click.option(
    "--burstiness",
    type=POSITIVE,
    default=DEFAULT_BURSTINESS,
    show_default=True,
    help="Of bursty arrivals, the shape of the Gamma distribution of gaps: 1 is Poisson, less is burstier.",
)
@click.option("--max-concurrency", type=click.IntRange(min=1), metavar="N", help="Most requests in flight.")
@click.option("--speed", type=POSITIVE, default=1.0, metavar="F", help="Replay the times F times as fast.")
@click.option(
    "--window",
    callback=_window,
    metavar="START:END",
    help="Only what arrives within, in seconds of the trace from its first request on; before --speed.",
)
@job_option(
    "--limit",
    "Use the first N requests only, after --window; of a mixture, draw N (else 100).",
    metavar="N",
)
@click.option(
    "--sizes", metavar="FILE", help="For requests without a size: JSON list of weighted kinds of requests."
)
@click.option("--prompts", metavar="MANIFEST", help="For requests without a prompt; else words are made up.")
@model_options
@row_options
@job_option("--seed", "Of all that is drawn.", metavar="N")
@engine_options
@click.option(
    "--compare",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML: names of modes, each with engine options; the trace runs on each in turn.",
)
@click.option(
    "--slo-scale",
    type=POSITIVE,
    default=DEFAULT_SLO_SCALE,
    show_default=True,
    help="SLO of requests without slo_ms: so many times what warm-ups say of their size and steps.",
)
@click.option(
    "--warmup-requests",
    type=click.IntRange(min=0),
    default=DEFAULT_NUM_WARM_UPS,
    show_default=True,
    help="Before each run, of different sizes.",
)
@click.option("--simulate", is_flag=True, help="Without the model: the real scheduler and a cost model.")
@click.option(
    "--cost",
    "cost_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --simulate: the cost record of another machine.  [default: that of the last run here]",
)
@click.option(
    "--tflops",
    type=POSITIVE,
    metavar="N",
    help=f"With --simulate: by FLOPs alone.  [default: {ASSUMED_TFLOPS:.0f} where there is no record]",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --simulate: engines that are dealt the requests in turn.",
)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, under vLLM-Omni's names of metrics.")
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Replay a trace of traffic, or simulate it, and report throughput and latency.

    TRACE is a manifest with columns timestamp and slo_ms besides, lines Request(name=value, …) as
    vLLM-Omni has them, a JSON list of weighted kinds of requests, or GenTD26's lora_request_trace.csv.
    Images are drawn and dropped. The exit code is 3 when lines of the trace are faulty.

    \b
    Example:
      offdiff replay traces/traffic.jsonl
      offdiff replay traces/kinds.json --arrivals poisson --request-rate 4 --simulate
      offdiff replay traces/traffic.jsonl --compare traces/modes.yaml --html modes.html
    """
    from offline_diffusion.bench.session import Session

    values, spelling = gather_values(given)
    # A replay writes no dataset, so a folder need not be named.
    config = make_job_config({**values, "manifests": (given["trace"],), "out": "."}, spelling=spelling)
    _check(given)
    trace = _read(config, given)
    capabilities, requests, faults = _resolve(config, trace)
    stop: StopFlag = ctx.meta.setdefault(STOP_KEY, StopFlag())
    done: dict[str, int] = {}
    session = Session(
        requests,
        closed_loop=given["arrivals"] == "closed",
        max_concurrency=given["max_concurrency"],
        slo_scale=given["slo_scale"],
        num_warm_ups=given["warmup_requests"],
        stopped=lambda: stop.requests > 0,
        observer=done.__setitem__,
    )
    facts = facts_of(given, trace, requests, faults)
    modes = _modes(config, given["compare"], capabilities, simulate=given["simulate"])
    with ticking(partial(describe, done, len(requests))):
        if given["simulate"]:
            runs, failure = _collected(_simulated(session, config, modes, capabilities, given, facts))
        else:
            runs, failure = _collected(session.real_runs(modes, on_cost=partial(_remember, capabilities)))
            facts["device"] = device_name(config.device)
    if missing := [name for name in modes if name not in {run.name for run in runs}]:
        facts["not run"] = ", ".join(missing)
    show(Report(trace.source, config.model, facts, runs), given)
    if failure is not None:
        raise failure
    if stop.requests:
        click.echo(f"{stop.why}: stopped early; the report is of what was done until then", err=True)
        ctx.exit(JobInterrupted.exit_code)
    has_failed = any(run.numbers["failed_requests"] for run in runs)
    ctx.exit(EXIT_SOME_FAILED if faults or has_failed else 0)


def _check(given: Mapping[str, Any]) -> None:
    """Refuses options that would do nothing."""
    if given["arrivals"] in ARRIVAL_KINDS and given["request_rate"] is None:
        raise ConfigError(f"--arrivals {given['arrivals']} needs --request-rate")
    if given["arrivals"] not in ARRIVAL_KINDS and given["request_rate"] is not None:
        raise ConfigError(
            f"--request-rate says nothing with --arrivals {given['arrivals']}",
            hint="--arrivals poisson, bursty or diurnal; --speed changes the rate of a trace's own times",
        )
    for name, flag in (("cost_file", "--cost"), ("tflops", "--tflops")):
        if given[name] is not None and not given["simulate"]:
            raise ConfigError(f"{flag} is for --simulate")
    if given["cost_file"] is not None and given["tflops"] is not None:
        raise ConfigError("--cost and --tflops are two answers to one question", hint="give one of them")
    if given["replicas"] > 1 and not given["simulate"]:
        raise ConfigError("--replicas is for --simulate")
    if given["html"] is not None:
        make_room(given["html"])


def _read(config: JobConfig, given: Mapping[str, Any]) -> Trace:
    from offline_diffusion.bench.draws import Draws
    from offline_diffusion.bench.trace import DEFAULT_NUM_DRAWN, read_mixture, read_trace

    sizes = read_mixture(given["sizes"]) if given["sizes"] else None
    prompts = _prompts(given["prompts"]) if given["prompts"] else ()
    draws = Draws(config.seed, sizes=sizes, prompts=prompts)
    limit, num_drawn = config.limit, DEFAULT_NUM_DRAWN if config.limit is None else config.limit
    # What lies before a window must be read to find it.
    first = limit if given["window"] is None else None
    trace = read_trace(given["trace"], draws, limit=first, num_drawn=num_drawn, seed=config.seed)
    kind = given["arrivals"]
    if kind in ARRIVAL_KINDS:
        trace = trace.at(kind, given["request_rate"], seed=config.seed, burstiness=given["burstiness"])
    elif kind == "trace" and not trace.has_times:
        raise ConfigError(
            f"{trace.source}: has no timestamps",
            hint="make them up: --arrivals poisson --request-rate R; or ignore time: --arrivals closed",
        )
    if given["window"] is not None:
        trace = trace.window(*given["window"])
        if not trace.requests:
            raise ConfigError(f"{trace.source}: nothing arrives within --window")
        trace = trace if limit is None else trace.first(limit)
    return trace.sped_up(given["speed"])


def _prompts(source: str) -> list[str]:
    """The distinct prompts of a manifest."""
    from offline_diffusion.data.manifest import open_manifest
    from offline_diffusion.data.rows import ManifestRow

    rows = open_manifest([source]).read()
    return list(dict.fromkeys(row.prompt for row in rows if isinstance(row, ManifestRow)))


def _resolve(config: JobConfig, trace: Trace) -> tuple[Capabilities, list[ReplayRequest], list[RowFault]]:
    """What the model can draw; says what it cannot, and what is wrong with the trace."""
    from offline_diffusion.bench.replay import resolve_trace
    from offline_diffusion.feed import row_defaults
    from offline_diffusion.models.registry import capabilities_for

    capabilities = capabilities_for(config.model, config.revision)
    requests, unfit = resolve_trace(trace.requests, capabilities, row_defaults(config))
    faults = [*trace.faults, *unfit]
    for note in trace.notes:
        click.echo(note, err=True)
    for fault in faults[:MAX_FAULTS_SHOWN]:
        click.echo(str(fault), err=True)
    if len(faults) > MAX_FAULTS_SHOWN:
        click.echo(f"… and {plural(len(faults) - MAX_FAULTS_SHOWN, 'fault')} more", err=True)
    if not requests:
        raise ConfigError(
            f"{trace.source}: the model can draw none of its requests",
            hint="--on-bad-size round takes the nearest size that it can",
        )
    return capabilities, requests, faults


def _modes(
    config: JobConfig, compare: Path | None, capabilities: Capabilities, *, simulate: bool
) -> dict[str, EngineConfig]:
    from offline_diffusion.bench.session import check_modes, check_one_cost, modes_of

    base = EngineConfig(**{name: getattr(config, name) for name in EngineConfig.model_fields})
    if compare is None:
        modes = {execution_mode(base, capabilities.batch_kind).value: base}
    else:
        modes = modes_of(base, read_job_file(compare), source=str(compare))
    check_modes(modes, capabilities)
    if simulate:
        check_one_cost(modes, base)
    return modes


def _collected(runs: Iterator[Run]) -> tuple[list[Run], Exception | None]:
    """Runs up to the first that fails, and why it does; raises where not even one is done."""
    done: list[Run] = []
    try:
        for run in runs:
            done.append(run)  # noqa: PERF402 - those before a failure stay
    except Exception as error:
        if not done:
            raise
        return done, error
    return done, None


def _simulated(
    session: Session,
    config: JobConfig,
    modes: Mapping[str, EngineConfig],
    capabilities: Capabilities,
    given: Mapping[str, Any],
    facts: dict[str, str],
) -> Iterator[Run]:
    record = None if given["tflops"] is not None else _record(config, given["cost_file"])
    cost, facts["simulated by"] = _cost(record, given["tflops"], capabilities)
    budget, basis = likely_budget(config, record)
    if config.max_num_batched_tokens is None:
        facts["token budget"] = f"{budget:,}, {basis}"
    if given["replicas"] > 1:
        facts["replicas"] = str(given["replicas"])
    return session.simulated_runs(modes, capabilities, cost, budget, given["replicas"])


def _remember(capabilities: Capabilities, _name: str, cost: MeasuredCost, config: EngineConfig) -> None:
    """Keeps a run's costs for plans and simulations, which are of full steps, not of serial ones."""
    if execution_mode(config, capabilities.batch_kind) is ExecutionMode.PACKED:
        remember(cost, config)


def _record(config: JobConfig, path: Path | None) -> CostRecord | None:
    if path is None:
        return recall(config)
    try:
        return CostRecord.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"--cost {path}: is no cost record: {first}",
            hint="`run` and `replay` leave them in costs/ in the cache folder",
        ) from None


def _cost(
    record: CostRecord | None, tflops: float | None, capabilities: Capabilities
) -> tuple[CostModel, str]:
    """The cost model, and why it is believed."""
    from offline_diffusion.engine.cost import CostModel

    if record is not None:
        basis = f"a cost model of {record.model}, measured on {record.device} ({record.num_steps:,} steps)"
        return record.cost_model(), basis
    rate = (tflops or ASSUMED_TFLOPS) * 1e12
    # A sequence of S tokens takes a·S + b·S².
    square = (capabilities.forward_flops(2) - 2 * capabilities.forward_flops(1)) / 2
    token = capabilities.forward_flops(1) - square
    given = "as given" if tflops else "assumed: no run was measured"
    basis = f"{rate / 1e12:g} TFLOP/s, {given}; a step costs nothing but its tokens"
    return CostModel(0.0, token / rate, square / rate), basis
