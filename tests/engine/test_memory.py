"""What fits on a device, and the token budget that is chosen for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_fakes import FakeModel

from offline_diffusion.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from offline_diffusion.engine.memory import DeviceLimits, choose_budget, fit_token_budget, measure_limits

LIMITS = DeviceLimits(free_bytes=10_000_000, step_bytes=1_000, decode_bytes=2_000)
"""10,000 tokens, or 5,000 pixels; a default image of the fake is 32 × 32 pixels: 2,048 tokens' room."""


def test_room_is_counted_in_tokens() -> None:
    assert LIMITS.max_tokens == 10_000
    assert LIMITS.decode_tokens(1_500) == 3_000


@pytest.mark.parametrize(
    ("side", "whole", "in_tiles"),
    [(2048, 2048**2, 2048**2), (4096, 4096**2, 2048**2), (8192, 8192**2, 8192**2 // 8)],
)
def test_only_tiles_keep_a_large_decode_small(side: int, whole: int, in_tiles: int) -> None:
    assert LIMITS.decode_tokens(side**2) == 2 * whole
    assert replace(LIMITS, tiled_decode=True).decode_tokens(side**2) == 2 * in_tiles


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({64: 100.0, 32: 99.5, 16: 99.1}, 16),
        ({64: 100.0, 32: 99.5, 16: 98.9}, 32),
        ({64: 100.0, 32: 90.0, 16: 99.0}, 16),
        ({64: 100.0, 32: 90.0, 16: 80.0}, 64),
    ],
)
def test_the_smallest_budget_near_the_best_rate_is_chosen(rates: dict[int, float], expected: int) -> None:
    assert choose_budget(rates) == expected


@pytest.mark.parametrize(("asked", "expected"), [(5_000, 5_000), (7_952, 7_952), (9_000, 7_952)])
def test_a_budget_that_does_not_fit_beside_a_decode_is_lowered(
    asked: int, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert fit_token_budget(FakeModel(), asked, LIMITS) == expected
    assert bool(caplog.records) == (asked != expected)


def test_where_nothing_can_be_measured_the_default_stands() -> None:
    model = FakeModel()
    assert measure_limits(model) is None
    assert fit_token_budget(model, None, None) == DEFAULT_MAX_NUM_BATCHED_TOKENS
    assert fit_token_budget(model, 77, None) == 77
