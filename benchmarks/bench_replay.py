"""One mixed trace in every execution mode and policy, and the simulation against each of them.

    python benchmarks/bench_replay.py --trace lora_request_trace.csv --prompts PartiPrompts.tsv   # on a GPU
    python benchmarks/bench_replay.py --sizes 512 --images 160 --out uniform.json    # uniform traffic
    python benchmarks/bench_replay.py --device cpu --model tiny --images 8 --span 2  # to try it

Arrivals are those of a busy stretch of the trace (without one, Poisson), scaled to ``--span`` seconds; sizes
are drawn by weight, prompts from the sets. Each mode runs the same requests at the same times on the same
model. Then each is simulated, through the cost model of its own run and through that of the run in mode
``packed``. The result is written after every mode, beside those of an earlier call with the same arguments,
so ``--only`` adds what is missing. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from records import PEAK_FLOPS, ROOT, device_slug, portable_command, replace_text
from workloads import NEGATIVE_PROMPT, TRUE_CFG_SCALE, read_prompts, scaled, useful_flops

from offline_diffusion.bench.arrivals import arrival_times
from offline_diffusion.bench.draws import Draws, Mixture
from offline_diffusion.bench.page import page
from offline_diffusion.bench.replay import ReplayRequest, resolve_trace
from offline_diffusion.bench.report import Report, Run, summary_rows
from offline_diffusion.bench.session import Session, modes_of
from offline_diffusion.bench.trace import Trace, TraceRequest, read_trace
from offline_diffusion.cli.text import table
from offline_diffusion.config import EngineConfig
from offline_diffusion.data.rows import ManifestRow, RowDefaults
from offline_diffusion.data.work import estimate_text_tokens
from offline_diffusion.engine.cost import MeasuredCost
from offline_diffusion.job_yaml import read_job_file
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import SamplingParams

SIZES = ((512, 8), (768, 5), (1024, 3))
"""Side in pixels and weight: the mixed 16 of the other benchmark."""

BUSY_REQUESTS = 200
"""The stretch begins where so many requests came in the least time."""

KEY_ARGUMENTS = (
    "model",
    "sizes",
    "images",
    "span",
    "steps",
    "seed",
    "budget",
    "max_num_seqs",
    "device",
    "layers",
)
SAME_IN_ALL = ("hardware", "versions", "trace", "model", "arguments")
"""Of a result: runs of two calls may stand side by side where these are equal."""

BY_MODE = ("runs", "simulated_minus_real")

TINY_SCALE = 4
REFERENCE_MODE = "packed"


def busy_stretch(trace: Trace, count: int) -> list[TraceRequest]:
    """The first ``count`` requests of the busiest part of a trace."""
    times = [request.arrival for request in trace.requests]
    width = min(BUSY_REQUESTS, len(times) - 1)
    starts = range(len(times) - max(width, count - 1))
    first = min(starts, key=lambda start: times[start + width] - times[start], default=0)
    return list(trace.requests[first : first + count])


def at_span(requests: Sequence[TraceRequest], span: float) -> list[TraceRequest]:
    """Arrivals from 0 to ``span`` seconds, in proportion."""
    start, end = requests[0].arrival, requests[-1].arrival
    factor = span / (end - start) if end > start else 0.0
    return [replace(request, arrival=(request.arrival - start) * factor) for request in requests]


def make_trace(args: argparse.Namespace) -> list[TraceRequest]:
    """Arrivals of the trace with drawn sizes and prompts; one image each, all guided."""
    scale = TINY_SCALE if args.model == "tiny" else 1
    prompts = read_prompts(args.prompts) if args.prompts else []
    draws = Draws(args.seed)
    kinds = [
        SamplingParams(
            height=scaled(side, scale),
            width=scaled(side, scale),
            num_inference_steps=args.steps,
            true_cfg_scale=TRUE_CFG_SCALE,
            negative_prompt=NEGATIVE_PROMPT,
        )
        for side, _ in args.sizes
    ]
    arrived = _arrivals(args)
    drawn = Mixture(kinds, [weight for _, weight in args.sizes]).draw(len(arrived), args.seed)
    requests = []
    for number, (request, kind) in enumerate(zip(arrived, drawn, strict=True)):
        prompt = prompts[number % len(prompts)] if prompts else draws.prompt()
        requests.append(replace(request, row=replace(request.row, prompt=prompt, params=kinds[kind])))
    return at_span(requests, args.span)


def _arrivals(args: argparse.Namespace) -> list[TraceRequest]:
    if args.trace is not None:
        return busy_stretch(read_trace(str(args.trace)), args.images)
    times = arrival_times("poisson", args.images, 1.0, seed=args.seed)
    rows = (ManifestRow(n, str(n), "", n + 1, "", "-", SamplingParams(), {}) for n in range(args.images))
    return [TraceRequest(row, time) for row, time in zip(rows, times, strict=True)]


def simulated_minus_real(
    session: Session, real: Run, config: EngineConfig, capabilities: Capabilities, cost: MeasuredCost
) -> dict[str, float | None]:
    """Throughput and p95 of the simulation over those of a run, minus 1; None where one of them has none."""
    modes, budget = {real.name: config}, cost.max_num_batched_tokens
    [said] = session.simulated_runs(modes, capabilities, cost.model, budget)
    pairs = {name: (said.numbers[name], real.numbers[name]) for name in ("throughput_qps", "latency_p95")}
    return {name: a / b - 1 if a is not None and b else None for name, (a, b) in pairs.items()}


def floor_seconds(requests: Sequence[ReplayRequest], capabilities: Capabilities) -> float:
    """Device seconds of all real tokens' FLOPs at the bf16 rate that was measured."""
    drawn = [request.images.first.request for request in requests]
    return useful_flops(drawn, capabilities, estimate_text_tokens) / PEAK_FLOPS


