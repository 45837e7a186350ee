"""Trains the small VAE on pictures that we draw: ``python scripts/train_vae.py OUT --seconds 285``.

On one H200 285 s are about 11,000 steps. Writes ``OUT/vae`` in diffusers' layout and the curve to
``OUT/vae.jsonl``; ``--steps`` as in the log's last line makes the same weights again, to rounding.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from world.curves import Average, Curve, Pace
from world.drawing import draw
from world.recipe import SIZES, VAE_CONFIG
from world.scorer import score
from world.supply import Example, Size, examples_ahead, sample_examples
from world.vae import decode, encode, loss, make_vae, see_one_frame

PIXELS_A_STEP = 32 * 128 * 128
PEAK_RATE = 2e-3
KL_WEIGHT = 3e-4
DECAY = 0.999
RELATED = 0.25


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--steps", default=0, show_default=True, help="Steps; 0 leaves it to --seconds.")
@click.option("--seconds", default=285.0, show_default=True, help="Seconds of training.")
@click.option("--pixels", default=PIXELS_A_STEP, show_default=True, help="Pixels of a step.")
@click.option("--seed", default=0, show_default=True)
@click.option("--num-workers", default=8, show_default=True, help="Processes that make scenes.")
@click.option("--measured", default=128, show_default=True, help="Pictures of each size measured in the end.")
def main(
    out: Path, steps: int, seconds: float, pixels: int, seed: int, num_workers: int, measured: int
) -> None:
    """Train the VAE and write it to OUT/vae."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vae = see_one_frame(make_vae(seed)).to(device, memory_format=torch.preserve_format)
    pace = Pace(steps, seconds, PEAK_RATE)
    about = {"command": " ".join(sys.argv), "seed": seed, "config": VAE_CONFIG, "pixels": pixels}
    curve = Curve(out / "vae.jsonl", about)
    train(vae, pace, curve, pixels=pixels, seed=seed, num_workers=num_workers)
    measure_latents(vae, device, measured)
    vae.to(torch.bfloat16).save_pretrained(out / "vae")
    curve.write({"steps": pace.step, "seconds": pace.elapsed_s} | evaluate(vae.float(), device, measured))


def train(vae: Any, pace: Pace, curve: Curve, *, pixels: int, seed: int, num_workers: int) -> None:
    """Runs until ``pace`` is done and leaves the averaged weights in ``vae``."""
    device = next(vae.parameters()).device
    parameters = [p for p in vae.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.0, fused=device.type == "cuda")
    average = Average(parameters, DECAY)
    generator = torch.Generator(device).manual_seed(seed)
    errors, shown = [], time.perf_counter()
    for size, examples in _batches(pixels, seed, num_workers):
        if pace.done >= 1:
            break
        pictures = draw([example.scene for example in examples], *size, device=device)
        noise = torch.randn(
            (len(examples), VAE_CONFIG["z_dim"], size[0] // 8, size[1] // 8),
            generator=generator,
            device=device,
        )
        optimizer.param_groups[0]["lr"] = pace.learning_rate()
        errors.append(_step(vae, optimizer, pictures, noise, parameters))
        average.update()
        pace.step += 1
        if time.perf_counter() - shown > 10:
            curve.write({"step": pace.step, "seconds": pace.elapsed_s, "psnr_db": _psnr(torch.stack(errors))})
            errors, shown = [], time.perf_counter()
    average.swap()


def _batches(pixels: int, seed: int, num_workers: int) -> Any:
    """Size and examples of every step, for ever."""

    def keys() -> Any:
        step = 0
        while True:
            size = SIZES[step % len(SIZES)]
            yield f"vae/{seed}/{step}", size, max(1, pixels // (size[0] * size[1]))
            step += 1

    def sizes() -> Any:
        while True:
            yield from SIZES

    yield from zip(sizes(), examples_ahead(keys(), num_workers, related=RELATED), strict=False)


def _step(vae: Any, optimizer: Any, pictures: Tensor, noise: Tensor, parameters: list[Any]) -> Tensor:
    with torch.autocast(pictures.device.type, torch.bfloat16):
        total, squared = loss(vae, pictures, noise, KL_WEIGHT)
    total.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return squared


def _psnr(squared: Tensor) -> float:
    return float(-10 * squared.mean().log10())


@torch.no_grad()
def measure_latents(vae: Any, device: torch.device, count: int) -> None:
    """Puts each latent channel's mean and deviation, over ``count`` pictures of each size, into the config."""
    latents = []
    for size in SIZES:
        means = [encode(vae, pictures)[0] for pictures in _drawn("statistics", size, count, device)]
        latents.append(torch.cat(means).transpose(0, 1).flatten(1).double().cpu())
    together = torch.cat(latents, dim=1)
    mean, std = together.mean(dim=1), together.std(dim=1)
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@torch.no_grad()
def evaluate(vae: Any, device: torch.device, count: int) -> dict[str, float]:
    """Error and readability of held-out pictures after encoding and decoding."""
    squared, readable = [], []
    for size in SIZES:
        examples = sample_examples(f"held out/{size}", size, count, related=RELATED, held_out=True)
        for start in range(0, len(examples), 64):
            part = examples[start : start + 64]
            pictures = draw([example.scene for example in part], *size, device=device)
            decoded = decode(vae, encode(vae, pictures)[0]).clamp(0, 1)
            squared.append((decoded - pictures).square().mean(dim=(1, 2, 3)))
            readable += _readable(decoded, part)
    return {"held_out_psnr_db": _psnr(torch.cat(squared)), "readable": float(np.mean(readable))}


def _readable(decoded: Tensor, examples: list[Example]) -> list[bool]:
    images = (decoded * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [score(image, example.scene).things for image, example in zip(images, examples, strict=True)]


def _drawn(key: str, size: Size, count: int, device: torch.device) -> Any:
    examples = sample_examples(f"{key}/{size}", size, count, related=RELATED)
    for start in range(0, count, 64):
        yield draw([example.scene for example in examples[start : start + 64]], *size, device=device)


if __name__ == "__main__":
    main()
