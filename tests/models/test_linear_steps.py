"""Tables of linear steps against the diffusers schedulers they were read off, run on tensors."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import pytest
import torch

from offline_diffusion.errors import UnsupportedModelError
from offline_diffusion.models.linear_steps import LinearSteps, StepTables

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}

KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "SDXL": ("EulerDiscrete", {"timestep_spacing": "leading", "steps_offset": 1}, 0),
    "Lightning": ("EulerDiscrete", {"timestep_spacing": "trailing"}, 0),
    "Euler, v": ("EulerDiscrete", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}, 0),
    "Euler, Karras": ("EulerDiscrete", {"use_karras_sigmas": True}, 0),
    "Turbo": ("EulerAncestralDiscrete", {"timestep_spacing": "trailing"}, 0),
    "DDIM": ("DDIM", {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}, 0),
    "DDIM, v": ("DDIM", {"clip_sample": False, "prediction_type": "v_prediction"}, 0),
    "DPM++ 2M": ("DPMSolverMultistep", {}, 1),
    "DPM++ 2M, Karras": ("DPMSolverMultistep", {"use_karras_sigmas": True, "euler_at_final": True}, 1),
    "DPM++ 2M, v": ("DPMSolverMultistep", {"prediction_type": "v_prediction", "solver_type": "heun"}, 1),
    "DPM++ 3M": ("DPMSolverMultistep", {"solver_order": 3}, 2),
    "DPM++ 1": ("DPMSolverMultistep", {"solver_order": 1}, 0),
    "DPM++ SDE": ("DPMSolverMultistep", {"algorithm_type": "sde-dpmsolver++"}, 1),
    "UniPC": ("UniPCMultistep", {}, 3),
    "LCM": ("LCM", {"clip_sample": False}, 0),
}
"""Class, config beside the betas, and the tensors that it must remember: its order less one, and for UniPC's
corrector also the sample before and one output more."""

SHAPE = (1, 4, 3, 5)


def make(kind: str) -> Any:
    name, config, _ = KINDS[kind]
    return getattr(diffusers, f"{name}Scheduler")(**BETAS, **config)


def model(sample: torch.Tensor, timestep: float) -> torch.Tensor:
    """Anything that is not linear and looks at both."""
    return torch.tanh(sample * 1.5 + math.sin(timestep / 50)) + 0.1 * sample


def run_theirs(noise_scheduler: Any, num_inference_steps: int, seed: int) -> torch.Tensor:
    """As diffusers' pipelines do."""
    generator = torch.Generator().manual_seed(seed)
    noise_scheduler.set_timesteps(num_inference_steps)
    sample = torch.randn(SHAPE, generator=generator) * noise_scheduler.init_noise_sigma
    takes_generator = type(noise_scheduler).__name__ not in (
        "DEISMultistepScheduler",
        "UniPCMultistepScheduler",
    )
    options = {"generator": generator} if takes_generator else {}
    for timestep in noise_scheduler.timesteps:
        output = model(noise_scheduler.scale_model_input(sample, timestep), float(timestep))
        sample = noise_scheduler.step(output, timestep, sample, return_dict=False, **options)[0]
    return sample