def sides(text: str) -> tuple[int, float]:
    """``SIDE`` or ``SIDE:WEIGHT``."""
    side, _, weight = text.partition(":")
    return int(side), float(weight or 1)


def chosen(modes: Mapping[str, EngineConfig], only: Sequence[str] | None) -> dict[str, EngineConfig]:
    """The modes of these names, in the order of the file; all without."""
    if unknown := [name for name in only or () if name not in modes]:
        raise SystemExit(
            f"--only: no mode {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, modes))}"
        )
    return {name: own for name, own in modes.items() if only is None or name in only}


def merged(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """``new``, with the modes of ``old`` that it lacks where both are of one trace on one machine.

    Of a mode in both, a run that was ended early does not take the place of a whole one.
    """
    if old is None or any(old.get(name) != new[name] for name in SAME_IN_ALL):
        return dict(new)
    runs = old["runs"]
    better = [n for n, own in new["runs"].items() if not own["stopped"] or runs.get(n, own)["stopped"]]
    taken = {name: {mode: new[name][mode] for mode in better} for name in BY_MODE}
    return {**new, **{name: {**old[name], **taken[name]} for name in BY_MODE}}


def read_result(path: Path) -> dict[str, Any] | None:
    """What an earlier call has written, if it is there and whole."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) and all(name in found for name in BY_MODE) else None
    return None


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--trace", type=Path, help="GenTD26's lora_request_trace.csv, or whatever `offdiff replay` reads")
    add("--prompts", nargs="*", default=[], metavar="FILE", help="prompt sets; default: made of words")
    add("--modes", type=Path, default=ROOT / "traces" / "modes.yaml")
    add("--only", nargs="*", metavar="MODE", help="of the file")
    add(
        "--sizes",
        nargs="+",
        type=sides,
        default=SIZES,
        metavar="SIDE[:WEIGHT]",
        help="pixels; default: mixed",
    )
    add("--images", type=int, default=80, help="each: one request")
    add("--span", type=float, default=25.0, help="seconds from the first arrival to the last")
    add("--steps", type=int, default=4, help="few, so that many requests fit: p95 is of the latest 5 %%")
    add("--seed", type=int, default=0)
    add("--stop-after", type=float, default=480.0, help="seconds after which no more is begun")
    add("--budget", type=int, help="max_num_batched_tokens; default: the engine's own")
    add("--max-num-seqs", type=int, default=128)
    add("--device", default="cuda")
    add("--model", choices=("full", "tiny"), default="full")
    add("--layers", type=int, default=60, help="transformer blocks of the full model")
    add("--out", type=Path, help="default with the full model: benchmarks/results/<gpu>_replay.json")
    add("--html", type=Path, help="a page with plots")
    return parser.parse_args(arguments)


class Benchmark:
    """Everything of one process.

    Args:
        args: As parsed.
        command: For the record.
    """

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        self.args, self.start = args, time.perf_counter()
        base = EngineConfig(
            device=args.device, max_num_batched_tokens=args.budget, max_num_seqs=args.max_num_seqs
        )
        self.modes = chosen(modes_of(base, read_job_file(args.modes), source=str(args.modes)), args.only)
        import torch
        from subject import Subject

        device = torch.device(args.device)
        on_gpu = device.type == "cuda"
        self.hardware = torch.cuda.get_device_name(device) if on_gpu else platform.machine()
        self.model = Subject(args.model, device, args.layers, "auto").model
        self.costs: dict[str, MeasuredCost] = {}
        versions = {name: metadata.version(name) for name in ("torch", "diffusers", "transformers")}
        self.origin = {"hardware": self.hardware, "versions": versions, "command": command}
        self.out = args.out
        if self.out is None and args.model == "full":
            self.out = ROOT / "benchmarks" / "results" / f"{device_slug(self.hardware)}_replay.json"
        for path in filter(None, (self.out, args.html)):
            path.parent.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Every mode for real, then simulated; prints as it goes."""
        capabilities = self.model.capabilities
        requests, faults = resolve_trace(make_trace(self.args), capabilities, RowDefaults())
        assert not faults, faults
        floor_s = floor_seconds(requests, capabilities)
        print(json.dumps(self.origin))
        print(
            f"ceiling: {len(requests)} images at {PEAK_FLOPS / 1e12:.0f} TFLOP/s take {floor_s:.1f} s",
            flush=True,
        )
        session = Session(requests, stopped=self._is_late)
        runs: list[Run] = []
        for run in session.real_runs(self.modes, load=lambda _: self.model, on_cost=self._keep):
            runs.append(run)
            print(f"{time.perf_counter() - self.start:6.0f} s  {_line(run)}", flush=True)
            simulated = Session(requests, slo_unit_ms=session.slo_unit_ms)
            errors = {own.name: self._errors(simulated, own, capabilities) for own in runs}
            result = self._save(self._report(runs), errors, floor_s)
        if missing := list(self.modes)[len(runs) :]:
            print(f"no time was left for: {', '.join(missing)}")
        self._tell(runs, errors)
        print(json.dumps(result))

    def _is_late(self) -> bool:
        return time.perf_counter() - self.start > self.args.stop_after

    def _keep(self, name: str, cost: MeasuredCost, _: EngineConfig) -> None:
        self.costs[name] = cost

    def _errors(
        self, session: Session, run: Run, capabilities: Capabilities
    ) -> dict[str, dict[str, float | None]]:
        """Of the simulation by whose costs; none of a run that was ended early."""
        if run.replayed.stopped:
            return {}
        costs = {"own": self.costs.get(run.name), REFERENCE_MODE: self.costs.get(REFERENCE_MODE)}
        config = self.modes[run.name]
        return {
            what: simulated_minus_real(session, run, config, capabilities, cost)
            for what, cost in costs.items()
            if cost is not None
        }

    def _report(self, runs: Sequence[Run]) -> Report:
        source = str(self.args.trace.name) if self.args.trace else "poisson"
        return Report(source, "Qwen-Image, random weights", {"device": self.hardware}, runs)

    def _save(self, report: Report, errors: dict[str, Any], floor_s: float) -> dict[str, Any]:
        """Writes all so far; returns it."""
        if self.args.html is not None:
            replace_text(self.args.html, page(report))
        numbers = {
            run.name: {
                "command": self.origin["command"],
                "options": dict(run.options),
                **{name: value for name, value in run.numbers.items() if name != "over_time"},
            }
            for run in report.runs
        }  # what is told over time is long, and the page has it
        new = {
            **self.origin,
            "trace": report.trace,
            "arguments": self._arguments(),
            "floor_s": floor_s,
            "model": report.model,
            "runs": numbers,
            "simulated_minus_real": errors,
        }
        result = merged(read_result(self.out) if self.out else None, json.loads(json.dumps(new)))
        if self.out is not None:
            replace_text(self.out, json.dumps(result, indent=1) + "\n")
        return result

    def _arguments(self) -> dict[str, Any]:
        """Those that change what is replayed, or on what."""
        own = {name: getattr(self.args, name) for name in KEY_ARGUMENTS}
        return {**own, "prompts": [Path(name).name for name in self.args.prompts]}

    def _tell(self, runs: Sequence[Run], errors: dict[str, dict[str, Any]]) -> None:
        print("\n" + table(["", *(run.title for run in runs)], summary_rows(runs)))
        rows = [
            [name, what, _percent(own["throughput_qps"]), _percent(own["latency_p95"])]
            for name, found in errors.items()
            for what, own in found.items()
        ]
        print("\n" + table(["simulated against real", "costs of", "throughput", "p95"], rows))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _line(run: Run) -> str:
    n = run.numbers
    return f"{run.title}: {n['images_per_s'] or 0:.3f} images/s, p95 {n['latency_p95'] or 0:.1f} s"


def main(arguments: Sequence[str]) -> None:
    Benchmark(parse_arguments(arguments), portable_command(sys.argv[0], arguments)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
