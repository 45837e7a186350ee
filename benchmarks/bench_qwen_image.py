"""Full-size Qwen-Image with random weights: diffusers and this engine, turn by turn in one process.

    python benchmarks/bench_qwen_image.py                         # everything; needs a GPU with 100 GiB
    python benchmarks/bench_qwen_image.py --plan                  # what that is and how long it takes
    python benchmarks/bench_qwen_image.py --only 512 --checks     # one workload, no checks

What each number means: benchmarks/README.md. The last line is the records as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from plan import BATCH, CHECKS, PRECISIONS, SYSTEMS, Entry, RivalOptions, make_plan, serial_part
from records import (
    PEAK_FLOPS,
    ROOT,
    Record,
    Report,
    device_slug,
    header,
    line,
    portable_command,
    speed_fields,
)
from targets import lines as target_lines
from workloads import Workload, make_workloads, read_prompts, useful_flops

FULL_LAYERS = 60
TINY_SCALE = 4
"""Sizes are divided by this for the tiny model: it is there to try the benchmark, not to measure."""

TRACED = ("512", "mixed16")

PACKAGES = ("diffusers", "transformers", "triton", "fa3-fwd", "numpy")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = list(make_workloads())
    add = parser.add_argument
    add("--only", nargs="*", choices=names, default=names, help="workloads; none named: none")
    add("--systems", nargs="*", choices=SYSTEMS, help="default: what each workload lists")
    add("--precisions", nargs="*", choices=PRECISIONS, default=PRECISIONS)
    add("--checks", nargs="*", choices=CHECKS, default=CHECKS, help="none named: none")
    add("--plan", action="store_true", help="print the estimate and stop; needs no GPU")
    add("--out", type=Path, help="default with the full model: benchmarks/results/<gpu>_qwen_image.json")
    add("--prompts", nargs="*", default=[], metavar="FILE", help="prompt sets; default: made of words")
    add("--steps", type=int, default=20, help="denoise steps; Dataset C's in proportion")
    add("--max-images", type=int, help="only so many of each workload")
    add("--rival-steps", type=int, default=5, help="timed steps of a call of diffusers")
    add("--rival-samples", type=int, default=2, help="timed calls of diffusers of each kind")
    add("--trace", nargs="*", choices=names, default=TRACED, help="workloads whose idle share is traced")
    add("--num-compositions", type=int, default=50, help="of the exactness check")
    add("--num-jobs", type=int, default=5, help="whole jobs of the exactness check, for pixels")
    add("--budget", type=int, help="max_num_batched_tokens; default: the engine's own")
    add("--max-num-seqs", type=int, default=128)
    add("--attention-backend", default="auto")
    add("--device", default="cuda")
    add("--model", choices=("full", "tiny"), default="full")
    add("--layers", type=int, default=FULL_LAYERS, help="of the full model")
    return parser.parse_args(arguments)


PLAN_STEPS = 12
"""Denoise steps of the images that a plan is checked with: enough to fit a cost model to one pack of them."""


def main(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    scale = TINY_SCALE if args.model == "tiny" else 1
    prompts = read_prompts(args.prompts) if args.prompts else []
    workloads = make_workloads(args.steps, prompts, scale=scale, max_images=args.max_images)
    from subject import describe, offered_precisions

    precisions = [name for name in args.precisions if name in offered_precisions()]
    for name in sorted(set(args.precisions) - set(precisions)):
        print(f"{name}: not offered by this version, left out")
    plan = make_plan(
        [workloads[name] for name in args.only],
        args.systems,
        precisions,
        args.checks,
        describe(args.model, args.layers).capabilities,
        RivalOptions(args.rival_steps, args.rival_samples),
        args.trace,
        args.num_compositions,
        args.num_jobs,
    )
    print_plan(plan)
    if not args.plan:
        Benchmark(args, workloads, portable_command(sys.argv[0], arguments)).run(plan)


def print_plan(plan: Sequence[Entry]) -> None:
    from plan import MODEL_S

    for entry in plan:
        print(f"{entry.workload:<20}{entry.system:<27}{entry.precision:<6}about {entry.seconds:6.0f} s")
    models = sum(MODEL_S[precision] for precision in {entry.precision for entry in plan})
    total = sum(entry.seconds for entry in plan)
    print(f"about {total:.0f} s, and {models:.0f} s for the models", flush=True)


class Benchmark:
    """The models, engines and records of one process.

    Args:
        args: As parsed.
        workloads: By name.
        command: For the records.
    """

    def __init__(self, args: argparse.Namespace, workloads: dict[str, Workload], command: str) -> None:
        import torch
        from clock import Clock
        from rival import Rival
        from subject import Subject

        self.args, self.workloads = args, workloads
        self.scale = TINY_SCALE if args.model == "tiny" else 1
        device = torch.device(args.device)
        self.clock = Clock(device)
        name = torch.cuda.get_device_name(device) if self.clock.on_gpu else "CPU"
        self.report = Report(self._path(name), self._origin(name, command))
        print(f"floor: {PEAK_FLOPS / 1e12:.0f} TFLOP/s of real tokens in every precision, on {name}")
        start = time.perf_counter()
        self.subject = Subject(args.model, device, args.layers, args.attention_backend)
        print(f"model: {time.perf_counter() - start:.0f} s", flush=True)
        options = RivalOptions(args.rival_steps, args.rival_samples)
        self.rival = Rival(self.subject.pipeline, self.clock, options)
        self.engines: dict[str, Any] = {}
        self.reference: Any = None
        """bf16 drawings that quantized ones are compared with."""

    @property
    def is_full(self) -> bool:
        """Whether this is what targets and published results are about, and no trial of the program."""
        trial = parse_arguments([])
        names = ("model", "layers", "steps", "max_images", "budget", "max_num_seqs", "attention_backend")
        return all(getattr(self.args, name) == getattr(trial, name) for name in names)

    def _path(self, device_name: str) -> Path | None:
        if self.args.out is not None or not self.is_full:
            return self.args.out  # type: ignore[no-any-return]
        return ROOT / "benchmarks" / "results" / f"{device_slug(device_name)}_qwen_image.json"

    def _origin(self, device_name: str, command: str) -> Record:
        args = self.args
        return {
            "device": device_name,
            "model": f"Qwen-Image, {args.layers} layers" if args.model == "full" else "tiny-qwen-image",
            "num_inference_steps": args.steps,
            "prompts": [Path(source).name for source in args.prompts] or "made of words",
            "run": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "command": command,
        }

    def run(self, plan: Sequence[Entry]) -> None:
        """Measures all entries in order; prints and saves each as it is done."""
        print(header())
        for entry in plan:
            if entry.precision != self.subject.precision:
                self._switch(entry.precision)
            print(
                f"… {entry.workload} {entry.system} {entry.precision}, about {entry.seconds:.0f} s",
                flush=True,
            )
            self.clock.forget_peak_memory()
            start = time.perf_counter()
            values = self._measure(entry)
            values |= {
                "measured_s": time.perf_counter() - start,
                "peak_memory_gib": self.clock.peak_memory_gib(),
            }
            print(line(self.report.add(entry.workload, entry.system, entry.precision, values)), flush=True)
        self._print_summary()

    def _switch(self, precision: str) -> None:
        self.engines.clear()
        gc.collect()
        self.subject.switch(precision)

    def _print_summary(self) -> None:
        records = self.report.records
        targets = target_lines(records) if self.is_full else ["a trial: targets are not judged"]
        print("", header(), *map(line, records), "", *targets, sep="\n")
        print(json.dumps(records))

    # --- one entry ---------------------------------------------------------------------------

    def _measure(self, entry: Entry) -> Record:
        if entry.workload in CHECKS:
            return {"found": getattr(self, f"_check_{entry.workload}")()}
        workload = self.workloads[entry.workload]
        if entry.system.startswith("diffusers"):
            return self._measure_rival(workload, entry.system)
        return self._measure_engine(workload, entry.system)

    def _flops(self, requests: Sequence[Any]) -> float:
        model = self.subject.model
        return useful_flops(requests, model.capabilities, lambda text: model.tokenize(text).num_tokens)

    def _measure_rival(self, workload: Workload, system: str) -> Record:
        batch = BATCH if "batch" in system else 1
        if system.endswith("_compiled"):
            # On a CPU, where nothing is measured, Dynamo alone is tried: no compiler is needed then.
            with self.rival.compiled("inductor" if self.clock.on_gpu else "eager"):
                timed = self.rival.time(workload.requests, batch)
        else:
            timed = self.rival.time(workload.requests, batch)
        return {
            **speed_fields(len(workload.requests), timed.seconds, self._flops(workload.requests)),
            "num_timed_steps": timed.num_timed_steps,
            "num_timed_images": timed.num_timed_images,
        }

    def _measure_engine(self, workload: Workload, system: str) -> Record:
        from ours import longest_gap, run, run_shape_by_shape, warm_up

        engine = self._engine(system)
        requests = serial_part(workload) if system == "serial" else workload.requests
        # Forty new shapes are what that job is about: it must not have met them before.
        others = self.workloads["512"].requests if workload.name == "forty_aspects" else requests
        warm_up(engine, others)
        done = (run_shape_by_shape if system == "presorted" else run)(engine, requests, self.clock)
        outside_s = max(0.0, done.wall_s - done.denoise_s)
        return {
            **speed_fields(done.num_images, done.denoise_s, self._flops(requests)),
            "wall_s": done.wall_s,
            "wall_s_per_image": done.wall_s / done.num_images,
            "outside_s": outside_s,
            "outside_share": outside_s / done.wall_s,
            "encode_s": done.encode_s,
            "decode_s": done.decode_s,
            "gpu_idle_share": self._idle_share(engine, workload) if system == "packed" else None,
            "step_fill": done.step_fill,
            "num_steps": done.num_steps,
            "mean_prompt_tokens": done.prompt_tokens,
            "token_budget": engine.scheduler.max_num_batched_tokens,
            "attention_backend": engine.model.attention_backend,
            **longest_gap(done.gaps),
        }

    def _idle_share(self, engine: Any, workload: Workload) -> float | None:
        from idle import traced_idle_share
        from ours import trace_requests

        if workload.name not in self.args.trace:
            return None
        return traced_idle_share(engine, trace_requests(engine, workload.requests))

    def _engine(self, system: str) -> Any:
        """One engine for each of ours, so that none finds prompts encoded by another."""
        from ours import make_engine

        if system not in self.engines:
            limits = {"max_num_seqs": self.args.max_num_seqs, "max_num_batched_tokens": self.args.budget}
            if system != "packed":  # the same budget, without measuring it again
                limits["max_num_batched_tokens"] = self._engine("packed").scheduler.max_num_batched_tokens
            if system == "serial":
                limits["max_num_seqs"] = 1
            self.engines[system] = make_engine(self.subject.model, **limits)
        return self.engines[system]

    # --- checks ------------------------------------------------------------------------------

    def _check_exactness(self) -> Record:
        from checks import exactness
        from compositions import SIZES
        from workloads import scaled

        sizes = [(scaled(height, self.scale), scaled(width, self.scale)) for height, width in SIZES]
        return exactness(self.subject.model, self.args.num_compositions, self.args.num_jobs, sizes)

    def _check_promise_cost(self) -> Record:
        from checks import promise_cost

        budget = self._engine("packed").scheduler.max_num_batched_tokens
        return promise_cost(self.subject.model, self.clock, budget, scale=self.scale)

    def _check_plan_estimate(self) -> Record:
        """Fitted to the mixed 16, held against the uniform mix: other sizes, and a fifth without guidance."""
        from estimate import plan_estimate
        from ours import make_engine

        prompts = read_prompts(self.args.prompts) if self.args.prompts else []
        workloads = make_workloads(PLAN_STEPS, prompts, scale=self.scale)
        count = self.args.max_images
        engine = make_engine(self.subject.model)
        seen, planned = workloads["mixed16"].requests[:count], workloads["uniform"].requests[:count]
        return plan_estimate(engine, seen, planned, self.clock)

    def _check_quantization_error(self) -> Record:
        from checks import draw, error_requests, quantization_error

        drawn = draw(self.subject.model, error_requests(self.args.steps, self.scale))
        if self.subject.precision == "bf16":
            self.reference = drawn
        return quantization_error(self.reference, drawn)


def versions() -> dict[str, str]:
    """Of what decides speed or bits."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
