"""The workloads are what the benchmark's page says."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from workloads import aspect_shapes, like, make_workloads, read_prompts, uniform_shapes, useful_flops

from offline_diffusion.models.capabilities import Capabilities

CAPABILITIES = Capabilities(family="qwen_image", pipeline="QwenImagePipeline")


def shapes(name: str) -> Counter[tuple[int, int, int]]:
    requests = make_workloads()[name].requests
    return Counter((request.height, request.width, request.num_inference_steps) for request in requests)


def test_the_mixed_sixteen() -> None:
    sixteen = {(512, 512, 20): 8, (768, 768, 20): 5, (1024, 1024, 20): 3}
    assert shapes("mixed16") == sixteen
    assert shapes("mixed32") == {shape: 2 * count for shape, count in sixteen.items()}


def test_dataset_c_has_its_shares() -> None:
    counts = shapes("dataset_c")
    percent = {shape: 100 * count / counts.total() for shape, count in counts.items()}
    assert percent == {
        (512, 512, 20): 15,
        (768, 768, 20): 25,
        (1024, 1024, 25): 45,
        (1536, 1536, 35): 15,
    }


def test_the_uniform_mix_is_even_and_a_fifth_unguided() -> None:
    heights, widths = zip(*uniform_shapes(), strict=True)
    for sides in (heights, widths):
        steps = [b - a for a, b in zip(sorted(sides)[:-1], sorted(sides)[1:], strict=True)]
        assert set(steps) <= {64, 128}
        assert (min(sides), max(sides)) == (320, 960)
        assert sum(sides) / len(sides) == 640
    assert heights != widths
    requests = make_workloads()["uniform"].requests
    assert sum(not request.cfg_active for request in requests) == len(requests) // 5
    assert set(shapes("uniform").values()) == {4}  # so that presorting has something to batch


def test_forty_aspect_ratios() -> None:
    found = aspect_shapes(40)
    assert len(set(found)) == 40
    assert (found[0], found[-1]) == ((256, 1024), (1024, 256))
    assert all(CAPABILITIES.check_size(*shape) is None for shape in found)
    assert all(0.9 < height * width / 512**2 < 1.1 for height, width in found)


@pytest.mark.parametrize("prompts", [(), tuple(f"real {index}" for index in range(2000))])
def test_no_image_finds_its_prompt_encoded(prompts: tuple[str, ...]) -> None:
    workloads = make_workloads(prompts=prompts).values()
    texts = [request.prompt for workload in workloads for request in workload.requests]
    assert len(set(texts)) == len(texts)
    assert all(request.true_cfg_scale == 4 for workload in workloads for request in workload.requests)
    own = make_workloads(prompts=prompts)["512"].requests
    others = like(own, "warm-up", count=30, steps=2)
    assert len(others) == 30
    assert not {request.prompt for request in own} & {request.prompt for request in others}
    assert not {request.negative_prompt for request in own} & {request.negative_prompt for request in others}
    assert {request.num_inference_steps for request in others} == {2}


@pytest.mark.parametrize(("name", "milliseconds"), [("256", 11.2), ("512", 39.7), ("1024", 175.5)])
def test_flops_give_the_floor_of_a_step(name: str, milliseconds: float) -> None:
    """Known from hand: a guided step with 64 text tokens a branch, at 790 TFLOP/s."""
    request = make_workloads(1)[name].requests[0]
    flops = useful_flops([request], CAPABILITIES, lambda text: 64)
    assert flops / 790e12 * 1000 == pytest.approx(milliseconds, abs=0.1)


def test_smaller_for_the_tiny_model() -> None:
    workloads = make_workloads(2, scale=4, max_images=3)
    assert max(len(workload.requests) for workload in workloads.values()) == 3
    sides = {
        side for workload in workloads.values() for r in workload.requests for side in (r.height, r.width)
    }
    assert max(sides) <= 1536 / 4
    assert all(side % 16 == 0 for side in sides)


def test_prompts_are_taken_in_turn_and_once(tmp_path: Path) -> None:
    table = tmp_path / "set.tsv"
    table.write_text("Prompt\tCategory\n" + "".join(f"short {index % 150}\tx\n" for index in range(200)))
    folder = tmp_path / "folder"
    folder.mkdir()
    for index in range(3):
        (folder / f"{index}.txt").write_text(f"a long description {index}")
    prompts = read_prompts([str(table), str(folder)])
    assert len(prompts) == len(set(prompts)) == 153
    assert [text.split()[0] for text in prompts[:7]] == ["short", "a", "short", "a", "short", "a", "short"]
    assert prompts[:3:2] == ["short 0", "short 97"]  # neighbours in a set are about one topic


def test_the_planning_half_needs_no_torch() -> None:
    code = "import sys, workloads, plan, records, targets, publish; print('torch' in sys.modules)"
    folder = Path(__file__).parents[2] / "benchmarks"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "False"
