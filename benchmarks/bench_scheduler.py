"""How full the steps are and how long a job takes under each policy: exact steps, modelled seconds.

    python benchmarks/bench_scheduler.py --out benchmarks/results/scheduler.json

Needs neither a GPU nor torch. The scheduler itself is driven as the engine drives it, request by
request and step by step; only a step's time is a model: linear in its tokens, and never below what
the host needs for its launches. Columns:

* ``fill``: mean share of the token budget in use, a request above the budget counted as a full step;
* ``before tail``: the same over the steps in which somebody waits, the halved last but one included;
* ``/bound``: the job's time over the least possible: all its work in full steps, which only a
  scheduler could reach that pauses requests and cuts them in pieces;
* ``thin``: steps below 4,096 tokens;
* ``changes``: share of steps that are packed anew because somebody joined or left;
* ``overtaken``: most later requests that were admitted before a waiting one;
* ``schedule ms``: mean and longest time of one ``schedule()`` on this host.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from offline_diffusion.engine.scheduler import LOOK_AHEAD, ScheduledRequest, Scheduler

BUDGETS = (16_384, 17_000, 26_400, 32_768, 33_400, 50_000)
MAX_NUM_SEQS = 128
THIN_TOKENS = 4_096

Shape = tuple[int, int, int, bool]
"""Height and width in pixels, steps, whether guidance is on."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of so many tokens; the defaults are near full-size Qwen-Image on an H200."""

    seconds_per_token: float = 22.5e-6
    fixed_s: float = 0.004
    least_s: float = 0.040

    def __call__(self, num_tokens: int) -> float:
        return max(self.least_s, self.fixed_s + self.seconds_per_token * num_tokens)


@dataclass
class Simulation:
    """What one job came to; see the head of this file."""

    num_steps: int = 0
    fill: float = 0.0
    fill_before_tail: float = 0.0
    seconds: float = 0.0
    bound_s: float = 0.0
    num_thin: int = 0
    num_changes: int = 0
    max_overtaken: int = 0
    schedule_ms: float = 0.0
    max_schedule_ms: float = 0.0


# --- mixes ----------------------------------------------------------------------------------------


def _of(*shapes: tuple[int, int, int]) -> Callable[[random.Random, int], Shape]:
    """Squares in turn: ``(side, steps, how many)``, all guided."""
    turn = [(side, side, steps, True) for side, steps, count in shapes for _ in range(count)]
    return lambda _, index: turn[index % len(turn)]


def _drawn(*shapes: tuple[int, int, int]) -> Callable[[random.Random, int], Shape]:
    """Squares at random: ``(side, steps, weight)``, all guided."""
    weights = [weight for *_, weight in shapes]

    def draw(rng: random.Random, _: int) -> Shape:
        side, steps, _ = rng.choices(shapes, weights)[0]
        return side, side, steps, True

    return draw


