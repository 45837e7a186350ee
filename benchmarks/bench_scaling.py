"""Two GPUs of one host against one: the same manifest, `offdiff run --devices`, and a worker killed.

    python benchmarks/bench_scaling.py --work /dev/shm/scaling --prompts PartiPrompts.tsv   # all three jobs
    python benchmarks/bench_scaling.py --work /dev/shm/scaling --jobs one --seconds 575     # one, in sittings
    python benchmarks/bench_scaling.py --work /tmp/scaling --tiny            # to try it on CPUs

Jobs: `killed`, of which a worker is killed in mid-run; `many`, all devices; `one`, the first device alone.
The work folder holds the model, the manifests and the datasets, so that the same command goes on: with
--seconds a job that is not done in time is stopped in good order and the exit code is 75. What each number
means: benchmarks/README.md. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import scaling
from job_watch import JobWatch, Samples, Sitting
from records import ROOT, portable_command, replace_text
from workloads import make_workloads, read_prompts, words

JOBS = ("killed", "many", "one")
NOT_DONE = 75
STOP_S = 25.0
"""Of --seconds, what is left for a job to stop in good order."""

MODEL_BYTES = 58_000_000_000
DATASET_BYTES = 4_000_000_000

TINY: dict[str, Any] = {
    "devices": "cpu,cpu",
    "images": 64,
    "killed_images": 48,
    "steps": 20,
    "budget": 2048,
    "kill_after": 1.0,
}
"""What takes the place of the defaults with --tiny; sizes are divided by 4 as well."""

TINY_SCALE = 4
SETTINGS = ("tiny", "devices", "images", "killed_images", "steps", "budget", "shard_size", "prompts")


class BenchError(Exception):
    """For whoever runs the benchmark."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="model, manifests and datasets; the same one goes on")
    add("--output", type=Path, help="where the record is written, also while jobs are lacking")
    add("--jobs", nargs="*", choices=JOBS, default=JOBS)
    add("--seconds", type=float, help="this command's time; what is not done then goes on in the next")
    add("--devices", default="0,1", help="as of `offdiff run`")
    add("--images", type=int, default=448, help="of the timed jobs")
    add("--killed-images", type=int, default=128, help="of the job of which a worker is killed")
    add("--kill-after", type=float, default=15.0, help="seconds that all workers have drawn by then")
    add("--steps", type=int, default=20)
    add("--budget", type=int, help="max_num_batched_tokens; default: what each worker measures")
    add("--shard-size", type=int, default=8)
    add("--prompts", nargs="*", default=[], metavar="FILE", help="prompt sets; default: made of words")
    add("--tiny", action="store_true", help="a small model on CPUs, small images: no number means anything")
    args = parser.parse_args(arguments)
    if args.tiny:
        parser.set_defaults(**TINY)
        args = parser.parse_args(arguments)
    if min(args.images, args.killed_images, args.steps, args.shard_size) < 1 or "," not in args.devices:
        parser.error("counts must be at least 1, and --devices a list of at least two")
    return args


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 75 where a job is left, 1 where the datasets are not what they should be."""
    started, args = time.monotonic(), parse_arguments(arguments)
    command = portable_command(sys.argv[0], arguments)
    try:
        work = Work(args, command, None if args.seconds is None else started + args.seconds - STOP_S)
        left = [name for name in args.jobs if not work.run_job(name)]
        record = work.record()
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    scaling.print_summary(record)
    print(json.dumps(record, allow_nan=False))
    if left:
        print(f"not done: {', '.join(left)}; the same command goes on", file=sys.stderr)
        return NOT_DONE
    return 1 if record["problems"] else 0


class Work:
    """The work folder, and the jobs in it.

    Args:
        args: As parsed.
        command: For the record.
        stop_at: When a job is to be stopped, on the monotonic clock.

    Raises:
        BenchError: The folder belongs to another setting.
    """

    def __init__(self, args: argparse.Namespace, command: str, stop_at: float | None) -> None:
        self.args, self.folder, self._stop_at = args, args.work, stop_at
        self.devices: list[str] = args.devices.split(",")
        self._path = self.folder / "state.json"
        settings = {name: getattr(args, name) for name in SETTINGS}
        settings["prompts"] = [Path(source).name for source in args.prompts]
        self.state: dict[str, Any] = {"settings": settings, "commands": [], "jobs": {}}
        if self._path.exists():
            self.state = json.loads(self._path.read_text(encoding="utf-8"))
            check_settings(self.folder, self.state["settings"], settings)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.state["commands"].append(command)
        self._save()

    def _save(self) -> None:
        replace_text(self._path, json.dumps(self.state, indent=1))

    # --- a job -------------------------------------------------------------------------------

    def run_job(self, name: str) -> bool:
        """Runs a job, or what is left of it; whether it is done.

        Raises:
            BenchError: The job failed, or there is no space for the model.
        """
        job = self.state["jobs"].setdefault(name, {"sittings": [], "open": False, "drawn": False})
        out = self.folder / name
        if not job["drawn"]:
            self._build()
            if self._stop_at is not None and time.monotonic() >= self._stop_at:
                return False
            if job["open"]:
                print(f"{name}: its last sitting was cut off, so its time is not known: begun anew")
                shutil.rmtree(out, ignore_errors=True)
                job |= {"sittings": [], "open": False}
            self._sit(name, job, out)
        if job["drawn"] and "figures" not in job:
            job["figures"] = self._figures(name, job, out)
            self._save()
        return bool(job["drawn"])

    def _sit(self, name: str, job: dict[str, Any], out: Path) -> None:
        devices = self.devices if name != "one" else self.devices[:1]
        is_killed = any(each["killed"] for each in job["sittings"])
        watch = JobWatch(
            self._arguments(name, out, devices),
            out,
            devices,
            stop_at=self._stop_at,
            kill_after_s=self.args.kill_after if name == "killed" and not is_killed else None,
        )
        print(f"{name}: sitting {len(job['sittings']) + 1}", flush=True)
        job["open"] = True
        self._save()
        sitting = watch.run()
        if sitting.exit_code not in (0, NOT_DONE):
            raise BenchError(f"{name}: `offdiff run` ended with {sitting.exit_code}, see above")
        job["drawn"] = sitting.exit_code == 0
        last = None
        if job["drawn"]:
            last = max(row["finished_at"] for row in scaling.read_rows(out, "metrics", scaling.METRICS))
        is_first = not any(each["begun"] for each in job["sittings"])
        span = scaling.span_of(sitting, last, is_first=is_first)
        job["sittings"].append(sitting_figures(sitting, span, watch.samples, devices))
        job["open"] = False
        self._save()

    def _arguments(self, name: str, out: Path, devices: Sequence[str]) -> list[str]:
        args = self.args
        return [
            *("run", str(self._manifest(name)), "--model", str(self.model), "--out", str(out)),
            *("--devices", ",".join(devices), "--shard-size", str(args.shard_size)),
            *([] if args.budget is None else ["--max-num-batched-tokens", str(args.budget)]),
        ]

    def _figures(self, name: str, job: dict[str, Any], out: Path) -> scaling.Figures:
        devices = self.devices if name != "one" else self.devices[:1]
        metrics = scaling.read_rows(out, "metrics", scaling.METRICS)
        figures = scaling.figures_of(job["sittings"], metrics, devices)
        keys = [(row["row"], row["image_index"]) for row in metrics]
        wanted = [(row, 0) for row in range(self._count(name))]
        figures["each_image_once"] = sorted(keys) == wanted and all(r["status"] == "ok" for r in metrics)
        figures["verify_exit_code"] = verify(out)
        if name == "killed":
            figures |= scaling.kill_figures(job["sittings"], metrics)
        return figures

    # --- what jobs need ----------------------------------------------------------------------

    @property
    def model(self) -> Path:
        return self.folder / "model"  # type: ignore[no-any-return]

    def _count(self, name: str) -> int:
        return int(self.args.killed_images if name == "killed" else self.args.images)

    def _build(self) -> None:
        """Makes the model's folder unless it is there: in a process of its own, which leaves the GPU free."""
        if self.model.exists():
            return
        if not self.args.tiny:
            check_space(self.folder, MODEL_BYTES + DATASET_BYTES)
        started = time.monotonic()
        device = "cpu" if self.devices[0] == "cpu" else f"cuda:{self.devices[0].removeprefix('cuda:')}"
        process = multiprocessing.get_context("spawn").Process(
            target=save_model, args=(self.model, device, bool(self.args.tiny))
        )
        process.start()
        process.join()
        if process.exitcode != 0:
            raise BenchError(f"the model could not be made: exit code {process.exitcode}, see above")
        self.state["model_s"] = time.monotonic() - started
        self._save()
        print(f"model: {self.state['model_s']:.0f} s", flush=True)

    def _manifest(self, name: str) -> Path:
        """The first rows are the same in all jobs."""
        count = self._count(name)
        path: Path = self.folder / f"{count}.jsonl"
        prompts = read_prompts(self.args.prompts) if self.args.prompts else []
        rows = manifest_rows(count, self.args.steps, prompts, scale=TINY_SCALE if self.args.tiny else 1)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    # --- what comes of it --------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """All figures so far; compared as far as jobs are done."""
        jobs = {
            name: {**job.get("figures", {}), "sittings": job["sittings"]}
            for name, job in self.state["jobs"].items()
            if "figures" in job
        }
        from bench_qwen_image import versions

        record = {
            "hardware": device_names(self.devices),
            "num_cores": num_cores(),
            "versions": versions(),
            "run": datetime.now(UTC).isoformat(timespec="seconds"),
            "commands": self.state["commands"],
            "model": "tiny-qwen-image" if self.args.tiny else "Qwen-Image, 60 layers, random weights",
            "workload": make_workloads()["uniform"].label,
            "settings": self.state["settings"],
            "model_s": self.state.get("model_s"),
            "jobs": jobs,
            "complete": all(name in jobs for name in JOBS),
        }
        return {**record, **self._compared(jobs)}

    def _compared(self, jobs: dict[str, Any]) -> dict[str, Any]:
        compared: dict[str, Any] = {}
        if {"one", "many"} <= jobs.keys():
            compared["scaling"] = scaling.compare(jobs["one"], jobs["many"], len(self.devices))
            compared["pixels"] = self._pixels("many", "one", is_part=False)
        if {"one", "killed"} <= jobs.keys() and self._count("killed") <= self._count("one"):
            compared["pixels_killed"] = self._pixels("killed", "one", is_part=True)
        return {**compared, "problems": scaling.problems(jobs, compared)}

    def _pixels(self, name: str, other: str, *, is_part: bool) -> scaling.Figures:
        ours, theirs = (
            scaling.read_rows(self.folder / each, "images", scaling.IMAGES) for each in (name, other)
        )
        return scaling.compare_pixels(ours, theirs, is_part=is_part)


