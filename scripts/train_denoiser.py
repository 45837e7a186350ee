"""Trains the small transformer and its text encoder: ``python scripts/train_denoiser.py OUT --seconds 1200``.

``OUT/vae`` must be there (``train_vae.py``). The command may be cut into sittings: with ``--sitting 580`` it
saves its state after so many seconds, exits with 75, and the same command goes on. In the end ``OUT/model``
is a complete folder in diffusers' layout, and ``OUT/denoiser.jsonl`` has the curve. On several GPUs
(``torchrun --nproc-per-node 2 scripts/train_denoiser.py …``) each draws and packs examples of its own, and
they share their weights every few steps; all end at the same one, with the files of all but the first ending
in their number.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from world.curves import Curve, Pace
from world.denoiser import TrainingStep, draw_sigmas
from world.hints import Hints
from world.layout import Layout, lay_out
from world.modules import load_modules, make_modules, save_folder
from world.pool import DROPOUT, Pool, make_pool
from world.recipe import SHIFT, TRANSFORMER_CONFIG
from world.recording import Optimization
from world.vae import load_vae, see_one_frame

NUM_SLOTS = 448
NUM_IMAGE_ROWS, NUM_TEXT_ROWS = 32_768, 8_192
NUM_LAYOUTS = 96
RELATED = 0.25
"""Share of scenes whose caption states a relation."""

COUNTS = (2, 4, 4)
"""How often the others have one, two and three things: most of what is hard to learn (LOG.md)."""

DECAY = 0.996
"""Of the averaged weights, at an update."""

BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
INTERRUPTED = 75


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--steps", default=0, show_default=True, help="Steps; 0 leaves it to --seconds.")
@click.option("--seconds", default=1200.0, show_default=True, help="Seconds of training.")
@click.option("--sitting", default=0.0, show_default=True, help="Seconds until it stops and saves; 0: never.")
@click.option("--rate", default=1.5e-3, show_default=True, help="Highest learning rate.")
@click.option("--examples", default=300_000, show_default=True, help="Drawn pictures to learn from.")
@click.option("--slots", default=NUM_SLOTS, show_default=True, help="Examples of a step.")
@click.option("--layouts", default=NUM_LAYOUTS, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--init", type=click.Path(exists=True, path_type=Path), help="Model folder to start from.")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True)
def main(
    out: Path,
    steps: int,
    seconds: float,
    sitting: float,
    rate: float,
    examples: int,
    slots: int,
    layouts: int,
    seed: int,
    init: Path | None,
    compiled: bool,
) -> None:
    """Train on pictures encoded by OUT/vae and write OUT/model."""
    begun = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    device, rank = join()
    state = out / "state.pt"
    if dist.is_initialized() and (sitting or state.exists()):
        raise click.UsageError(
            f"Sittings are for one process: no --sitting, and no {state} of an earlier one."
        )
    number = f"-{rank}" if rank else ""
    tokenizer, text_encoder, transformer = load_modules(init) if init else make_modules(seed)
    vae = see_one_frame(load_vae(out / "vae")).to(device).eval()
    for module in (text_encoder, transformer):
        module.to(device).train()
    about = {"command": " ".join(sys.argv), "seed": seed, "config": TRANSFORMER_CONFIG, "shift": SHIFT}
    curve = Curve(out / f"denoiser{number}.jsonl", about, goes_on=state.exists())
    seed += rank
    pool = _pool(out / f"pool{number}.pt", examples, vae, tokenizer, device, seed)
    curve.write({"examples": len(pool.sizes), "seconds_to_make": time.perf_counter() - begun})
    trainer = Trainer(text_encoder, transformer, Pace(steps, seconds, rate), device, seed, compiled)
    if state.exists():
        trainer.load(state)
    scale = slots / NUM_SLOTS
    shapes = round(NUM_IMAGE_ROWS * scale), round(NUM_TEXT_ROWS * scale)
    packs = make_layouts(pool, transformer, slots, *shapes, layouts, device, seed)
    trainer.run(pool, packs, curve, until=begun + sitting if sitting else float("inf"))
    if trainer.pace.done < 1:
        curve.write({"step": trainer.pace.step, "seconds": trainer.pace.elapsed_s, "interrupted": True})
        trainer.save(state)
        sys.exit(INTERRUPTED)
    curve.write({"steps": trainer.pace.step, "seconds": trainer.pace.elapsed_s})
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank:
        return
    state.unlink(missing_ok=True)
    trainer.average.swap()
    vae = load_vae(out / "vae")
    save_folder(out / "model", tokenizer, text_encoder.cpu(), transformer.cpu(), vae)


def join() -> tuple[torch.device, int]:
    """This process's device, and its number among those that torchrun began, 0 where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_torchelastic_launched():
        return device, 0
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device, dist.get_rank()


@dataclass(slots=True)
class Batch:
    """What a step reads: examples in a layout, noise, each example's share of it, and the scenes' truth."""

    input_ids: Tensor
    clean: Tensor
    noise: Tensor
    sigma: Tensor
    hints: Hints
    hint_weight: Tensor
    layout: Layout

    def tensors(self) -> list[Tensor]:
        """See `world.recording.Batch`."""
        own = [self.input_ids, self.clean, self.noise, self.sigma]
        truth = [self.hints.pair, self.hints.token, self.hint_weight]
        return [*own, *truth, *self.layout.tensors().values(), self.layout.bounds]