def _uniform(multiple: int, least_steps: int, most_steps: int) -> Callable[[random.Random, int], Shape]:
    """Sides from 256 to 1024 px, a fifth without guidance."""

    def draw(rng: random.Random, _: int) -> Shape:
        height, width = (multiple * rng.randint(256 // multiple, 1024 // multiple) for _ in range(2))
        return height, width, rng.randint(least_steps, most_steps), rng.random() >= 0.2

    return draw


MIXES: dict[str, Callable[[random.Random, int], Shape]] = {
    "mixed 16": _of((512, 20, 8), (768, 20, 5), (1024, 20, 3)),
    "uniform by 16": _uniform(16, 20, 20),
    "uniform by 64": _uniform(64, 20, 20),
    "uniform, 10-50 steps": _uniform(64, 10, 50),
    "dataset C": _drawn((512, 20, 15), (768, 20, 25), (1024, 25, 45), (1536, 35, 15)),
    "small ones longest": _drawn((256, 50, 1), (512, 40, 1), (768, 30, 1), (1024, 20, 1)),
    "256": _of((256, 20, 1)),
    "512": _of((512, 20, 1)),
    "1024": _of((1024, 20, 1)),
}


def make_requests(mix: str, count: int, seed: int = 0) -> list[ScheduledRequest]:
    """``count`` requests of a mix; prompts have 5 to 60 tokens, most of them few, the negative one 1."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        height, width, num_steps, guided = MIXES[mix](rng, index)
        num_text_tokens = 5 + min(55, int(rng.expovariate(1 / 15))) + guided
        num_tokens = (height // 16) * (width // 16) * (1 + guided) + num_text_tokens
        requests.append(ScheduledRequest(str(index), num_tokens, num_steps, num_text_tokens=num_text_tokens))
    return requests


# --- simulation -----------------------------------------------------------------------------------


def simulate(
    scheduler: Scheduler, requests: Sequence[ScheduledRequest], cost: Callable[[int], float] = StepCost()
) -> Simulation:
    """Drives ``scheduler`` to the end as ``Engine.generate`` does; ``requests`` are left as they are."""
    result, budget = Simulation(), scheduler.max_num_batched_tokens
    last: tuple[ScheduledRequest, ...] = ()
    entries = [replace(request) for request in requests]
    num_added = num_before_tail = filled = filled_before_tail = 0
    while num_added < len(entries) or scheduler.waiting or scheduler.running:
        while num_added < len(entries) and len(scheduler.waiting) < LOOK_AHEAD:
            scheduler.add(entries[num_added])
            num_added += 1
        scheduler.no_more_requests = num_added == len(entries)
        start = time.thread_time()
        running = scheduler.schedule().running
        took_ms = (time.thread_time() - start) * 1000
        num_tokens = sum(entry.num_tokens for entry in running)
        filled += min(num_tokens, budget)
        if scheduler.waiting:
            num_before_tail += 1
            filled_before_tail += min(num_tokens, budget)
        result.num_steps += 1
        result.seconds += cost(num_tokens)
        result.num_thin += num_tokens < THIN_TOKENS
        result.num_changes += running != last
        result.schedule_ms += took_ms
        result.max_schedule_ms = max(result.max_schedule_ms, took_ms)
        last = running
        scheduler.advance()
    result.schedule_ms /= result.num_steps
    result.fill = filled / result.num_steps / budget
    result.fill_before_tail = filled_before_tail / max(1, num_before_tail) / budget
    result.max_overtaken = max(entry.num_overtaken for entry in entries)
    result.bound_s = _least_seconds(requests, budget, cost)
    return result


def _least_seconds(requests: Sequence[ScheduledRequest], budget: int, cost: Callable[[int], float]) -> float:
    """All work in full steps, as if a request could be cut at will; or the longest chain."""
    full = max(budget, *(request.num_tokens for request in requests))
    work = sum(request.work for request in requests)
    return max(work * cost(full) / full, max(request.num_steps for request in requests) * cost(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num-images", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=MIXES, metavar="MIX", help=f"of {', '.join(MIXES)}")
    parser.add_argument("--fixed-ms", type=float, default=4.0, help="of every step, whatever its tokens")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cost = StepCost(fixed_s=args.fixed_ms / 1000)
    print(f"{args.num_images} images a mix, {cost}, Python {platform.python_version()}")
    print("                 mix budget policy   fill before tail   /bound thin changes overtaken schedule ms")
    records = []
    for mix in args.only or MIXES:
        requests = make_requests(mix, args.num_images, args.seed)
        for budget in BUDGETS:
            for policy in ("fifo", "pack"):
                job = simulate(Scheduler(MAX_NUM_SEQS, budget, policy), requests, cost)
                records.append({"mix": mix, "budget": budget, "policy": policy, **_rounded(job)})
                print(_line(mix, budget, policy, job), flush=True)
    versions = {"python": platform.python_version()}
    command = " ".join([Path(sys.executable).name, *sys.argv])
    result = {"versions": versions, "cost": asdict(cost), "command": command, "records": records}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def _rounded(result: Simulation) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(result).items()}


def _line(mix: str, budget: int, policy: str, result: Simulation) -> str:
    return (
        f"{mix:>20} {budget:6} {policy:>6} {result.fill:6.1%} {result.fill_before_tail:11.1%} "
        f"{result.seconds / result.bound_s:8.4f} {result.num_thin:4} "
        f"{result.num_changes / result.num_steps:7.1%} {result.max_overtaken:9} "
        f"{result.schedule_ms:6.3f} {result.max_schedule_ms:4.1f}"
    )


if __name__ == "__main__":
    main()