def check_settings(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises `BenchError` where a work folder was begun with other options."""
    differing = [name for name in ours if theirs.get(name) != ours[name]]
    if differing:
        told = ", ".join(f"{name} {theirs.get(name)!r} there, {ours[name]!r} here" for name in differing)
        raise BenchError(f"{folder} belongs to another setting: {told}\nhint: name another --work")


def check_space(folder: Path, needed: int) -> None:
    """Raises `BenchError` where the disk has no space for the model."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BenchError(
            f"{folder} has {free / 1e9:.0f} GB free, the model and the datasets need {needed / 1e9:.0f} GB\n"
            "hint: name another --work; a /dev/shm that is too small grows with "
            "`mount -o remount,size=100G /dev/shm`"
        )


def save_model(folder: Path, device: str, tiny: bool) -> None:
    """Writes a model in diffusers' layout, whole or not at all."""
    building = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    if tiny:
        from offline_diffusion.models.tiny import build_tiny_qwen_image

        build_tiny_qwen_image(building)
    else:
        import torch
        from full_size import build_pipeline

        build_pipeline(torch.device(device)).save_pretrained(building)
    os.rename(building, folder)


def manifest_rows(count: int, steps: int, prompts: Sequence[str], *, scale: int) -> list[dict[str, Any]]:
    """The uniform mix gone on with: its shapes over and over, a prompt and a seed for each image."""
    uniform = make_workloads(steps, scale=scale)["uniform"].requests
    rows = []
    for index in range(count):
        request = uniform[index % len(uniform)]
        row = {
            "id": f"uniform-{index}",
            "prompt": prompts[index % len(prompts)] if prompts else words("uniform", index),
            "height": request.height,
            "width": request.width,
            "num_inference_steps": steps,
            "true_cfg_scale": request.true_cfg_scale,
            "seed": 1000 + index,
        }
        rows.append(row if index % 5 == 4 else {**row, "negative_prompt": uniform[0].negative_prompt})
    return rows


