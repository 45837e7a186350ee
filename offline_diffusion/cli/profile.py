"""A profile as a table for people."""

from __future__ import annotations

from typing import Any

from offline_diffusion.cli.text import duration, table
from offline_diffusion.progress import plural

LABELS = {
    "scan": "scan of the manifest",
    "load": "model loading",
    "read": "rows read and tokenized",
    "prompt_encode": "prompt encoding, noise",
    "pack": "packs laid out",
    "denoise": "transformer",
    "solver": "guidance and solver",
    "decode": "VAE decode",
    "copy": "copy to the host",
    "engine": "rest of drawing",
    "wait_device": "waiting for the device",
    "wait_sink": "waiting for the writers",
    "other": "rest of the job",
    "image_encode": "image encoding",
    "write": "writing",
    "publish": "publishing shards",
}


def profile_text(profile: dict[str, Any]) -> str:
    """The stages of a run with their shares of its time, and what follows from them.

    Args:
        profile: As `engine.profile.Profiler.finish` returns it.
    """
    stages = [stage for stage in profile["stages"] if stage["count"]]
    on_gpu = any(stage["device_s"] is not None for stage in stages)
    rows = [_row(stage, on_gpu) for stage in stages if not stage["in_threads"]]
    beside = [_row(stage, on_gpu) for stage in stages if stage["in_threads"]]
    device = ["device s", "share"] if on_gpu else []
    header = ["stage", "times", "host s", "share", *device, "ms an image"]
    beside = [["in threads beside it:", *[""] * (len(header) - 1)], *beside] if beside else []
    images, steps = plural(profile["num_images"], "image"), plural(profile["num_steps"], "step")
    title = f"profile: {images} in {steps} and {duration(profile['wall_s'])} on {profile['device']}"
    return "\n".join([title, table(header, rows + beside), _conclusions(profile)])


def _row(stage: dict[str, Any], on_gpu: bool) -> list[str]:
    cells = [
        LABELS[stage["stage"]],
        f"{stage['count']:,}",
        f"{stage['host_s']:.2f}",
        f"{stage['host_share']:.1%}",
    ]
    if on_gpu:
        has_device = stage["device_s"] is not None
        cells += [f"{stage['device_s']:.2f}", f"{stage['device_share']:.1%}"] if has_device else ["", ""]
    each = stage["s_per_image"]
    return [*cells, "" if each is None else f"{each * 1000:.2f}"]


def _conclusions(profile: dict[str, Any]) -> str:
    parts = [f"step fill {profile['step_fill']:.1%}"]
    if profile["outside_transformer_share"] is not None:
        parts.insert(0, f"outside the transformer {profile['outside_transformer_share']:.1%} of drawing")
    if profile["device_idle_share"] is not None:
        idle, steps = profile["device_idle_share"], plural(profile["num_traced_steps"], "traced step")
        parts.append(f"GPU idle {idle:.1%} of {steps}")
    lines = [", ".join(parts)]
    if profile["trace"] is not None:
        seconds = duration(profile["profiler_s"])
        lines.append(f"trace, for Perfetto or chrome://tracing: {profile['trace']} ({seconds}, not counted)")
    elif not profile["num_traced_steps"]:
        lines.append(f"no trace: {plural(profile['num_steps'], 'step')} are too few")
    return "\n".join(lines)
