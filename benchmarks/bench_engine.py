"""Denoise throughput of the packed engine beside diffusers' transformer loop, full-size Qwen-Image.

    python benchmarks/bench_engine.py --steps 10 --out benchmarks/results/h200_engine.json

One process, one device, turn by turn: each system once per workload, after a warm-up of one step. Systems:

* ``diffusers_serial``: one image at a time, the two guidance branches one after the other;
* ``diffusers_batch``: presorted by shape and guidance, up to 8 together, prompts padded and masked
  where their lengths differ, as the diffusers pipeline does;
* ``packed``: this engine, whatever the requests are; ``packed_fp8`` with ``--fp8``.

Compared is device time of denoising alone, by CUDA events, per image. ``wall_s`` of the engine also
holds prompt encoding, VAE decode and the copy to the host. Floor: FLOPs of real tokens over PEAK.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from full_size import build_pipeline, checkpoint, read_prompts

from offline_diffusion.accel.quantize import apply_quantization
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.models.loader import model_from_pipeline
from offline_diffusion.request import Request

PEAK_FLOPS = 790e12
"""bf16 matrix rate measured on an H200 with random data."""

BATCH = 8


def make_requests(
    sizes: Sequence[tuple[int, int]], steps: int, prompt_set: Path | None, unguided: Iterable[int] = ()
) -> list[Request]:
    """Requests of ``sizes`` (height, width) in pixels; those in ``unguided`` have guidance off."""
    off = set(unguided)
    prompts = read_prompts(len(sizes), prompt_set)
    return [
        Request(
            request_id=str(index),
            prompt=prompts[index],
            negative_prompt=None if index in off else " ",
            height=height,
            width=width,
            num_inference_steps=steps,
            true_cfg_scale=4.0,
            seed=1000 + index,
        )
        for index, (height, width) in enumerate(sizes)
    ]


def workloads(steps: int, prompt_set: Path | None = None) -> dict[str, list[Request]]:
    """Named job mixes."""
    mixed = [(512, 512)] * 8 + [(768, 768)] * 5 + [(1024, 1024)] * 3
    spread = [
        (256, 256),
        (384, 640),
        (512, 512),
        (640, 384),
        (768, 768),
        (1024, 1024),
        (832, 1216),
        (1024, 576),
    ]
    return {
        "256": make_requests([(256, 256)] * 16, steps, prompt_set),
        "512": make_requests([(512, 512)] * 16, steps, prompt_set),
        "1024": make_requests([(1024, 1024)] * 4, steps, prompt_set),
        "mixed16": make_requests(mixed, steps, prompt_set),
        "spread_fifth_unguided": make_requests(spread * 2, steps, prompt_set, unguided=range(0, 16, 5)),
    }


def floor_seconds(requests: Sequence[Request], engine_model: Any) -> float:
    """FLOPs of all steps and branches over the peak rate."""
    flops = 0.0
    for request in requests:
        texts = [request.prompt] + ([request.negative_prompt or ""] if request.cfg_active else [])
        image = engine_model.capabilities.num_image_tokens(request.height, request.width)
        for text in texts:
            tokens = image + engine_model.tokenize(text).num_tokens
            flops += engine_model.capabilities.forward_flops(tokens) * request.num_inference_steps
    return flops / PEAK_FLOPS


def diffusers_seconds(pipeline: Any, requests: Sequence[Request], batch: int) -> float:
    """Device seconds of diffusers' own transformer over all requests, in same-shape batches."""
    groups: dict[tuple[int, int, bool], list[Request]] = defaultdict(list)
    for request in requests:
        groups[(request.height, request.width, request.cfg_active)].append(request)
    total = 0.0
    for (height, width, guided), members in groups.items():
        for start in range(0, len(members), batch):
            part = members[start : start + batch]
            total += _diffusers_group(pipeline, part, height, width, guided)
    return total


