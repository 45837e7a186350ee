"""What quantization, fewer steps and less guidance cost in quality: pictures scored against their captions.

    python benchmarks/bench_quality.py --model MODEL --output benchmarks/results/h200_quality.json
    python benchmarks/bench_quality.py --model MODEL --settings bf16 --steps 20 10 5 --guidance 4 2 1
    python benchmarks/bench_quality.py --count 10 --sizes 64x64    # the default model; also on a CPU

The first of --settings, --steps and --guidance together are the reference; each other value is tried with
the first of the rest. Rows, seeds included, are the same in every setting. Scoring needs scipy (the `test`
extra). What each number means: benchmarks/README.md. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from bench_qwen_image import versions
from ours import RunFailed
from quality import (
    MEASURES,
    SETS,
    Figures,
    Judged,
    Pixels,
    Row,
    clearly,
    drawn,
    figures,
    judge_all,
    make_rows,
    targets,
)
from quality_sheet import make_sheet
from records import portable_command, rounded

from offline_diffusion.config import EngineConfig
from offline_diffusion.errors import OffdiffError
from offline_diffusion.models.loader import resolve_device
from offline_diffusion.request import RequestOutput, SamplingParams

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "fp32": {"dtype": "float32"},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
}
"""Setting → the engine's options."""

DEFAULT_PRECISIONS = {"cuda": ["bf16", "fp8", "int8"], "cpu": ["fp32", "fp8", "int8"]}
DEFAULT_SIZES = ["64x64", "128x128", "256x256", "256x128"]
NEGATIVE_PROMPT = " "
"""Without one there is no guidance."""


class QualityEngine(Protocol):
    """As much of `OfflineDiffusion` as is needed here."""

    def generate(
        self, prompts: Sequence[str], params: Sequence[SamplingParams]
    ) -> Iterable[RequestOutput]: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """How the engine draws."""

    precision: str
    num_inference_steps: int
    true_cfg_scale: float

    def __str__(self) -> str:
        return f"{self.precision} {self.num_inference_steps} steps cfg {self.true_cfg_scale:g}"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", help="a folder or hub id; default: that of the product")
    add("--count", type=int, default=500, help="captions of each set and size; there are two sets")
    add("--sizes", nargs="+", default=DEFAULT_SIZES, metavar="WIDTHxHEIGHT")
    add("--settings", nargs="+", choices=PRECISIONS, help="default: bf16, on a CPU fp32; fp8; int8")
    add("--steps", nargs="+", type=int, default=[20])
    add("--guidance", nargs="+", type=float, default=[4.0, 1.0], help="true_cfg_scale; 1 is without")
    add("--device", default="auto")
    add("--output", type=Path, help="where the record is written, after every setting")
    add("--sheet", type=Path, metavar="PNG", help="a contact sheet of the reference")
    args = parser.parse_args(arguments)
    try:
        args.sizes = [_size(text) for text in args.sizes]
    except ValueError:
        parser.error(f"--sizes must be like 128x64, multiples of 16, got {' '.join(args.sizes)}")
    if min(args.count, *args.steps) < 1 or min(args.guidance) < 0:
        parser.error("--count and --steps must be at least 1, --guidance at least 0")
    return args


def _size(text: str) -> tuple[int, int]:
    """Height and width."""
    width, height = map(int, text.split("x"))
    if min(width, height) < 16 or width % 16 or height % 16:
        raise ValueError(text)
    return height, width


