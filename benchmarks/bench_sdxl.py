"""Full-size SDXL with random weights: diffusers and this engine, turn by turn in one process.

    python benchmarks/bench_sdxl.py                       # everything; needs a GPU with 80 GiB
    python benchmarks/bench_sdxl.py --only 1024 --systems diffusers_batch offdiff
    python benchmarks/bench_sdxl.py --only 1024 --parts   # where a step's device time goes, kernel by kernel

Whole runs, from the prompt's text to pixels on the host: wall seconds. diffusers draws a share of the images
and its time is taken to grow with their number. FLOPs are those of the UNet, text and decode left out; the
floor is 790 TFLOP/s in bf16, whatever the precision. The last line is the records as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from clock import Clock
from full_size_families import build
from ours import make_engine, run, warm_up
from records import PEAK_FLOPS, portable_command

from offline_diffusion.accel.quantize import apply_quantization
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.loader import model_from_pipeline
from offline_diffusion.request import Request, SamplingParams

WORDS = [
    "storm",
    "lamp",
    "violet",
    "river",
    "seven",
    "quiet",
    "engines",
    "under",
    "glass",
    "a",
    "red",
    "cup",
    "in",
    "the",
    "morning",
    "light",
    "of",
    "a",
    "city",
]
BUCKETS = ((1024, 1024), (832, 1216), (1216, 832), (768, 1344))
"""Height and width of shapes that SDXL was trained on."""

BATCH = 8
"""Images of a call of diffusers."""

PACKAGES = ("torch", "diffusers", "transformers", "triton", "fa3-fwd")
SYSTEMS = ("diffusers_serial", "diffusers_batch", "offdiff", "offdiff_fp8")


@dataclass(frozen=True)
class Workload:
    """Images of some sizes in turn."""

    sizes: Sequence[tuple[int, int]]
    num_steps: int
    guidance_scale: float
    num_images: int


WORKLOADS = {
    "1024": Workload([(1024, 1024)], 20, 5.0, 32),
    "512": Workload([(512, 512)], 20, 5.0, 64),
    "buckets": Workload(BUCKETS, 20, 5.0, 32),
    "turbo": Workload([(512, 512)], 1, 0.0, 256),
    "lightning": Workload([(1024, 1024)], 4, 0.0, 64),
}


def requests_of(workload: Workload, capabilities: Capabilities, count: int) -> list[Request]:
    """Every image has a prompt of its own."""
    requests = []
    for index in range(count):
        height, width = workload.sizes[index % len(workload.sizes)]
        params = SamplingParams(
            height=height,
            width=width,
            num_inference_steps=workload.num_steps,
            guidance_scale=workload.guidance_scale,
        )
        prompt = " ".join(WORDS[(index * 7 + place * 3) % len(WORDS)] for place in range(8 + index % 20))
        requests.append(capabilities.resolve(str(index), f"{prompt} {index}", params, seed=index))
    return requests


def flops_of(requests: Sequence[Request], capabilities: Capabilities) -> float:
    """Of all forwards of the UNet."""
    total = 0.0
    for own in requests:
        positions = capabilities.num_image_tokens(own.height, own.width)
        rows = own.num_inference_steps * (1 + own.cfg_active)
        total += rows * capabilities.forward_flops(positions, positions)
    return total


# --- systems -------------------------------------------------------------------------------------


def draw_with_diffusers(pipeline: Any, requests: Sequence[Request], batch: int, clock: Clock) -> float:
    """Seconds of drawing ``requests``, alike ones together; one call before that does not count."""
    shapes = dict.fromkeys((own.height, own.width) for own in requests)
    groups = [[own for own in requests if (own.height, own.width) == shape] for shape in shapes]
    calls = [group[start : start + batch] for group in groups for start in range(0, len(group), batch)]
    seconds = 0.0
    for index, call in enumerate([calls[0], *calls]):
        clock.synchronize()
        start = time.perf_counter()
        pipeline(
            [own.prompt for own in call],
            height=call[0].height,
            width=call[0].width,
            num_inference_steps=call[0].num_inference_steps,
            guidance_scale=call[0].guidance_scale,
            generator=[torch.Generator("cpu").manual_seed(own.seed) for own in call],
            output_type="np",
        )
        clock.synchronize()
        seconds += (time.perf_counter() - start) * (index > 0)
    return seconds


def record_of(
    name: str, system: str, requests: Sequence[Request], seconds: float, flops: float
) -> dict[str, Any]:
    return {
        "workload": name,
        "system": system,
        "num_images": len(requests),
        "wall_s": round(seconds, 3),
        "images_per_s": round(len(requests) / seconds, 3),
        "tflops_useful": round(flops / seconds / 1e12, 1),
        "share_of_floor": round(flops / seconds / PEAK_FLOPS, 3),
    }


class Benchmark:
    """The pipeline and the models over its weights.

    Args:
        args: As parsed.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.clock = Clock(self.device)
        self.pipeline, self.checkpoint = build("sdxl", self.device, num_layers=args.layers)
        self.capabilities = self.checkpoint.capabilities
        self.engines: dict[str, Any] = {}

    def engine(self, system: str) -> Any:
        """Made when it is first wanted; the quantized one from weights of its own."""
        if system not in self.engines:
            pipeline = self.pipeline
            if system == "offdiff_fp8":
                pipeline, _ = build("sdxl", self.device, num_layers=self.args.layers)
            model = model_from_pipeline(pipeline, self.checkpoint, self.device, self.args.attention_backend)
            apply_quantization(model, "fp8" if system == "offdiff_fp8" else "none")
            self.engines[system] = make_engine(model, max_num_batched_tokens=self.args.budget)
            print(f"{system}: {self.engines[system].scheduler.max_num_batched_tokens:,} tokens a step")
        return self.engines[system]

    def measure(self, name: str, system: str) -> dict[str, Any]:
        workload = WORKLOADS[name]
        count = self.args.images or workload.num_images
        if system.startswith("diffusers"):
            batch = 1 if system == "diffusers_serial" else BATCH
            count = min(count, 2 * batch * len(workload.sizes))
            requests = requests_of(workload, self.capabilities, count)
            seconds = draw_with_diffusers(self.pipeline, requests, batch, self.clock)
            return record_of(name, system, requests, seconds, flops_of(requests, self.capabilities))
        requests, engine = requests_of(workload, self.capabilities, count), self.engine(system)
        warm_up(engine, requests)
        result = run(engine, requests, self.clock)
        record = record_of(name, system, requests, result.wall_s, flops_of(requests, self.capabilities))
        more = {"denoise_s": result.denoise_s, "decode_s": result.decode_s, "step_fill": result.step_fill}
        return record | {key: round(value, 3) for key, value in more.items()}

    def parts(self, name: str, system: str) -> None:
        """Kernels of a few full steps by device time."""
        from torch.profiler import ProfilerActivity, profile

        engine, workload = self.engine(system), WORKLOADS[name]
        requests = requests_of(workload, self.capabilities, self.args.images or 16)
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
    add("--only", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    add("--systems", nargs="*", choices=SYSTEMS, default=SYSTEMS)
    add("--parts", action="store_true", help="kernels of steps by device time instead of whole runs")
    add("--images", type=int, help="of each workload; default: its own number")
    add("--budget", type=int, help="max_num_batched_tokens; default: the engine's own")
    add("--attention-backend", default="auto")
    add("--device", default="cuda")
    add("--layers", type=int, default=10, help="most transformer blocks of a level; 10 is the full model")
    return parser.parse_args(arguments)


@torch.inference_mode()
def main(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    name = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "CPU"
    versions = {package: _version(package) for package in PACKAGES}
    print(f"{name}, {versions}; floor: {PEAK_FLOPS / 1e12:.0f} TFLOP/s")
    benchmark, records = Benchmark(args), []
    for workload in args.only:
        for system in args.systems:
            if args.parts:
                if not system.startswith("diffusers"):
                    benchmark.parts(workload, system)
                continue
            records.append(benchmark.measure(workload, system))
            print(", ".join(f"{key} {value}" for key, value in records[-1].items()), flush=True)
    command = portable_command(sys.argv[0], arguments)
    print(json.dumps({"device": name, "versions": versions, "command": command, "records": records}))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