@torch.inference_mode()
def _diffusers_group(pipeline: Any, part: Sequence[Request], height: int, width: int, guided: bool) -> float:
    device = pipeline.transformer.device
    encode = pipeline.encode_prompt
    embeds, mask = encode([request.prompt for request in part], device=device, max_sequence_length=512)
    branches = [(embeds, mask)]
    if guided:
        negatives = [request.negative_prompt for request in part]
        branches.append(encode(negatives, device=device, max_sequence_length=512))
    rows, columns = height // 16, width // 16
    latents = torch.randn(len(part), rows * columns, 64, device=device, dtype=torch.bfloat16)
    shapes = [[(1, rows, columns)]] * len(part)
    steps = part[0].num_inference_steps
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for step in range(steps):
        timestep = torch.full((len(part),), 1.0 - step / steps, device=device, dtype=torch.bfloat16)
        outs = [
            pipeline.transformer(
                hidden_states=latents,
                timestep=timestep,
                encoder_hidden_states=text,
                encoder_hidden_states_mask=text_mask,
                img_shapes=shapes,
                return_dict=False,
            )[0]
            for text, text_mask in branches
        ]
        pred = outs[0]
        if guided:
            comb = outs[1] + 4.0 * (pred - outs[1])
            pred = comb * (pred.norm(dim=-1, keepdim=True) / comb.norm(dim=-1, keepdim=True))
        latents = (latents.float() - pred.float() / steps).to(torch.bfloat16)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def packed_seconds(engine: Engine, requests: Sequence[Request]) -> dict[str, float]:
    """Runs the whole engine; device seconds of denoising and wall seconds of everything."""
    before, tokens, budget = engine.stats.device_s, engine.stats.num_step_tokens, engine.stats.budget_tokens
    start = time.perf_counter()
    outputs = list(engine.generate(requests))
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    failed = [output.error for output in outputs if output.status != "ok"]
    if failed or len(outputs) != len(requests):
        raise SystemExit(f"{len(failed)} of {len(requests)} requests failed: {failed[:1]}")
    fill = (engine.stats.num_step_tokens - tokens) / (engine.stats.budget_tokens - budget)
    return {"denoise_s": engine.stats.device_s - before, "wall_s": wall, "step_fill": fill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--budget", type=int, default=16_384)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--prompts", type=Path, help="a prompt set such as PartiPrompts.tsv")
    parser.add_argument("--fp8", action="store_true", help="measure this engine in fp8 too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    pipeline = build_pipeline(device, num_layers=args.layers)
    model = model_from_pipeline(pipeline, checkpoint(args.layers), device, args.attention_backend)
    config = EngineConfig(max_num_batched_tokens=args.budget, max_num_seqs=64)
    engine = Engine(model, config)
    assert isinstance(engine.runner, ModelRunner)
    chosen = {
        name: requests
        for name, requests in workloads(args.steps, args.prompts).items()
        if not args.only or name in args.only
    }
    records = []
    for name, requests in chosen.items():
        records += measure(name, requests, pipeline, engine)
    if args.fp8:
        apply_quantization(model, "fp8")  # from here on diffusers' weights are gone
        records += [measure_quantized(name, requests, engine, records) for name, requests in chosen.items()]
    header = {
        "device": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": __import__("diffusers").__version__,
            "transformers": __import__("transformers").__version__,
        },
        "attention_backend": model.attention_backend,
        "token_budget": engine.scheduler.max_num_batched_tokens,
        "steps": args.steps,
        "layers": args.layers,
        "prompts": args.prompts.name if args.prompts else "made of words",
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }
    result = {**header, "records": records}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def measure(name: str, requests: Sequence[Request], pipeline: Any, engine: Engine) -> list[dict[str, Any]]:
    """Floor, diffusers and this engine in bfloat16 on one workload, after a warm-up of one step each."""
    floor = floor_seconds(requests, engine.model)
    ours = _warm_packed(engine, requests)
    short = _one_step(requests)
    diffusers_seconds(pipeline, short[:1], 1)
    serial = diffusers_seconds(pipeline, requests, 1)
    diffusers_seconds(pipeline, short, BATCH)
    batch = diffusers_seconds(pipeline, requests, BATCH)
    base = {"workload": name, "num_images": len(requests)}
    return [
        _record(base | {"system": "floor"}, floor, floor, serial, batch),
        _record(base | {"system": "diffusers_serial"}, serial, floor, serial, batch),
        _record(base | {"system": "diffusers_batch"}, batch, floor, serial, batch),
        _record(base | {"system": "packed"} | ours, ours["denoise_s"], floor, serial, batch),
    ]


def measure_quantized(
    name: str, requests: Sequence[Request], engine: Engine, records: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """This engine once more, its model quantized meanwhile, beside the earlier ``records``."""
    seconds = {r["system"]: r["denoise_s"] for r in records if r["workload"] == name}
    ours = _warm_packed(engine, requests)
    base = {"workload": name, "num_images": len(requests), "system": "packed_fp8"}
    rivals = (seconds["floor"], seconds["diffusers_serial"], seconds["diffusers_batch"])
    return _record(base | ours, ours["denoise_s"], *rivals)


def _warm_packed(engine: Engine, requests: Sequence[Request]) -> dict[str, float]:
    packed_seconds(engine, _one_step(requests))
    return packed_seconds(engine, requests)


def _one_step(requests: Sequence[Request]) -> list[Request]:
    return [replace(request, num_inference_steps=1) for request in requests]


def _record(
    values: dict[str, Any], seconds: float, floor: float, serial: float, batch: float
) -> dict[str, Any]:
    """Prints one system's line and returns its record."""
    record = {key: round(value, 3) if isinstance(value, float) else value for key, value in values.items()}
    record |= {
        "denoise_s": round(seconds, 3),
        "s_per_image": round(seconds / values["num_images"], 4),
        "share_of_floor": round(floor / seconds, 3),
        "tflops_useful": round(floor * PEAK_FLOPS / seconds / 1e12, 1),
        "ratio_to_diffusers_serial": round(serial / seconds, 3),
        "ratio_to_diffusers_batch": round(batch / seconds, 3),
    }
    print(
        f"{record['workload']:>22} {record['system']:>17} {seconds:8.2f} s  "
        f"{record['tflops_useful']:6.1f} TFLOP/s x{serial / seconds:.2f} serial x{batch / seconds:.2f} batch",
        flush=True,
    )
    return record


if __name__ == "__main__":
    main()
