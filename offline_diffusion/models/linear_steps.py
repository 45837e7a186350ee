"""A noise scheduler's steps as a table of linear maps, read off diffusers' own scheduler object.

A step of Euler, DPM++ multistep and their kin is linear in its inputs: the sample, the model's output, what
the scheduler remembers of earlier steps, and for some a draw of noise. So for every step there is one small
matrix that makes the next sample and memory of these, and one vectorised product moves requests on that have
other step counts and stand at other steps. The matrices are not written down here: each step of the real
object is run once on unit vectors, on the host, and its results are the columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from offline_diffusion.errors import UnsupportedModelError

REMEMBERED: dict[str, tuple[str, ...]] = {
    "DDIMScheduler": (),
    "DPMSolverMultistepScheduler": ("model_outputs",),
    "EulerAncestralDiscreteScheduler": (),
    "EulerDiscreteScheduler": (),
    "LCMScheduler": (),
    "UniPCMultistepScheduler": ("model_outputs", "last_sample"),
}
"""Noise schedulers whose steps are linear, and the attributes in which each keeps tensors between steps."""

NONLINEAR_KEYS = ("thresholding", "clip_sample")
"""What makes steps nonlinear where the scheduler heeds it; configs also carry keys of other schedulers."""

TYPICAL_STEPS = 20
"""Of the run that tells how much a scheduler remembers: enough that every slot is in use."""

TOLERANCE = 1e-3
"""Relative; what float32 loses in a whole run is a hundredth of it."""

_Slot = tuple[str, int]
"""Attribute and, where that is a list, the place in it counted from its end; else 0."""


@dataclass(frozen=True, slots=True)
class LinearSteps:
    """All steps of one request. K is 1 + the number of remembered tensors, which a scheduler's configs fix.

    The state is ``[K, …]``: the sample, then what is remembered, zeros at the start.

    Args:
        timesteps: ``[steps]`` float32, as the model takes them.
        input_scale: ``[steps]`` float32: the model's input is the sample times this.
        matrices: ``[steps, K, K + 2]`` float32: the next state's rows from the state's, the model's output
            and a draw of standard noise.
        init_noise_sigma: The first sample is standard noise times this.
        num_draws: Draws of noise that matter, those of the first steps.
    """

    timesteps: Tensor
    input_scale: Tensor
    matrices: Tensor
    init_noise_sigma: float
    num_draws: int

    @property
    def columns(self) -> Tensor:
        """Scale and matrix of each step side by side, ``[steps, 1 + K·(K + 2)]``."""
        return torch.cat((self.input_scale.unsqueeze(1), self.matrices.flatten(1)), dim=1)


class StepTables:
    """The tables of one checkpoint's noise scheduler, by step count.

    Args:
        noise_scheduler: Of a loaded pipeline; it is copied, not used.

    Raises:
        UnsupportedModelError: It is of another kind, or its config makes a step nonlinear.
    """

    def __init__(self, noise_scheduler: Any) -> None:
        name = type(noise_scheduler).__name__
        if name not in REMEMBERED:
            raise UnsupportedModelError(
                f"noise scheduler {name} is not supported for models that share steps by stacking",
                hint=f"allowed: {', '.join(REMEMBERED)}",
            )
        self._noise_scheduler = noise_scheduler
        self._slots = _useful_slots(_probe(self._fresh, TYPICAL_STEPS)[1])
        self.table = lru_cache(maxsize=256)(self._table)
        self._check_linear(name)

    @property
    def num_remembered(self) -> int:
        """Tensors of a sample's shape that go from step to step beside it."""
        return len(self._slots)

    def _fresh(self) -> Any:
        return type(self._noise_scheduler).from_config(self._noise_scheduler.config)

    def _table(self, num_inference_steps: int) -> LinearSteps:
        """The steps of a request.

        Raises:
            ValueError: The scheduler has no such number of steps.
        """
        noise_scheduler, probes = _probe(self._fresh, num_inference_steps)
        matrices = torch.stack([probe.matrix(self._slots) for probe in probes])
        noisy = matrices[:, :, -1].any(dim=1).nonzero().flatten().tolist()
        return LinearSteps(
            timesteps=noise_scheduler.timesteps.float(),
            input_scale=torch.tensor([probe.input_scale for probe in probes]),
            matrices=matrices,
            init_noise_sigma=float(noise_scheduler.init_noise_sigma),
            num_draws=noisy[-1] + 1 if noisy else 0,
        )

    def _check_linear(self, name: str) -> None:
        """Runs the scheduler and its table side by side on numbers of a real run's size."""
        noise_scheduler, steps = self._fresh(), self.table(TYPICAL_STEPS)
        noise_scheduler.set_timesteps(TYPICAL_STEPS)
        values = torch.randn(TYPICAL_STEPS + 1, 1, 4, 2, 2, generator=torch.Generator().manual_seed(1))
        sample = values[0] * steps.init_noise_sigma
        state = torch.stack([sample, *[torch.zeros_like(sample)] * self.num_remembered])
        generator, ours = torch.Generator().manual_seed(2), torch.Generator().manual_seed(2)
        for index, timestep in enumerate(noise_scheduler.timesteps):
            noise_scheduler.scale_model_input(sample, timestep)
            sample = _step(noise_scheduler, values[index + 1], timestep, sample, generator)
            noise = torch.randn(sample.shape, generator=ours)
            inputs = torch.stack([*state, values[index + 1], noise])
            state = torch.tensordot(steps.matrices[index], inputs, dims=1)
        if not torch.allclose(state[0], sample, rtol=TOLERANCE, atol=TOLERANCE):
            suspects = [f"{key}=true" for key in NONLINEAR_KEYS if noise_scheduler.config.get(key)]
            config = "this scheduler config" if not suspects else f"{', '.join(suspects)} in scheduler config"
            raise UnsupportedModelError(
                f"noise scheduler {name}: with {config} its steps are not linear, or not finite",
                hint="set scheduler/scheduler_config.json to one of its usual configs",
            )


