"""FLUX.1, Stable Diffusion 3 and 3.5, SDXL at full size: diffusers and this engine by turns, in one process.

    python benchmarks/bench_families.py --model flux_dev    # all cells; needs a GPU with 140 GiB
    python benchmarks/bench_families.py --model sdxl --only 1024 --systems diffusers_batch offdiff offdiff_fp8
    python benchmarks/bench_families.py --model sdxl --only 1024 --parts   # kernels of a step by device time
    python benchmarks/bench_families.py --model sd35_large --device cpu --tiny --only 1024     # to rehearse

Weights are random. Every system gives two times an image: of the denoise loop on the device, and of all from
text to pixels on the host. Where ``num_timed_steps`` is less than ``num_steps``, fewer steps were run and a
step's time is multiplied; encoding and decoding are always run whole. diffusers draws a share of the images:
of each shape at most two calls. FLOPs are those of the transformer or UNet; the floor is 790 TFLOP/s in bf16,
whatever the precision. The last line is the records as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from checks import exactness
from clock import Clock
from compositions import SIZES
from family_rival import Times, time_diffusers
from full_size_families import NAMES, build
from idle import traced_idle_share
from ours import make_engine, run, trace_requests, warm_up
from plan import BATCH
from records import PEAK_FLOPS, Record, Report, header, line, portable_command, speed_fields
from workloads import scaled, words

from offline_diffusion.accel.quantize import apply_quantization
from offline_diffusion.models.capabilities import BatchKind, Capabilities
from offline_diffusion.models.loader import model_from_pipeline
from offline_diffusion.request import Request, SamplingParams

PACKAGES = ("torch", "diffusers", "transformers", "triton", "fa3-fwd")
SYSTEMS = ("diffusers_serial", "diffusers_batch", "offdiff", "offdiff_fp8")
TINY_SCALE = 8
"""Sides are divided by this for `--tiny`."""

FEW_STEPS = 4
"""A checkpoint with no more is one where the host's work weighs: its idle share is traced."""

SQUARE = ((1024, 1024),)
SMALL = ((512, 512),)
MIX = (
    (512, 512),
    (1024, 1024),
    (512, 1024),
    (768, 768),
    (640, 896),
    (1024, 512),
    (896, 640),
    (832, 1024),
)
BUCKETS = ((1024, 1024), (832, 1216), (1216, 832), (768, 1344))
"""Height and width of shapes that SDXL was trained on."""


@dataclass(frozen=True)
class Workload:
    """Images of some sizes in turn; ``guidance_scale`` as the family's pipeline means it."""

    sizes: Sequence[tuple[int, int]]
    num_steps: int
    guidance_scale: float
    num_images: int


SD3_WORKLOADS = {"1024": Workload(SQUARE, 28, 7.0, 16), "512": Workload(SMALL, 28, 7.0, 48)}
WORKLOADS = {
    "flux_dev": {
        "1024": Workload(SQUARE, 28, 3.5, 28),
        "mix": Workload(MIX, 28, 3.5, 48),
        "512": Workload(SMALL, 28, 3.5, 64),
    },
    "flux_schnell": {"1024": Workload(SQUARE, 4, 0.0, 56), "512": Workload(SMALL, 4, 0.0, 128)},
    "sd3_medium": SD3_WORKLOADS,
    "sd35_medium": SD3_WORKLOADS,
    "sd35_large": SD3_WORKLOADS,
    "sdxl": {
        "1024": Workload(SQUARE, 20, 5.0, 32),
        "512": Workload(SMALL, 20, 5.0, 64),
        "buckets": Workload(BUCKETS, 20, 5.0, 32),
    },
    "sdxl_turbo": {"512": Workload(SMALL, 1, 0.0, 256), "lightning": Workload(SQUARE, 4, 0.0, 64)},
}
assert set(WORKLOADS) == set(NAMES)


def requests_of(
    name: str, workload: Workload, capabilities: Capabilities, count: int, scale: int
) -> list[Request]:
    """Every image has a prompt of its own."""
    requests = []
    for index in range(count):
        height, width = workload.sizes[index % len(workload.sizes)]
        params = SamplingParams(
            height=scaled(height, scale),
            width=scaled(width, scale),
            num_inference_steps=workload.num_steps,
            guidance_scale=workload.guidance_scale,
        )
        requests.append(
            capabilities.resolve(f"{name}-{index}", words(name, index), params, seed=1000 + index)
        )
    return requests


