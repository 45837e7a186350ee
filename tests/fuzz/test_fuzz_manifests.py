"""Ten thousand manifests that nobody would write: each ends in a report or in an error for the user.

A failure names the seed of its case and the file that holds it. What ends the process (pyarrow does on some
damaged files) leaves the manifest in the test's temporary folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from fuzzing import FORMATS, SUFFIXES, TOKENS, Outcomes, mutated, samples
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

NUM_MUTATED, NUM_BUILT = 8_000, 4_000
NUM_SMOKE = 150
MAX_BYTES_A_CASE = 1_500
"""What memory may grow by from case to case, over thousands: what is kept of each would be more."""


Case = tuple[str, bytes, str]
"""Of a manifest: its file's name, its content, and what names the case."""


def read_all(folder: Path, cases: Iterable[Case]) -> tuple[Outcomes, float]:
    """Reads them; the memory's slope over the second half in bytes a case."""
    outcomes, process, memory = Outcomes(folder), psutil.Process(), []
    for number, case in enumerate(cases):
        outcomes.read(*case)
        if number % 50 == 0:
            memory.append(process.memory_info().rss)
    half = memory[len(memory) // 2 :]
    slope = float(np.polyfit(np.arange(len(half)) * 50, half, 1)[0]) if len(half) > 2 else 0.0
    return outcomes, slope


def tell(what: str, outcomes: Outcomes, slope: float, seconds: float) -> None:
    print(
        f"{sum(outcomes.counts.values())} {what} in {seconds:.0f} s: {dict(outcomes.counts)}, "
        f"slowest {outcomes.slowest:.2f} s, memory {slope:+.0f} bytes a case"
    )


# --- mutated bytes ----------------------------------------------------------------------------


def mutated_cases(num_cases: int) -> Iterator[Case]:
    bases = samples()
    return ((*mutated(seed, bases), f"seed {seed}") for seed in range(num_cases))


def test_some_damaged_samples(tmp_path: Path) -> None:
    outcomes, _ = read_all(tmp_path, mutated_cases(NUM_SMOKE))
    assert set(outcomes.counts) == {"good", "faults", "error"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thousands_of_damaged_samples(tmp_path: Path) -> None:
    started = time.monotonic()
    outcomes, slope = read_all(tmp_path, mutated_cases(NUM_MUTATED))
    tell("damaged samples", outcomes, slope, time.monotonic() - started)
    assert min(outcomes.counts[kind] for kind in ("good", "faults", "error")) > NUM_MUTATED / 20
    assert slope < MAX_BYTES_A_CASE


# --- built rows -------------------------------------------------------------------------------

_texts = st.one_of(
    st.text(max_size=12),
    st.text(st.characters(), max_size=4),  # with halves of surrogate pairs
    st.sampled_from(
        ["a red cup", "", " ", "512", "1.0", "1e3", "-1", "9007199254740993", "1024x768", "auto", "../x"]
    ),
    st.sampled_from([token.decode("utf-8", "replace") for token in TOKENS]),
)
_scalars = st.one_of(
    _texts,
    st.integers(),
    st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63), 10**400, 0, 1, -1, True, None]),
    st.floats(),
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=6,
)
_COLUMNS = (
    "id", "prompt", "Prompt", "text", "p", "negative_prompt", "height", "width", "size", "steps", "cfg", "n",
    "num_inference_steps", "true_cfg_scale", "guidance_scale", "seed", "num_images_per_prompt", "lora",
    "lora_scale", "custom_id", "body", "image", "row", "image_carried", "sha256", "tag", "promt",
)  # fmt: skip
_rows = st.lists(
    st.fixed_dictionaries(
        {"prompt": st.just("a red cup") | _values},
        optional={"id": _values, "seed": _values, "height": _values, "tag": _values, "n": st.integers(0, 5)},
    )
    | st.dictionaries(st.sampled_from(_COLUMNS) | _texts, _values, max_size=5),
    min_size=1,
    max_size=8,
)
_cases = st.tuples(_rows, st.sampled_from(list(FORMATS)), st.none() | st.sampled_from(SUFFIXES))


def each_built(num_cases: int, take: Callable[[str, bytes, str], None]) -> None:
    """Calls ``take`` with so many cases; one at which it fails is made as small as can be."""

    @settings(
        max_examples=num_cases,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(_cases)
    def build(case: Any) -> None:
        rows, kind, suffix = case
        try:
            content = FORMATS[kind](rows)
        except (ValueError, OverflowError, pa.ArrowNotImplementedError):  # not even the writer takes it
            return
        take(f"m{suffix or kind}", content, f"hypothesis {kind}")

    build()


def test_some_built_manifests(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path)
    each_built(NUM_SMOKE, outcomes.read)
    assert set(outcomes.counts) == {"good", "faults", "error"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thousands_of_built_manifests(tmp_path: Path) -> None:
    """All are built first: what hypothesis remembers of each is none of the memory that is measured."""
    started = time.monotonic()
    cases: list[Case] = []
    each_built(NUM_BUILT, lambda *case: cases.append(case))
    outcomes, slope = read_all(tmp_path, cases)
    tell("built manifests", outcomes, slope, time.monotonic() - started)
    assert sum(outcomes.counts.values()) > NUM_BUILT * 0.9
    assert min(outcomes.counts[kind] for kind in ("good", "faults", "error")) > NUM_BUILT / 50
    assert slope < MAX_BYTES_A_CASE
