"""Where a packed step's time goes: kernels by device time, for one workload of `bench_qwen_image`.

python benchmarks/profile_step.py 512
"""

from __future__ import annotations

import argparse

import torch
from compositions import prepare
from full_size import build_pipeline, checkpoint
from workloads import make_workloads

from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.models.loader import model_from_pipeline

NUM_LAYERS = 12


@torch.inference_mode()
def main() -> None:
    workloads = make_workloads(8)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", nargs="?", default="512", choices=workloads)
    requests = workloads[parser.parse_args().workload].requests
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    device = torch.device("cuda")
    model = model_from_pipeline(build_pipeline(device, num_layers=NUM_LAYERS), checkpoint(NUM_LAYERS), device)
    runner = ModelRunner(model)
    prepared = []
    num_tokens = 0
    for request in requests:
        prepared.append(prepare(runner, request))
        num_tokens += 2 * prepared[-1].num_image_tokens
        if num_tokens >= 16_000:
            break
    for _ in range(3):
        runner.denoise(prepared)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        runner.denoise(prepared)
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=70))


if __name__ == "__main__":
    main()
