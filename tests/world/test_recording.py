"""Several processes that train together, against each of them alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from world.curves import Pace
from world.recording import AVERAGE_EVERY, Optimization

pytestmark = pytest.mark.slow

WORLD_SIZE = 2
STEPS = 2 * AVERAGE_EVERY


@dataclass
class Batch:
    x: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.x]


def optimization(model: nn.Linear) -> Optimization[Batch]:
    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        error = (model(batch.x) - batch.x.flip(1)).square().mean()
        return error, error

    groups = [{"params": list(model.parameters())}]
    pace = Pace(STEPS, 0, 0.01)
    about = {"betas": (0.9, 0.98), "weight_decay": 0.0, "decay": 0.5}
    return Optimization(groups, loss, pace, device=torch.device("cpu"), **about)


def batches(rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    return [Batch(torch.randn(4, 3, generator=generator)) for _ in range(STEPS)]


def linear(seed: int) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(3, 3)


def train(rank: int, folder: Path) -> None:
    """What a process does; its own model has other weights at first."""
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
    model = linear(rank)
    own = optimization(model)
    for at, batch in enumerate(batches(rank), start=1):
        own.step(batch)
        if at == AVERAGE_EVERY:
            torch.save([p.detach().clone() for p in model.parameters()], folder / f"first-{rank}.pt")
    assert own.pace.done == 1
    torch.save([p.detach() for p in model.parameters()], folder / f"last-{rank}.pt")
    dist.destroy_process_group()


def test_processes_go_on_from_what_they_have_in_the_mean(tmp_path: Path) -> None:
    multiprocessing.spawn(train, (tmp_path,), nprocs=WORLD_SIZE)

    alone = []
    for rank in range(WORLD_SIZE):
        model = linear(0)  # the first one's weights
        own = optimization(model)
        for batch in batches(rank)[:AVERAGE_EVERY]:
            own.step(batch)
        alone.append([parameter.detach() for parameter in model.parameters()])
    for rank in range(WORLD_SIZE):
        first = torch.load(tmp_path / f"first-{rank}.pt")
        for found, *parts in zip(first, *alone, strict=True):
            torch.testing.assert_close(found, torch.stack(parts).mean(dim=0))
            assert (parts[0] - parts[1]).abs().max() > 1e-3
    lasts = [torch.load(tmp_path / f"last-{rank}.pt") for rank in range(WORLD_SIZE)]
    for one, other, before in zip(*lasts, first, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, before)
