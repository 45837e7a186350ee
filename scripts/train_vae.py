"""Trains the small VAE on pictures that we draw: ``python scripts/train_vae.py OUT --seconds 285``.

Writes ``OUT/vae`` in diffusers' layout and the curve to ``OUT/vae.jsonl``. ``--steps`` as in the log's last
line makes the same weights again, to rounding. ``--init VAE`` trains that one further.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from world.curves import Curve, Pace
from world.drawing import as_bytes, draw
from world.recipe import SIZES, VAE_CONFIG
from world.recording import Optimization
from world.scorer import score
from world.supply import Size, sample_examples
from world.vae import decode, encode, load_vae, loss, make_vae, see_one_frame

TRAINED_SIZES = ((64, 64), (256, 256))
"""Convolutions learn the sizes between from the smallest and the largest; each is compiled by itself."""

TURNS = (0, 0, 0, 1)
"""Which of them a step is of, in turn: it is on the smallest that things are misread (LOG.md)."""

POOL_PIXELS = 2**29
"""Pixels of the drawn pictures of each size, uint8."""

PIXELS_A_STEP = 32 * 128 * 128
PEAK_RATE = 5e-4
"""At 1e-3 and above the error stays for a thousand steps where backgrounds alone are drawn (LOG.md)."""

KL_WEIGHT = 3e-4
DECAY = 0.992
"""Of the averaged weights, at an update."""

RELATED = 0.25
CHUNK = 128


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--steps", default=0, show_default=True, help="Steps; 0 leaves it to --seconds.")
@click.option("--seconds", default=285.0, show_default=True, help="Seconds of training.")
@click.option("--rate", default=PEAK_RATE, show_default=True, help="Highest learning rate.")
@click.option("--pixels", default=PIXELS_A_STEP, show_default=True, help="Pixels of a step.")
@click.option("--pool", default=POOL_PIXELS, show_default=True, help="Pixels drawn of each size.")
@click.option("--measured", default=128, show_default=True, help="Pictures of each size measured in the end.")
@click.option("--seed", default=0, show_default=True)
@click.option("--init", type=click.Path(exists=True, path_type=Path), help="VAE to start from.")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True)
def main(
    out: Path,
    steps: int,
    seconds: float,
    rate: float,
    pixels: int,
    pool: int,
    measured: int,
    seed: int,
    init: Path | None,
    compiled: bool,
) -> None:
    """Train the VAE and write it to OUT/vae."""
    begun = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vae = see_one_frame(load_vae(init) if init else make_vae(seed)).to(device)
    about = {"command": " ".join(sys.argv), "seed": seed, "config": VAE_CONFIG, "pixels": pixels}
    curve = Curve(out / "vae.jsonl", about)
    counts = [max(2, pool // (height * width)) for height, width in TRAINED_SIZES]
    sizes = zip(TRAINED_SIZES, counts, strict=True)
    pictures = [_drawn(f"vae/{seed}", size, count, device) for size, count in sizes]
    pace = Pace(steps, seconds, rate)
    trainer = Trainer(vae, pictures, pixels, pace, seed, compiled)
    for index in range(len(TRAINED_SIZES)):
        trainer.step(index).item()  # compiles, before the clock starts
    curve.write({"seconds_to_begin": time.perf_counter() - begun})
    pace.begin()
    trainer.run(curve)
    measure_latents(vae, device, measured)
    vae.to(torch.bfloat16).save_pretrained(out / "vae")
    curve.write({"steps": pace.step, "seconds": pace.elapsed_s} | evaluate(vae.float(), device, measured))


@dataclass(slots=True)
class Batch:
    """What a step reads: pictures ``[B, 3, H, W]``, 0 … 1, and noise of their latents."""

    pictures: Tensor
    noise: Tensor

    def tensors(self) -> list[Tensor]:
        """See `world.recording.Batch`."""
        return [self.pictures, self.noise]


class Trainer:
    """Weights, optimizer and averages of the training, and its steps.

    Args:
        vae: On its device; trained in place.
        pictures: Of each size ``[P, 3, H, W]``, uint8, on that device.
        pixels: Of a step.
        pace: How long, and the learning rate.
        seed: Of the choice of pictures and of the latents' noise.
        compiled: Whether torch compiles the loss.
    """

    def __init__(
        self, vae: Any, pictures: list[Tensor], pixels: int, pace: Pace, seed: int, compiled: bool
    ) -> None:
        self._vae, self._pictures, self._pixels, self.pace = vae, pictures, pixels, pace
        device = pictures[0].device
        self._optimization = Optimization(
            [{"params": list(vae.parameters())}],
            self._loss,
            pace,
            betas=(0.9, 0.99),
            weight_decay=0.0,
            decay=DECAY,
            device=device,
        )
        self._generator = torch.Generator(device).manual_seed(seed)
        self._compiled_loss = torch.compile(loss, dynamic=False) if compiled else loss

    def run(self, curve: Curve) -> None:
        """Until the pace is done; then the averaged weights are in the VAE."""
        errors: list[Tensor] = []
        shown = time.perf_counter()
        while self.pace.done < 1:
            errors.append(self.step(TURNS[self.pace.step % len(TURNS)]))
            if self.pace.step % 20 == 0:
                errors[-1].item()  # the host stays near the device, so that seconds are those of steps done
            if time.perf_counter() - shown > 10:
                mean = torch.stack(errors).mean()
                curve.write({"step": self.pace.step, "seconds": self.pace.elapsed_s, "psnr_db": _psnr(mean)})
                errors, shown = [], time.perf_counter()
        self._optimization.average.swap()

    def step(self, index: int) -> Tensor:
        """One over pictures of one size; its mean squared error."""
        pool = self._pictures[index]
        height, width = pool.shape[2:]
        count = max(1, self._pixels // (height * width))
        chosen = torch.randint(len(pool), (count,), generator=self._generator, device=pool.device)
        shape = (count, VAE_CONFIG["z_dim"], height // 8, width // 8)
        noise = torch.randn(shape, generator=self._generator, device=pool.device)
        return self._optimization.step(Batch(pool[chosen].float() / 255, noise), kind=index)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._compiled_loss(self._vae, batch.pictures, batch.noise, KL_WEIGHT)


def _psnr(squared: Tensor) -> float:
    return float(-10 * squared.log10())


def _drawn(key: str, size: Size, count: int, device: torch.device) -> Tensor:
    """``[count, 3, H, W]``, uint8."""
    scenes = [example.scene for example in sample_examples(key, size, count, related=RELATED)]
    parts = (scenes[start : start + CHUNK] for start in range(0, count, CHUNK))
    return torch.cat([(draw(part, *size, device=device) * 255).round().byte() for part in parts])


@torch.no_grad()
def measure_latents(vae: Any, device: torch.device, count: int) -> None:
    """Puts each latent channel's mean and deviation, over ``count`` pictures a size, into the config."""
    parts = (part for size in SIZES for part in _drawn("statistics", size, count, device).split(CHUNK))
    latents = [encode(vae, part.float() / 255)[0].transpose(0, 1).flatten(1).double().cpu() for part in parts]
    together = torch.cat(latents, dim=1)
    mean, std = together.mean(dim=1), together.std(dim=1)
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@torch.no_grad()
def evaluate(vae: Any, device: torch.device, count: int) -> dict[str, float]:
    """Error and readability of held-out pictures after encoding and decoding."""
    squared, readable = [], []
    for size in SIZES:
        examples = sample_examples("measured", size, count, related=RELATED, held_out=True)
        for start in range(0, count, CHUNK):
            scenes = [example.scene for example in examples[start : start + CHUNK]]
            pictures = draw(scenes, *size, device=device)
            decoded = decode(vae, encode(vae, pictures)[0]).clamp(0, 1)
            squared.append((decoded - pictures).square().mean(dim=(1, 2, 3)))
            pairs = zip(as_bytes(decoded), scenes, strict=True)
            readable += [score(image, scene).things for image, scene in pairs]
    return {"held_out_psnr_db": _psnr(torch.cat(squared).mean()), "readable": float(np.mean(readable))}


if __name__ == "__main__":
    main()