def sitting_figures(
    sitting: Sitting, span: scaling.Span, samples: Samples, devices: Sequence[str]
) -> scaling.Figures:
    """A sitting, and what was sampled while it drew."""
    begun = sorted(sitting.begun.values())[: len(devices)]  # later ones are next lives
    return {
        **asdict(sitting),
        "wall_s": sitting.ended - sitting.started,
        "load_s": begun[0] - sitting.started if begun else None,
        "worker_skew_s": begun[-1] - begun[0] if begun else None,
        "drawing_from": span.start,
        "drawing_to": span.stop,
        "drawing_s": span.seconds,
        "drawing_cpu_s": samples.cpu_between(span.start, span.stop),
        "num_cores": num_cores(),
        "gpus": {name: samples.gpu_between(span.start, span.stop, name) for name in devices},
    }


def verify(out: Path) -> int:
    """The exit code of `offdiff verify`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "offline_diffusion.cli.main", "verify", str(out)]
    return subprocess.run(
        command, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ).returncode


def num_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_names(devices: Sequence[str]) -> list[str]:
    """What the devices are, told without taking hold of one."""
    if devices[0] == "cpu":
        return [platform.processor() or platform.machine()] * len(devices)
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return [names[int(device.removeprefix("cuda:"))] for device in devices]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