def run_ours(steps: LinearSteps, num_remembered: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn(SHAPE, generator=generator) * steps.init_noise_sigma
    state = torch.stack([sample] + [torch.zeros(SHAPE)] * num_remembered)
    for index, timestep in enumerate(steps.timesteps.tolist()):
        output = model(state[0] * steps.input_scale[index], timestep)
        is_noisy = index < steps.num_draws
        noise = torch.randn(SHAPE, generator=generator) if is_noisy else torch.full(SHAPE, 1e3)
        inputs = torch.stack([*state, output, noise])
        state = torch.einsum("ij,j...->i...", steps.matrices[index], inputs)
    return state[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_draws_what_the_scheduler_draws(kind: str) -> None:
    tables = StepTables(make(kind))
    for num_steps in (1, 2, 3, 4, 9, 14, 15, 16, 30):
        steps = tables.table(num_steps)
        theirs = run_theirs(make(kind), num_steps, seed=num_steps)
        assert theirs.isfinite().all()
        assert theirs.std() > 0.01
        ours = run_ours(steps, tables.num_remembered, seed=num_steps)
        rounding = 1e-4 + 1e-6 * steps.init_noise_sigma  # of the first samples, which are as large as that
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=rounding, msg=f"{kind}, {num_steps} steps")


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_is_remembered_than_the_method_needs(kind: str) -> None:
    tables = StepTables(make(kind))
    assert tables.num_remembered == KINDS[kind][2]
    for num_steps in (1, 5, 40):
        steps = tables.table(num_steps)
        rows = 1 + tables.num_remembered
        assert steps.matrices.shape == (num_steps, rows, rows + 2)
        assert steps.timesteps.shape == steps.input_scale.shape == (num_steps,)
        assert {tensor.dtype for tensor in (steps.matrices, steps.timesteps, steps.input_scale)} == {
            torch.float32
        }


def test_euler_is_its_closed_form() -> None:
    """``x + (next sigma - sigma) · output``, and an input of unit variance."""
    noise_scheduler = make("SDXL")
    noise_scheduler.set_timesteps(7)
    sigmas = noise_scheduler.sigmas
    steps = StepTables(make("SDXL")).table(7)
    assert steps.num_draws == 0
    torch.testing.assert_close(steps.matrices[:, 0, 0], torch.ones(7))
    torch.testing.assert_close(steps.matrices[:, 0, 1], sigmas.diff())
    assert not steps.matrices[:, 0, 2].any()
    torch.testing.assert_close(steps.input_scale, (sigmas[:-1] ** 2 + 1).rsqrt())


def test_the_last_step_of_an_ancestral_run_draws_no_noise_that_matters() -> None:
    tables = StepTables(make("Turbo"))
    assert [tables.table(num_steps).num_draws for num_steps in (1, 2, 4)] == [0, 1, 3]


def test_the_pipelines_own_scheduler_is_left_alone() -> None:
    noise_scheduler = make("DPM++ 2M")
    noise_scheduler.set_timesteps(5)
    before = noise_scheduler.timesteps.clone()
    StepTables(noise_scheduler).table(9)
    assert torch.equal(noise_scheduler.timesteps, before)
    assert noise_scheduler.model_outputs == [None, None]


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        ("HeunDiscrete", {}, "HeunDiscreteScheduler"),
        ("PNDM", {"skip_prk_steps": True}, "PNDMScheduler"),
        ("DDIM", {"clip_sample": True}, "clip_sample=true"),
        ("DPMSolverMultistep", {"thresholding": True}, "thresholding=true"),
        ("UniPCMultistep", {"predict_x0": False}, "UniPCMultistepScheduler"),
    ],
)
def test_what_is_not_linear_is_refused_by_name(name: str, config: dict[str, Any], named: str) -> None:
    noise_scheduler = getattr(diffusers, f"{name}Scheduler")(**BETAS, **config)
    with pytest.raises(UnsupportedModelError, match=named):
        StepTables(noise_scheduler)


def test_a_key_that_another_scheduler_heeds_is_passed_over() -> None:
    """Configs that were made over keep the keys of the class they were made for."""
    ddim = diffusers.DDIMScheduler(**BETAS, clip_sample=True)
    euler = diffusers.EulerDiscreteScheduler.from_config(ddim.config)
    assert euler.config["clip_sample"]
    assert StepTables(euler).num_remembered == 0


def test_a_scheduler_that_turns_nonlinear_unannounced_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = diffusers.EulerDiscreteScheduler.step

    def clipped(self: Any, *args: Any, **options: Any) -> Any:
        sample, *rest = plain(self, *args, **options)
        return (sample.clamp(-1, 1), *rest)

    monkeypatch.setattr(diffusers.EulerDiscreteScheduler, "step", clipped)
    with pytest.raises(UnsupportedModelError, match=r"EulerDiscreteScheduler.*not linear"):
        StepTables(make("SDXL"))


def test_a_step_count_that_the_scheduler_cannot_lay_out_is_an_error_of_that_count() -> None:
    tables = StepTables(make("LCM"))
    with pytest.raises(ValueError, match="original_steps"):
        tables.table(51)
    assert tables.table(50).timesteps.shape == (50,)