def main(arguments: Sequence[str]) -> int:
    args = parse_arguments(arguments)
    try:
        device = resolve_device(args.device)
        record = describe(args, device, portable_command(sys.argv[0], arguments))
        with make_pool() as pool:
            run(args, record, device, pool)
    except (OffdiffError, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(record)
    print(json.dumps(record, allow_nan=False))
    return 0


def make_pool() -> Executor:
    """A process for every core: to judge a picture takes one for 10 to 100 ms."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for them: the libraries of this process have read it already
    context = multiprocessing.get_context("spawn")  # a fork would share the GPU
    return ProcessPoolExecutor(os.cpu_count(), mp_context=context)


def describe(args: argparse.Namespace, device: torch.device, command: str) -> Figures:
    """What is measured where: the record before any setting."""
    on_gpu = device.type == "cuda"
    default = EngineConfig.model_fields["model"].default
    return {
        "hardware": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "num_cores": os.cpu_count(),
        "versions": {**versions(), "scipy": metadata.version("scipy")},
        "run": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "model": default if args.model is None else Path(args.model).name,
        "negative_prompt": NEGATIVE_PROMPT,
        "count": args.count,
        "sets": SETS,
        "settings": [],
        "targets": [],
    }


def run(args: argparse.Namespace, record: Figures, device: torch.device, pool: Executor) -> None:
    """Fills ``record`` setting by setting, the drawn pictures themselves first, and writes it."""
    rows = make_rows(args.sizes, args.count, pool)
    precisions = args.settings or DEFAULT_PRECISIONS[device.type]
    settings = make_settings(precisions, args.steps, args.guidance)
    print(f"{record['model']} on {record['hardware']}: {len(settings)} settings, {len(rows)} pictures each")
    record["drawn"] = rounded(figures(rows, judge_all(drawn(rows), rows, {}, pool)))
    print(f"ceiling, the drawn pictures themselves: {shares(record['drawn']['all'])}", flush=True)
    bench = Benchmark(rows, pool, lambda precision: load(args.model, str(device), precision))
    for setting in settings:
        record["settings"].append(bench.measure(setting))
        record["targets"] = targets(record["settings"])
        print(f"{setting}: {shares(record['settings'][-1]['figures']['all'])}", flush=True)
        if args.output is not None:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        if args.sheet is not None and setting == settings[0]:
            args.sheet.parent.mkdir(parents=True, exist_ok=True)
            make_sheet(rows, bench.references, bench.judged).save(args.sheet, optimize=True)


def make_settings(
    precisions: Sequence[str], steps: Sequence[int], guidance: Sequence[float]
) -> list[Setting]:
    """The reference first, then what differs from it in one value; a precision is loaded once."""
    settings = [
        *(Setting(precisions[0], count, guidance[0]) for count in steps),
        *(Setting(precisions[0], steps[0], scale) for scale in guidance),
        *(Setting(precision, steps[0], guidance[0]) for precision in precisions),
    ]
    return list(dict.fromkeys(settings))


def load(model: str | None, device: str, precision: str) -> QualityEngine:
    """The product's engine."""
    from offline_diffusion import OfflineDiffusion

    return OfflineDiffusion(model, device=device, **PRECISIONS[precision])


class Benchmark:
    """Draws and judges the same rows in one setting after the other; the first is the reference.

    Args:
        rows: To be drawn.
        pool: Judges.
        load: Makes an engine of a precision.
    """

    def __init__(self, rows: Sequence[Row], pool: Executor, load: Callable[[str], QualityEngine]) -> None:
        self._rows, self._pool, self._load = rows, pool, load
        self._engine: QualityEngine | None = None
        self._precision = ""
        self._reference: Figures = {}
        self.references: dict[int, Pixels] = {}
        self.judged: list[Judged] = []
        """Pictures and judgement of the reference."""

    def measure(self, setting: Setting) -> Figures:
        """What the record says of a setting.

        Raises:
            RunFailed: A picture could not be drawn.
        """
        engine = self._engine_of(setting.precision)
        is_reference = not self._reference
        start = time.perf_counter()
        pictures = paint(engine, setting, self._rows)
        if is_reference:
            pictures = kept(pictures, self.references)
        judged = judge_all(pictures, self._rows, {} if is_reference else self.references, self._pool)
        found = rounded(figures(self._rows, judged))
        seconds = {"seconds": time.perf_counter() - start}
        record = {**asdict(setting), **rounded(seconds), "figures": found}
        if is_reference:
            self._reference, self.judged = found["all"], judged
            return {**record, "against_reference": None}
        verdicts = {name: clearly(found["all"][name], self._reference[name]) for name in MEASURES}
        return {**record, "against_reference": verdicts}

    def _engine_of(self, precision: str) -> QualityEngine:
        if self._engine is None or precision != self._precision:
            self._engine = None  # before there is another
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._engine, self._precision = self._load(precision), precision
        return self._engine


def paint(engine: QualityEngine, setting: Setting, rows: Sequence[Row]) -> Iterator[tuple[int, Pixels]]:
    """The engine's pictures with their places in ``rows``, as they finish.

    Raises:
        RunFailed: A request failed.
    """
    params = [
        SamplingParams(
            height=row.size[0],
            width=row.size[1],
            num_inference_steps=setting.num_inference_steps,
            true_cfg_scale=setting.true_cfg_scale,
            negative_prompt=NEGATIVE_PROMPT,
            seed=row.seed,
        )
        for row in rows
    ]
    for output in engine.generate([row.example.caption for row in rows], params):
        if output.pixels is None:
            raise RunFailed(f"{setting}: picture {output.request_id} {output.status}: {output.error}")
        yield int(output.request_id), output.pixels


def kept(pictures: Iterable[tuple[int, Pixels]], into: dict[int, Pixels]) -> Iterator[tuple[int, Pixels]]:
    """``pictures`` as they come, which are kept by their places as well."""
    for at, picture in pictures:
        into[at] = picture
        yield at, picture


# --- for people ----------------------------------------------------------------------------------


def shares(found: Figures) -> str:
    return ", ".join(f"{name} {found[name]['share']:.3f}" for name in MEASURES)


def print_table(record: Figures) -> None:
    """Shares with their intervals, a line for each size; then what was compared, and the targets."""
    titles = "".join(f"{name + ' right':<22}" for name in MEASURES)
    print(f"\n{'setting':<24}{'size':<10}{titles}{'PSNR dB':>8}{'SSIM':>8}{'equal':>7}")
    print_lines("drawn", record["drawn"])
    for own in record["settings"]:
        print_lines(name_of(own), own["figures"])
    for own in record["settings"][1:]:
        verdicts = ", ".join(f"{name} {verdict}" for name, verdict in own["against_reference"].items())
        print(f"{name_of(own)} against {name_of(record['settings'][0])}: {verdicts}")
    for target in record["targets"]:
        value = target["value"] if isinstance(target["value"], str) else f"{target['value']:.3f}"
        verdict = "met" if target["met"] else "MISSED"
        print(f"target: {target['what']:<24}{target['bound']:<6} is {value:<8} {verdict}")


def name_of(own: Figures) -> str:
    return str(Setting(own["precision"], own["num_inference_steps"], own["true_cfg_scale"]))


def print_lines(name: str, found: Figures) -> None:
    for size, own in found.items():
        cells = "".join(f"{interval(own[measure]):<22}" for measure in MEASURES)
        numbers = ((own["psnr_db"], 8, ".1f"), (own["ssim"], 8, ".3f"), (own["num_equal"], 7, "d"))
        nearness = "".join(f"{'-' if v is None else format(v, form):>{width}}" for v, width, form in numbers)
        print(f"{name:<24}{size:<10}{cells}{nearness}")


def interval(own: Figures) -> str:
    return f"{own['share']:.3f} {own['low']:.3f}–{own['high']:.3f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