def flops_of(requests: Sequence[Request], capabilities: Capabilities) -> float:
    """Of all forwards of the transformer or UNet. A packed sequence is the image and the padded prompt."""
    assert capabilities.padded_text_tokens is not None
    is_packed = capabilities.batch_kind is BatchKind.PACKED
    num_text = capabilities.padded_text_tokens if is_packed else 0
    total = []
    for own in requests:
        image = capabilities.num_image_tokens(own.height, own.width)
        forwards = own.num_inference_steps * (1 + own.cfg_active)
        total.append(forwards * capabilities.forward_flops(image + num_text, image))
    return math.fsum(total)


class Benchmark:
    """The pipelines and the models over their weights.

    Args:
        args: As parsed.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.clock, self.scale = Clock(self.device), TINY_SCALE if args.tiny else 1
        self.pipeline, self.checkpoint = self._build()
        self.capabilities = self.checkpoint.capabilities
        self.is_packed = self.capabilities.batch_kind is BatchKind.PACKED
        self.engines: dict[str, Any] = {}

    def _build(self) -> tuple[Any, Any]:
        """The same weights every time."""
        layers = 2 if self.args.tiny else None
        return build(
            self.args.model, self.device, num_layers=layers, num_text_layers=layers and 3, tiny=self.args.tiny
        )

    def engine(self, system: str) -> Any:
        """Made when it is first wanted.

        Only a packed model in bf16 may share diffusers' weights: quantization takes them away, and a UNet's
        memory format is changed.
        """
        if system not in self.engines:
            is_quantized = system == "offdiff_fp8"
            shares = self.is_packed and not is_quantized
            pipeline = self.pipeline if shares else self._build()[0]
            model = model_from_pipeline(pipeline, self.checkpoint, self.device, self.args.attention_backend)
            apply_quantization(model, "fp8" if is_quantized else "none")
            self.engines[system] = make_engine(model, max_num_batched_tokens=self.args.budget)
            print(f"{system}: {self.engines[system].scheduler.max_num_batched_tokens:,} tokens a step")
        return self.engines[system]

    def requests(self, name: str) -> list[Request]:
        workload = WORKLOADS[self.args.model][name]
        count = self.args.images or (2 if self.args.tiny else workload.num_images)
        return requests_of(name, workload, self.capabilities, count, self.scale)

    def measure(self, name: str, system: str) -> Record:
        """A cell. Seconds of the denoise loop and of everything, over all images of the workload."""
        requests, more = self.requests(name), {}
        if system.startswith("diffusers"):
            batch = 1 if system == "diffusers_serial" else BATCH
            times = time_diffusers(self.pipeline, requests, batch, self.clock, self.args.timed_steps)
        else:
            times, more = self._time_ours(self.engine(system), requests)
        num_images, num_steps = len(requests), requests[0].num_inference_steps
        speed = speed_fields(num_images, times.denoise_s, flops_of(requests, self.capabilities))
        whole = {
            "wall_s_per_image": times.wall_s / num_images,
            "wall_images_per_s": num_images / times.wall_s,
            "num_steps": num_steps,
            "num_timed_steps": times.num_timed_steps,
            "is_scaled": times.num_timed_steps < num_steps,
        }
        return speed | whole | more

    def _time_ours(self, engine: Any, requests: Sequence[Request]) -> tuple[Times, Record]:
        num_steps = requests[0].num_inference_steps
        num_timed = min(num_steps, 2 * self.args.timed_steps)
        short = [replace(own, num_inference_steps=num_timed) for own in requests]
        warm_up(engine, short)
        result = run(engine, short, self.clock)
        denoise_s = result.denoise_s * num_steps / num_timed
        times = Times(denoise_s, result.wall_s + denoise_s - result.denoise_s, num_timed)
        beside = (result.wall_s - result.denoise_s) / len(requests)
        more: Record = {"step_fill": result.step_fill, "beside_steps_s_per_image": beside}
        more["decode_s_per_image"] = result.decode_s / len(requests)
        if num_steps <= FEW_STEPS:
            more["gpu_idle_share"] = traced_idle_share(engine, trace_requests(engine, requests))
        return times, more

    def exactness(self) -> Record:
        """Packed against alone."""
        sizes = [(scaled(height, self.scale), scaled(width, self.scale)) for height, width in SIZES]
        model = self.engine("offdiff").model
        return {"found": exactness(model, self.args.compositions, self.args.jobs, sizes)}

    def parts(self, name: str, system: str) -> None:
        """Kernels of a few full steps by device time."""
        from torch.profiler import ProfilerActivity, profile

        engine, requests = self.engine(system), self.requests(name)
        warm_up(engine, requests)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.clock.on_gpu
        for own in requests:
            engine.add_request(own)
        engine.close_source()
        for _ in range(3):
            engine.step()
        with profile(activities=activities) as profiler:
            for _ in range(2):
                engine.step()
            self.clock.synchronize()
        sort_by = "self_cuda_time_total" if self.clock.on_gpu else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=sort_by, row_limit=40, max_name_column_width=90))
        while engine.has_unfinished:
            engine.step()


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, choices=NAMES)
    add("--only", nargs="*", help="cells of the model: its sizes, and exactness; default: all")
    add("--systems", nargs="*", choices=SYSTEMS, default=SYSTEMS[:3])
    add("--parts", action="store_true", help="kernels of steps by device time instead of whole runs")
    add("--images", type=int, help="of each workload; default: its own number")
    add(
        "--timed-steps",
        type=int,
        default=5,
        help="of a call of diffusers; of the engine's runs twice as many",
    )
    add("--compositions", type=int, default=8, help="random packs of the exactness check")
    add("--jobs", type=int, default=2, help="whole random jobs of the exactness check")
    add("--budget", type=int, help="max_num_batched_tokens; default: the engine's own")
    add("--attention-backend", default="auto")
    add("--device", default="cuda")
    add(
        "--tiny", action="store_true", help="narrow and shallow, sides divided by 8: no number means anything"
    )
    add("--out", type=Path, help="merge the records into this file after every cell")
    args = parser.parse_args(arguments)
    cells = [*WORKLOADS[args.model], *([] if args.model.startswith("sdxl") else ["exactness"])]
    args.only = args.only or cells
    if unknown := set(args.only) - set(cells):
        parser.error(f"{args.model} has no cell {', '.join(sorted(unknown))}; it has {', '.join(cells)}")
    return args


def measure_all(benchmark: Benchmark, report: Report) -> None:
    """Every cell, printed and saved as it comes; one that does not fit into memory says so and no more."""
    args, walls = benchmark.args, {}
    for cell in args.only:
        if cell == "exactness":
            print(line(report.add(f"{args.model}-exactness", "offdiff", "bf16", benchmark.exactness())))
            continue
        for system in args.systems:
            try:
                values = benchmark.measure(cell, system)
            except torch.OutOfMemoryError as error:
                print(f"{args.model}-{cell} {system}: out of memory: {error}", flush=True)
                continue
            walls[cell, system] = own = values["wall_s_per_image"]
            for rival in ("diffusers_serial", "diffusers_batch"):
                values[f"wall_ratio_to_{rival}"] = (
                    walls[cell, rival] / own if (cell, rival) in walls else None
                )
            precision = "fp8" if system == "offdiff_fp8" else "bf16"
            name = system.removesuffix("_fp8")
            print(line(report.add(f"{args.model}-{cell}", name, precision, values)), flush=True)


@torch.inference_mode()
def main(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    name = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "CPU"
    versions = {package: _version(package) for package in PACKAGES}
    print(f"{name}, {versions}; floor: {PEAK_FLOPS / 1e12:.0f} TFLOP/s")
    benchmark = Benchmark(args)
    for cell in (own for own in args.only if own != "exactness"):
        requests = benchmark.requests(cell)
        floor_s = flops_of(requests, benchmark.capabilities) / PEAK_FLOPS / len(requests)
        print(f"floor of {args.model}-{cell}: {floor_s:.4g} s an image")
    if args.parts:
        for cell in (own for own in args.only if own != "exactness"):
            for system in (own for own in args.systems if own.startswith("offdiff")):
                benchmark.parts(cell, system)
        return
    command = portable_command(sys.argv[0], arguments)
    report = Report(args.out, {"device": name, "versions": versions, "command": command})
    print(header())
    measure_all(benchmark, report)
    print(json.dumps(report.records))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _silence_libraries() -> None:
    """They tell of every prompt that is cut."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()


if __name__ == "__main__":
    _silence_libraries()
    main(sys.argv[1:])