@dataclass(slots=True)
class _Probe:
    """What one step made of unit vectors.

    Args:
        before: Slots that held a tensor before the step, in the order of their unit vectors.
        sample, after: Rows of coefficients: of the slots ``before``, of the sample, the model's output and
            the noise; ``sample`` is the next sample's, ``after`` those of each slot after the step.
        input_scale: See `LinearSteps`.
    """

    before: list[_Slot]
    sample: Tensor
    after: dict[_Slot, Tensor]
    input_scale: float

    def matrix(self, slots: Sequence[_Slot]) -> Tensor:
        """``[K, K + 2]``, of those slots alone."""
        rows = torch.zeros(1 + len(slots), len(slots) + 3)
        for place, coefficients in enumerate([self.sample, *[self.after.get(slot) for slot in slots]]):
            if coefficients is None:
                continue
            *remembered, sample, output, noise = coefficients.tolist()
            by_slot = dict(zip(self.before, remembered, strict=True))
            row = [sample, *[by_slot.get(slot, 0.0) for slot in slots], output, noise]
            rows[place] = torch.tensor(row)
        return rows


def _probe(make: Callable[[], Any], num_inference_steps: int) -> tuple[Any, list[_Probe]]:
    """Runs all steps of a fresh scheduler, each on unit vectors; returns it too."""
    on_units, on_zeros = make(), make()
    for noise_scheduler in (on_units, on_zeros):
        noise_scheduler.set_timesteps(num_inference_steps)
        if hasattr(noise_scheduler, "set_begin_index"):
            noise_scheduler.set_begin_index(0)
    timesteps = on_units.timesteps
    if len(timesteps) != num_inference_steps:
        raise ValueError(
            f"the noise scheduler lays {num_inference_steps} steps out as {len(timesteps)}; "
            "ask for another num_inference_steps"
        )
    return on_units, [_probe_step(on_units, on_zeros, timestep) for timestep in timesteps]


def _probe_step(on_units: Any, on_zeros: Any, timestep: Tensor) -> _Probe:
    """What a step adds to what it makes of nothing but noise, which the second scheduler shows."""
    before = list(_remembered(on_units))
    num_inputs = len(before) + 2
    units = torch.eye(num_inputs).view(num_inputs, 1, 1, 1, -1)  # one along the last axis for each input
    input_scale = on_units.scale_model_input(torch.ones(1), timestep).item()
    on_zeros.scale_model_input(torch.ones(1), timestep)
    results = _run_step(on_units, before, units, timestep)
    of_noise = _run_step(on_zeros, before, torch.zeros_like(units), timestep)
    noise = torch.randn(units[0].shape, generator=_generator()).flatten()

    def coefficients(name: _Slot | None) -> Tensor:
        return torch.cat((results[name] - of_noise[name], of_noise[name][:1] / noise[:1]))

    return _Probe(
        before, coefficients(None), {slot: coefficients(slot) for slot in results if slot}, input_scale
    )


def _run_step(
    noise_scheduler: Any, before: Sequence[_Slot], inputs: Tensor, timestep: Tensor
) -> dict[_Slot | None, Tensor]:
    """The next sample, under None, and what is remembered after a step on ``inputs``, flat."""
    for slot, value in zip(before, inputs, strict=False):
        _remember(noise_scheduler, slot, value)
    following = _step(noise_scheduler, inputs[-1], timestep, inputs[-2], _generator())
    return {None: following.flatten()} | {
        slot: tensor.flatten() for slot, tensor in _remembered(noise_scheduler).items()
    }


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _step(
    noise_scheduler: Any, output: Tensor, timestep: Tensor, sample: Tensor, generator: torch.Generator
) -> Tensor:
    """As diffusers' pipelines call it."""
    takes_generator = "generator" in inspect.signature(noise_scheduler.step).parameters
    options = {"generator": generator} if takes_generator else {}
    following: Tensor = noise_scheduler.step(output, timestep, sample, return_dict=False, **options)[0]
    return following


def _remembered(noise_scheduler: Any) -> dict[_Slot, Tensor]:
    """The tensors that it holds between steps."""
    found: dict[_Slot, Tensor] = {}
    for name in REMEMBERED[type(noise_scheduler).__name__]:
        value = getattr(noise_scheduler, name)
        if isinstance(value, list):
            places = range(-len(value), 0)
            found |= {(name, place): value[place] for place in places if value[place] is not None}
        elif value is not None:
            found[name, 0] = value
    return found


def _remember(noise_scheduler: Any, slot: _Slot, tensor: Tensor) -> None:
    name, place = slot
    if place:
        getattr(noise_scheduler, name)[place] = tensor
    else:
        setattr(noise_scheduler, name, tensor)


def _useful_slots(probes: Sequence[_Probe]) -> list[_Slot]:
    """Slots that some later sample depends on; a scheduler also keeps what it will only drop."""
    useful: set[_Slot] = set()
    while True:
        rows = [(probe.before, row) for probe in probes for row in (probe.sample, *_rows_of(probe, useful))]
        found = {slot for before, row in rows for slot, value in zip(before, row, strict=False) if value}
        if found <= useful:
            return sorted(useful)
        useful |= found


def _rows_of(probe: _Probe, slots: set[_Slot]) -> list[Tensor]:
    return [row for slot, row in probe.after.items() if slot in slots]
