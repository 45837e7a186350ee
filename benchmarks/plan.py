"""What will be run, in which order, and about how long it takes. Free of torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from workloads import Workload, step_flops

from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.request import Request

BATCH = 8
"""Images that diffusers draws together."""

PRECISIONS = ("bf16", "fp8", "int8")

SYSTEMS = (
    "diffusers_serial",
    "diffusers_batch",
    "diffusers_serial_compiled",
    "diffusers_batch_compiled",
    "serial",
    "presorted",
    "packed",
)
"""In the order of measurement."""

CHECKS = ("exactness", "promise_cost", "plan_estimate", "quantization_error")

QUANTIZED = ("packed", "exactness", "quantization_error")
"""What is measured in other precisions than bf16 too."""

# Rates in useful FLOP/s and the least seconds of a forward, from earlier runs on an H200: for estimates only.
EAGER_RATE, EAGER_FORWARD_S = 410e12, 0.11
COMPILED_RATE, COMPILED_FORWARD_S, COMPILE_S = 520e12, 0.08, 60.0
SERIAL_RATE, SERIAL_STEP_S = 530e12, 0.1
PACKED_RATE = {"bf16": 570e12, "fp8": 850e12, "int8": 600e12}
CALL_S = 0.5
"""Of a call of the diffusers pipeline: encoding and launching."""
WARM_UP_S = 4.0
TRACE_FLOPS = 40_000 * 1.6e10
"""A step of two packs, which is what a trace takes."""
MODEL_S = {"bf16": 45.0, "fp8": 5.0, "int8": 15.0}
"""Until a model of this precision is there: imports and weights; quantizing; weights once more."""


@dataclass(frozen=True)
class Entry:
    """One measurement of the plan, with its estimate in device seconds."""

    workload: str
    system: str
    precision: str
    seconds: float


@dataclass(frozen=True)
class RivalOptions:
    """How much of diffusers' work is really run, see `benchmarks/README.md`.

    Args:
        num_steps: Timed steps of a call, after one that warms up.
        num_samples: Calls for each shape, guidance and number of images, whose mean holds for all.
    """

    num_steps: int = 5
    num_samples: int = 2


UnitKey = tuple[int, int, bool, int]
"""Height, width, guidance on, number of images."""


def rival_units(requests: Sequence[Request], batch: int) -> dict[UnitKey, list[list[Request]]]:
    """The calls in which diffusers would draw ``requests``: equal shapes and guidance together.

    Sorted by prompt length, so that as little as possible is padded.

    Args:
        batch: Most images in a call.
    """
    groups: dict[tuple[int, int, bool], list[Request]] = defaultdict(list)
    for request in sorted(requests, key=lambda request: len(request.prompt)):
        groups[(request.height, request.width, request.cfg_active)].append(request)
    units: dict[UnitKey, list[list[Request]]] = defaultdict(list)
    for shape, members in groups.items():
        for start in range(0, len(members), batch):
            part = members[start : start + batch]
            units[(*shape, len(part))].append(part)
    return dict(units)


def sample(units: Sequence[list[Request]], count: int) -> list[list[Request]]:
    """``count`` of the units, spread evenly over their order."""
    if len(units) <= count:
        return list(units)
    return [units[int((index + 0.5) * len(units) / count)] for index in range(count)]


def serial_part(workload: Workload) -> list[Request]:
    """What our engine draws one by one."""
    return workload.requests[: workload.num_serial]


def make_plan(
    workloads: Sequence[Workload],
    systems: Sequence[str] | None,
    precisions: Sequence[str],
    checks: Sequence[str],
    capabilities: Capabilities,
    rival: RivalOptions,
    traced: Sequence[str],
    num_compositions: int,
    num_jobs: int,
) -> list[Entry]:
    """Everything in order: all of bf16 first, since quantization takes its weights away.

    diffusers is measured in bf16 whatever ``precisions`` says: ratios need it in the same process. So are
    the drawings that quantized ones are compared with.

    Args:
        systems: None for what each workload measures by default.
        traced: Workloads of which a second run is traced.
    """
    entries = []
    for precision in PRECISIONS:
        for workload in workloads:
            chosen = workload.systems if systems is None else systems
            for system in (name for name in SYSTEMS if name in chosen and _runs(name, precision, precisions)):
                seconds = _estimate(workload, system, precision, capabilities, rival)
                if system == "packed" and workload.name in traced:
                    seconds += _trace_seconds(workload, precision)
                entries.append(Entry(workload.name, system, precision, seconds))
        check_seconds = {
            "exactness": 0.8 * num_compositions + 4.0 * num_jobs,
            "promise_cost": 25.0,
            "plan_estimate": 45.0,
            "quantization_error": 15.0,
        }
        entries += [
            Entry(check, "packed", precision, check_seconds[check])
            for check in CHECKS
            if check in checks and _runs(check, precision, precisions)
        ]
    return entries


def _runs(name: str, precision: str, precisions: Sequence[str]) -> bool:
    if precision == "bf16" and (name.startswith("diffusers") or name == "quantization_error"):
        return True
    return precision in precisions and (precision == "bf16" or name in QUANTIZED)


def _estimate(
    workload: Workload, system: str, precision: str, capabilities: Capabilities, rival: RivalOptions
) -> float:
    if system.startswith("diffusers"):
        return _rival_seconds(workload.requests, system, capabilities, rival)
    requests = serial_part(workload) if system == "serial" else workload.requests
    steps = [(_step_flops(request, capabilities), request.num_inference_steps) for request in requests]
    if system == "serial":
        return WARM_UP_S + sum(max(SERIAL_STEP_S, flops / SERIAL_RATE) * count for flops, count in steps)
    return WARM_UP_S + sum(flops * count for flops, count in steps) / PACKED_RATE[precision]


def _rival_seconds(
    requests: Sequence[Request], system: str, capabilities: Capabilities, rival: RivalOptions
) -> float:
    compiled = system.endswith("_compiled")
    rate, least = (COMPILED_RATE, COMPILED_FORWARD_S) if compiled else (EAGER_RATE, EAGER_FORWARD_S)
    seconds = 0.0
    for (_, _, guided, _), units in rival_units(requests, BATCH if "batch" in system else 1).items():
        for unit in sample(units, rival.num_samples):
            num_forwards = 2 if guided else 1
            flops = sum(_step_flops(request, capabilities) for request in unit) / num_forwards
            num_steps = rival.num_steps + (3 if compiled else 1)
            seconds += CALL_S + num_steps * num_forwards * max(least, flops / rate)
        seconds += COMPILE_S if compiled else 0.0
    return seconds


def _step_flops(request: Request, capabilities: Capabilities) -> float:
    return step_flops(request, capabilities, lambda text: 5 + 2 * len(text.split()))


def _trace_seconds(workload: Workload, precision: str) -> float:
    steps = max(request.num_inference_steps for request in workload.requests)
    return TRACE_FLOPS * steps / PACKED_RATE[precision]