class Trainer:
    """Weights, optimizer and averages of a training, and its steps.

    Args:
        text_encoder, transformer: On ``device``; trained in place.
        pace: How long, and the learning rate.
        device: Where everything is.
        seed: Of noise, noise levels and the choice of examples.
        compiled: Whether torch compiles the step.
    """

    def __init__(
        self, text_encoder: Any, transformer: Any, pace: Pace, device: torch.device, seed: int, compiled: bool
    ) -> None:
        self.pace, self.device = pace, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            step = TrainingStep(text_encoder, transformer, device)
        parameters = [p for p in step.parameters() if p.requires_grad]
        decayed = [p for p in parameters if p.ndim > 1]
        plain = [p for p in parameters if p.ndim <= 1]
        self._optimization = Optimization(
            [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
            self._loss,
            pace,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            decay=DECAY,
            device=device,
        )
        self.average = self._optimization.average
        self.generator = torch.Generator(device).manual_seed(seed)
        self._choice = random.Random(seed)
        self._forward = torch.compile(step) if compiled else step

    def run(self, pool: Pool, layouts: list[Layout], curve: Curve, until: float) -> None:
        """Steps until the pace is done or ``time.perf_counter()`` is past ``until``."""
        losses = [self.step(pool, self._choice.choice(layouts))]
        losses[0].tolist()  # it was compiled
        self.pace.begin()
        shown = time.perf_counter()
        while self.pace.done < 1 and time.perf_counter() < until:
            losses.append(self.step(pool, self._choice.choice(layouts)))
            if self.pace.step % 50 == 0:
                losses[-1].tolist()  # the host stays near the device, so that seconds are those of steps done
            if time.perf_counter() - shown > 15:
                values = {"step": self.pace.step, "seconds": self.pace.elapsed_s}
                loss, text, image = torch.stack(losses).mean(dim=0).tolist()
                curve.write(values | {"loss": loss, "text_reader": text, "image_reader": image})
                losses, shown = [], time.perf_counter()

    def step(self, pool: Pool, layout: Layout) -> Tensor:
        """One step; the errors of flow matching and of both readers, ``[3]``."""
        input_ids, clean, hints = pool.fill(layout, self.generator)
        noise = torch.randn(clean.shape, generator=self.generator, device=self.device)
        sigma = draw_sigmas(layout.count.shape[0], self.generator, self.device)
        weight = torch.full((), 1 - self.pace.done, device=self.device)
        return self._optimization.step(Batch(input_ids, clean, noise, sigma, hints, weight, layout))

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        noised = (batch.input_ids, batch.clean, batch.noise, batch.sigma)
        lowered, errors, _ = self._forward(*noised, batch.hints, batch.hint_weight, batch.layout)
        return lowered, errors

    def save(self, path: Path) -> None:
        """For the next sitting."""
        torch.save(
            {
                "parameters": self._optimization.parameters,
                "average": self.average.values,
                "num_updates": self.average.num_updates,
                "optimizer": self._optimization.optimizer.state_dict(),
                "generator": self.generator.get_state(),
                "choice": self._choice.getstate(),
                "step": self.pace.step,
                "elapsed_s": self.pace.elapsed_s,
            },
            path,
        )

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """What `save` wrote."""
        state = torch.load(path, map_location=self.device, weights_only=False)
        for parameter, value in zip(self._optimization.parameters, state["parameters"], strict=True):
            parameter.copy_(value)
        for own, value in zip(self.average.values, state["average"], strict=True):
            own.copy_(value)
        self.average.num_updates = state["num_updates"]
        self._optimization.load_optimizer(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self._choice.setstate(state["choice"])
        self.pace.step, self.pace.earlier_s = state["step"], state["elapsed_s"]


def make_layouts(
    pool: Pool,
    transformer: Any,
    num_slots: int,
    num_img: int,
    num_txt: int,
    count: int,
    device: torch.device,
    seed: int,
) -> list[Layout]:
    """``count`` layouts of ``num_slots`` examples drawn from the pool; what would not fit is drawn again."""
    rng = random.Random(f"layouts/{seed}")
    slots, empty = pool.slots(), pool.empty_slots()
    layouts: list[Layout] = []
    while len(layouts) < count:
        chosen = rng.choices(slots, k=num_slots)
        chosen = [rng.choice(empty[s.size]) if rng.random() < DROPOUT else s for s in chosen]
        fits = sum(s.num_image for s in chosen) < num_img and sum(s.num_text for s in chosen) < num_txt
        if fits:
            layouts.append(lay_out(chosen, transformer, num_img, num_txt, device))
    return layouts


def _pool(path: Path, count: int, vae: Any, tokenizer: Any, device: torch.device, seed: int) -> Pool:
    """Made once; later sittings read it."""
    if not path.exists():
        made = make_pool(count, vae, tokenizer, device, seed=seed, related=RELATED, counts=COUNTS)
        torch.save(made, path)
    pool: Pool = torch.load(path, map_location=device, weights_only=False)
    return pool


if __name__ == "__main__":
    main()
