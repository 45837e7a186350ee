"""The training step against diffusers' transformer, a sequence at a time."""

from __future__ import annotations

import math
import random

import pytest
import torch
from world.denoiser import NUM_HEAD_TOKENS, TrainingStep, draw_sigmas, packed_velocity
from world.hints import PAIR_CLASSES, TOKEN_CLASSES, UNTOLD, WEIGHT, Hints
from world.layout import Slot, lay_out
from world.modules import make_modules
from world.recipe import SHIFT

SLOTS = [
    Slot((64, 64), 9, 0, 1),
    Slot((128, 64), 14, 1, 1),
    Slot((96, 144), 5, 2, 1),
    Slot((128, 128), 22, 3, 1),
]
NUM_IMG, NUM_TXT = 256, 64


@pytest.fixture(scope="module")
def modules():
    _, text_encoder, transformer = make_modules(3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in [*text_encoder.parameters(), *transformer.parameters()]:
            if parameter.ndim > 1:
                parameter.normal_(std=0.08, generator=generator)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return text_encoder, transformer


def test_velocity_is_that_of_diffusers(modules):
    text_encoder, transformer = modules
    generator = torch.Generator().manual_seed(1)
    layout = lay_out(SLOTS, transformer, NUM_IMG, NUM_TXT, torch.device("cpu"))
    step = TrainingStep(text_encoder, transformer, torch.device("cpu"))
    input_ids = torch.randint(0, 500, (len(SLOTS), NUM_HEAD_TOKENS + 22), generator=generator)
    noisy = torch.randn(NUM_IMG, 64, generator=generator)
    sigma = torch.rand(len(SLOTS), generator=generator)

    with torch.no_grad():
        text = step.text(input_ids, layout)
        found, _ = packed_velocity(transformer, text, noisy, sigma, layout, step._attend)
        start = 0
        for index, slot in enumerate(SLOTS):
            ids = input_ids[index : index + 1, : NUM_HEAD_TOKENS + slot.num_text]
            hidden = text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-1]
            text = hidden[:, NUM_HEAD_TOKENS:]
            rows = noisy[start : start + slot.num_image]
            expected = transformer(
                hidden_states=rows.unsqueeze(0),
                encoder_hidden_states=text,
                encoder_hidden_states_mask=torch.ones(text.shape[:2], dtype=torch.bool),
                timestep=sigma[index : index + 1],
                img_shapes=[[(1, slot.size[0] // 16, slot.size[1] // 16)]],
                return_dict=False,
            )[0][0]
            torch.testing.assert_close(found[start : start + slot.num_image], expected, atol=2e-5, rtol=1e-4)
            assert expected.std() > 0.1
            start += slot.num_image


def test_filling_is_in_no_loss_and_no_gradient(modules):
    text_encoder, transformer = modules
    layout = lay_out(SLOTS, transformer, NUM_IMG, NUM_TXT, torch.device("cpu"))
    own = sum(slot.num_image for slot in SLOTS)
    step = TrainingStep(text_encoder, transformer, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    input_ids = torch.randint(0, 500, (len(SLOTS), NUM_HEAD_TOKENS + 22), generator=generator)
    clean, noise = (torch.randn(NUM_IMG, 64, generator=generator).requires_grad_() for _ in range(2))
    sigma = torch.rand(len(SLOTS), generator=generator)

    token = torch.stack([torch.randint(0, n, (NUM_IMG,), generator=generator) for n in TOKEN_CLASSES], dim=1)
    pair = torch.full((len(SLOTS), len(PAIR_CLASSES)), UNTOLD)
    hints, weight = Hints(pair, token), torch.tensor(0.5)

    lowered, errors, by_token = step(input_ids, clean, noise, sigma, hints, weight, layout)
    lowered.backward()

    parts = by_token[:own].split([slot.num_image for slot in SLOTS])
    roots = [slot.num_image**0.5 for slot in SLOTS]
    expected = sum(root * part.mean().item() for root, part in zip(roots, parts, strict=True)) / sum(roots)
    assert errors[0].item() == pytest.approx(expected, rel=1e-5)
    assert errors[1].item() == 0  # no relation is told
    assert lowered.item() == pytest.approx(expected + 0.5 * WEIGHT * errors[2].item(), rel=1e-5)
    assert clean.grad[own:].abs().max() == 0
    assert clean.grad[:own].abs().amax(dim=1).min() > 0


def test_half_of_the_noise_levels_are_where_a_caption_decides():
    sigmas = draw_sigmas(10_000, torch.Generator().manual_seed(0), torch.device("cpu"))
    rng = random.Random(0)
    shift = math.exp(SHIFT)
    expected = sorted(shift * u / (1 + (shift - 1) * u) for u in (rng.random() for _ in range(10_000)))
    torch.testing.assert_close(sigmas.sort().values, torch.tensor(expected), atol=0.03, rtol=0)
    assert 0.45 < (sigmas > 0.85).float().mean() < 0.55
