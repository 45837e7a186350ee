"""Scores, intervals and nearness of pictures; drawn pictures stand in for the engine's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from bench_quality import Benchmark, Setting, main, make_settings, paint, parse_arguments
from ours import RunFailed
from PIL import Image
from quality import Judged, Pixels, Row, clearly, drawn, figures, make_rows, psnr, ssim, targets, wilson
from quality_sheet import COLOURS, LABEL, TILE, make_sheet
from world.captions import is_held_out

from offline_diffusion.request import Request, RequestOutput, SamplingParams

SIZES = [(64, 64), (64, 128)]
COUNT = 8
BF16 = Setting("bf16", 20, 4.0)


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def rows(pool: Executor) -> list[Row]:
    return make_rows(SIZES, COUNT, pool)


@pytest.fixture(scope="module")
def right(rows: list[Row]) -> dict[int, Pixels]:
    return dict(drawn(rows))


class PictureEngine:
    """Stands for the product: knows a row by its seed, and hands pictures out in an order of its own.

    Args:
        pictures: By seed.
        change: Of each picture.
    """

    def __init__(self, pictures: dict[int, Pixels], change: Callable[[Pixels], Pixels] = lambda p: p) -> None:
        self.asked: list[list[SamplingParams]] = []
        self._pictures, self._change = pictures, change

    def generate(self, prompts: Sequence[str], params: Sequence[SamplingParams]) -> Iterator[RequestOutput]:
        self.asked.append(list(params))
        order = list(range(len(prompts)))
        random.Random(0).shuffle(order)
        for at in order:
            own = params[at]
            assert own.height is not None
            assert own.width is not None
            assert own.seed is not None
            request = Request(
                request_id=str(at),
                prompt=prompts[at],
                height=own.height,
                width=own.width,
                num_inference_steps=own.num_inference_steps or 0,
                true_cfg_scale=own.true_cfg_scale or 0,
                seed=own.seed,
            )
            picture = self._change(self._pictures[own.seed])
            assert picture.shape == (own.height, own.width, 3)
            yield RequestOutput(request, "ok", picture)


# --- intervals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_right", "num", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_intervals_are_the_published_ones(num_right, num, low, high):
    """Newcombe 1998, Two-sided confidence intervals for the single proportion, table I, method 3."""
    assert wilson(num_right, num) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("num", [1, 7, 500, 2000])
def test_intervals_are_those_of_scipy(num):
    for num_right in {0, 1, num // 3, num - 1, num}:
        found = scipy.stats.binomtest(num_right, num).proportion_ci(0.95, method="wilson")
        assert wilson(num_right, num) == pytest.approx((found.low, found.high), abs=1e-12)


def test_clearly_lower_means_that_intervals_do_not_meet():
    low, near, high = ({"low": a, "high": b} for a, b in [(0.1, 0.3), (0.25, 0.5), (0.31, 0.6)])
    assert clearly(low, high) == "lower"
    assert clearly(high, low) == "higher"
    assert clearly(low, near) == clearly(near, low) == "unclear"


# --- nearness ------------------------------------------------------------------------------------


def test_nearness_is_that_of_scikit_image(right):
    metrics = pytest.importorskip("skimage.metrics")
    rng = np.random.default_rng(0)
    for at in (0, 2):
        reference = right[at]
        noise = rng.normal(0, rng.uniform(2, 60), reference.shape)
        picture = (reference + noise).clip(0, 255).round().astype(np.uint8)
        expected = metrics.structural_similarity(
            picture, reference, gaussian_weights=True, use_sample_covariance=False, channel_axis=-1
        )
        assert ssim(picture, reference) == pytest.approx(expected, abs=1e-9)
        expected = metrics.peak_signal_noise_ratio(reference, picture)
        assert psnr(picture, reference) == pytest.approx(expected, abs=1e-9)


def test_nearness_of_plain_pictures():
    dark, light = (np.full((32, 48, 3), value, np.uint8) for value in (100, 150))
    assert ssim(dark, light) == pytest.approx((2 * 100 * 150 + 6.5025) / (100**2 + 150**2 + 6.5025), abs=1e-9)
    assert psnr(dark, light) == pytest.approx(20 * np.log10(255 / 50))
    assert psnr(dark, dark) is None
    assert ssim(dark, dark) == pytest.approx(1)


# --- rows and settings ---------------------------------------------------------------------------


def test_rows_are_held_out_and_differ(rows, pool):
    assert len(rows) == 2 * len(SIZES) * COUNT
    assert all(is_held_out(row.example.caption) for row in rows)
    assert all((row.example.scene.relation is not None) for row in rows if row.group == "related")
    assert len({row.seed for row in rows}) == len(rows)
    for size in SIZES:
        captions = [row.example.caption for row in rows if (row.group, row.size) == ("mixed", size)]
        assert len(set(captions)) == len(captions) == COUNT
    assert make_rows(SIZES, 2, pool) == rows[: 2 * 2 * len(SIZES)]


def test_settings_differ_from_the_reference_in_one_value():
    assert make_settings(["bf16", "fp8"], [20, 10], [4.0, 1.0]) == [
        Setting("bf16", 20, 4.0),
        Setting("bf16", 10, 4.0),
        Setting("bf16", 20, 1.0),
        Setting("fp8", 20, 4.0),
    ]


@pytest.mark.parametrize("size", ["64", "64x60", "0x64", "axb", "64x64x64"])
def test_a_size_that_cannot_be_is_refused(size, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--sizes", "64x64", size])
    assert "multiples of 16" in capsys.readouterr().err


# --- pictures in the engine's place --------------------------------------------------------------


def test_drawn_pictures_are_right_and_others_wrong(rows, right, pool):
    others = {
        at: right[(at + 2 * len(SIZES)) % len(rows)] for at in right
    }  # the next caption of set and size
    engines = {"bf16": PictureEngine(right), "fp8": PictureEngine(others)}
    bench = Benchmark(rows, pool, engines.__getitem__)
    found = [bench.measure(Setting(name, 20, 4.0)) for name in engines]
    for size in ("64x64", "128x64", "all"):
        num = COUNT * (2 if size == "all" else 1)
        for name in ("things", "count", "relation"):
            own, other = (record["figures"][size][name] for record in found)
            assert (own["share"], own["num_right"], own["num"]) == (1, num, num)
            assert other["num"] == num
        assert found[1]["figures"][size]["things"]["share"] < 0.1
        assert found[1]["figures"][size]["relation"]["share"] < 0.1
    assert found[0]["against_reference"] is None
    assert found[1]["against_reference"]["things"] == "lower"
    assert found[1]["against_reference"]["relation"] == "lower"


def test_mirrored_pictures_have_their_things_but_not_left_and_right(rows, right, pool):
    bench = Benchmark(rows, pool, lambda _: PictureEngine(right, lambda p: np.ascontiguousarray(p[:, ::-1])))
    found = bench.measure(BF16)["figures"]["all"]
    related = [row.example.scene.relation for row in rows if row.group == "related"]
    assert 0 < found["relation"]["num_right"] < len(related)
    assert found["relation"]["num_right"] == sum(name in ("above", "below") for name in related)
    assert found["things"]["share"] == found["count"]["share"] == found["related_things"]["share"] == 1


def test_pictures_are_compared_with_the_reference_s(rows, right, pool):
    def brighter(picture: Pixels) -> Pixels:
        return np.where(picture < 128, picture + 1, picture - 1).astype(np.uint8)

    engines = {"bf16": PictureEngine(right), "int8": PictureEngine(right, brighter)}
    loaded: list[str] = []

    def load(precision: str) -> PictureEngine:
        loaded.append(precision)
        return engines[precision]

    bench = Benchmark(rows, pool, load)
    settings = [BF16, Setting("bf16", 10, 1.0), Setting("int8", 20, 4.0)]
    own, again, other = (bench.measure(setting)["figures"] for setting in settings)
    assert loaded == ["bf16", "int8"]
    assert own["all"]["psnr_db"] is own["all"]["ssim"] is own["all"]["num_equal"] is None
    assert (again["64x64"]["num_equal"], again["all"]["num_equal"]) == (2 * COUNT, len(rows))
    assert again["all"]["psnr_db"] is None
    assert again["all"]["ssim"] == 1
    assert other["128x64"]["psnr_db"] == pytest.approx(20 * np.log10(255), rel=1e-4)  # one step everywhere
    assert 0.9 < other["128x64"]["ssim"] < 1
    assert other["all"]["num_equal"] == 0


def test_what_the_engine_is_asked_for(rows, right):
    engine = PictureEngine(right)
    for setting in (BF16, Setting("bf16", 5, 1.0)):
        assert sorted(at for at, _ in paint(engine, setting, rows)) == list(range(len(rows)))
    first, second = engine.asked
    assert [own.seed for own in first] == [own.seed for own in second]
    assert {own.negative_prompt for own in first} == {" "}
    assert {(own.num_inference_steps, own.true_cfg_scale) for own in first} == {(20, 4.0)}
    assert {(own.num_inference_steps, own.true_cfg_scale) for own in second} == {(5, 1.0)}


def test_a_picture_that_fails_ends_the_benchmark(rows, right):
    class Failing(PictureEngine):
        def generate(self, prompts: Any, params: Any) -> Iterator[RequestOutput]:
            for output in super().generate(prompts, params):
                yield RequestOutput(output.request, "failed", error_type="nan", error="NaN at step 3")

    with pytest.raises(RunFailed, match="NaN at step 3"):
        list(paint(Failing(right), BF16, rows))


# --- sums ----------------------------------------------------------------------------------------


def test_figures_by_size(rows):
    """Only the first size's pictures have their things; the second lacks relations as well."""
    judged = [
        Judged(
            things=row.size == SIZES[0],
            count=row.group == "mixed",
            relation=None if row.example.scene.relation is None else row.size == SIZES[0],
        )
        for row in rows
    ]
    found = figures(rows, judged)
    assert list(found) == ["64x64", "128x64", "all"]
    assert [own["things"]["share"] for own in found.values()] == [1, 0, 0.5]
    assert [own["count"]["share"] for own in found.values()] == [1, 1, 1]
    assert [own["relation"]["num_right"] for own in found.values()] == [COUNT, 0, COUNT]
    assert [own["relation"]["num"] for own in found.values()] == [COUNT, COUNT, 2 * COUNT]


def test_targets_of_the_reference_and_of_what_is_unguided():
    def record(scale: float, things: float, relation: float, verdict: str) -> dict[str, Any]:
        shares = {"all": {"things": {"share": things}, "relation": {"share": relation}}}
        verdicts = {"things": verdict, "relation": "unclear"}
        return {"true_cfg_scale": scale, "figures": shares, "against_reference": verdicts}

    records = [record(4, 0.95, 0.84, ""), record(2, 0.5, 0.5, "unclear"), record(1, 0.1, 0.8, "lower")]
    assert {target["what"]: target["met"] for target in targets(records)} == {
        "things, all": True,
        "relation, all": False,
        "things, unguided": True,
        "relation, unguided": False,
    }


def test_a_sheet_frames_what_is_right_in_green(rows, right):
    judged = [Judged(at != 2, at != 2, None) for at in range(len(rows))]
    sheet = make_sheet(rows, right, judged)
    lines = [(row.group, row.size) for row in rows[: 2 * len(SIZES)]]
    assert sheet.height == len(lines) * (TILE + LABEL)
    frames = [sheet.getpixel((5, line * (TILE + LABEL) + TILE // 2)) for line in range(len(lines))]
    assert frames == [COLOURS[at != 2] for at in range(len(lines))]


# --- the whole command ---------------------------------------------------------------------------


def test_the_command(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the product's engine over random weights, on a CPU, and a pool of processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it for its processes; this takes it back
    output, sheet = tmp_path / "quality.json", tmp_path / "sheet.png"
    options = ["--count", "2", "--sizes", "64x64", "--steps", "2", "--guidance", "4"]
    options += ["--model", "tiny", "--device", "cpu"]
    options += ["--settings", "fp32", "int8", "--output", str(output), "--sheet", str(sheet)]
    assert main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])
    assert json.loads(output.read_text(encoding="utf-8")) == record
    assert record["drawn"]["all"]["things"]["share"] == 1
    assert [own["precision"] for own in record["settings"]] == ["fp32", "int8"]
    assert record["settings"][0]["figures"]["all"]["things"]["num_right"] == 0  # the weights are random
    nearness = record["settings"][1]["figures"]["all"]
    assert 20 < nearness["psnr_db"] < 80
    assert 0.8 < nearness["ssim"] < 1
    assert str(tmp_path) not in json.dumps(record)
    assert any(line.startswith("int8 2 steps cfg 4") and "64x64" in line for line in lines)
    with Image.open(sheet) as page:
        assert page.height == 2 * (TILE + LABEL)
