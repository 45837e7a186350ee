"""What every family must pass, on a small random checkpoint of each; see docs/adding_a_model.md."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compositions import forward, prepare
from families import CASES, Case
from job_fakes import Runner, at_step, decode, read_table, write_jsonl

from offline_diffusion.accel.quantize import apply_quantization
from offline_diffusion.config import EngineConfig
from offline_diffusion.engine.engine import Engine
from offline_diffusion.engine.model_runner import ModelRunner
from offline_diffusion.models.capabilities import BatchKind, Capabilities
from offline_diffusion.models.loader import load_model, model_from_pipeline
from offline_diffusion.models.registry import find_checkpoint
from offline_diffusion.progress import StopFlag
from offline_diffusion.request import Request, RequestOutput, SamplingParams

CPU = torch.device("cpu")
RECORDED = (
    *("height", "width", "num_inference_steps", "seed"),
    *("true_cfg_scale", "guidance_scale", "negative_prompt"),
)
LONG_PROMPT = "red lamp under glass " * 200


@dataclass(frozen=True)
class Subject:
    """A family's case, its checkpoint's folder, and both programs over the same weights."""

    case: Case
    folder: Path
    pipeline: Any
    model: Any

    @property
    def capabilities(self) -> Capabilities:
        return self.model.capabilities  # type: ignore[no-any-return]

    def rows(self, seed: int, count: int = 6) -> list[tuple[str, SamplingParams]]:
        return self.case.rows(seed, count, multiple=self.capabilities.size_multiple)

    def requests(self, seed: int, count: int = 6) -> list[Request]:
        rows = enumerate(self.rows(seed, count))
        return [self.resolve(str(index), prompt, params) for index, (prompt, params) in rows]

    def resolve(self, name: str, prompt: str, params: SamplingParams) -> Request:
        return self.capabilities.resolve(name, prompt, params, seed=params.seed or 0)

    def draw(self, requests: list[Request], **options: Any) -> dict[str, RequestOutput]:
        engine = Engine(self.model, EngineConfig(**options))
        return {output.request_id: output for output in engine.generate(requests)}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * case.slow) for name, case in CASES.items()],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    case = CASES[request.param]
    folder = case.build(tmp_path_factory.mktemp(request.param) / request.param)
    pipeline = case.load(folder)
    model = model_from_pipeline(pipeline, find_checkpoint(str(folder)), CPU)
    return Subject(case, folder, pipeline, model)


# --- parity -------------------------------------------------------------------------------------------


def test_every_row_of_a_mix_is_the_pipelines_given_it_alone(family: Subject) -> None:
    """Sizes, steps, prompts and guidance, as a user gives them: defaults must be the pipeline's, too."""
    rows = family.rows(1)
    outputs = family.draw(family.requests(1), max_num_seqs=4, max_num_batched_tokens=4000)
    pictures = []
    for index, (prompt, params) in enumerate(rows):
        output = outputs[str(index)]
        assert (output.status, output.error) == ("ok", None)
        assert output.pixels is not None
        pictures.append(family.case.draw_alone(family.pipeline, prompt, params))
        difference = np.abs(output.pixels.astype(int) - pictures[-1].astype(int))
        assert difference.max() <= 1, (prompt, params)
    assert {output.metrics.cfg_active for output in outputs.values()} == {True, False}
    assert min(float(picture.std()) for picture in pictures) > 8  # nothing is gray


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "a quiet river"},
        {"negative_prompt": "storm"},
        {"true_cfg_scale": 1.5, "guidance_scale": 1.5},
        {"num_inference_steps": 4},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_a_row_says_is_seen_in_its_picture(family: Subject, changes: dict[str, Any]) -> None:
    """Guards the tests of parity and company: what pictures do not depend on, they could not catch."""
    side = 4 * family.capabilities.size_multiple
    params = SamplingParams(
        height=side,
        width=side,
        num_inference_steps=3,
        true_cfg_scale=4.0,
        guidance_scale=4.0,
        negative_prompt="blurry",
        seed=3,
    )
    changed = replace(params, **{name: value for name, value in changes.items() if name != "prompt"})
    outputs = family.draw(
        [
            family.resolve("plain", "a red cup", params),
            family.resolve("changed", changes.get("prompt", "a red cup"), changed),
        ]
    )
    a, b = outputs["plain"].pixels, outputs["changed"].pixels
    assert a is not None
    assert b is not None
    assert np.abs(a.astype(int) - b.astype(int)).mean() > 2


# --- company ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [21, 22])
@torch.inference_mode()
def test_company_changes_no_bit_of_a_step(family: Subject, seed: int) -> None:
    """Requests of a pack stand at different steps; noise predictions and latents, bit for bit."""
    if family.capabilities.batch_kind is not BatchKind.PACKED:
        pytest.skip("a stacked family rounds with its company on a CPU")
    runner = ModelRunner(family.model)
    prepared = [
        prepare(runner, own, index % own.num_inference_steps)
        for index, own in enumerate(family.requests(seed))
    ]
    for request, packed in zip(prepared, forward(family.model, prepared), strict=True):
        (alone,) = forward(family.model, [request])
        assert torch.equal(packed.noise_pred, alone.noise_pred), request.request
        assert torch.equal(packed.latents, alone.latents), request.request
        assert packed.noise_pred.isfinite().all()


def test_a_prompts_company_changes_no_bit(family: Subject) -> None:
    texts = ["a red cup", "storm", LONG_PROMPT, "", "quiet river under glass"]
    prompts = [family.model.tokenize(text) for text in texts]
    with torch.inference_mode():
        together = family.model.prepare_encode(prompts)
        alone = [family.model.prepare_encode([prompt])[0] for prompt in prompts[::-1]][::-1]
    for prompt, a, b in zip(prompts, together, alone, strict=True):
        assert torch.equal(a.stream, b.stream)
        assert a.num_tokens == prompt.num_tokens
        assert (a.pooled is None) == (b.pooled is None)
        assert a.pooled is None or torch.equal(a.pooled, b.pooled)


# --- resume -------------------------------------------------------------------------------------------


def test_requests_go_on_elsewhere_from_any_step_to_the_same_pixels(family: Subject) -> None:
    """A new engine after each step, in other company every time."""
    requests = [
        replace(own, num_inference_steps=3 + index) for index, own in enumerate(family.requests(31, 3))
    ]
    whole = family.draw(requests)
    outputs: dict[str, RequestOutput] = {}
    states: dict[str, Any] = {}
    for number in range(12):
        left = [own for own in requests if own.request_id not in outputs]
        if not left:
            break
        engine = Engine(family.model, EngineConfig(max_num_seqs=1 + number % 3))
        for own in left:
            engine.add_request(own, states.get(own.request_id))
        done = engine.step()
        states |= engine.snapshot().states()
        outputs |= {output.request_id: output for output in [*done, *engine.finish_decoding()]}
    for own in requests:
        output = outputs[own.request_id]
        assert output.status == "ok"
        assert output.metrics.steps_run == own.num_inference_steps
        assert np.array_equal(output.pixels, whole[own.request_id].pixels)  # type: ignore[arg-type]


# --- metrics ------------------------------------------------------------------------------------------


def test_metrics_say_what_was_done_and_what_was_cut(family: Subject) -> None:
    side = 2 * family.capabilities.size_multiple
    size = {"height": side, "width": side, "num_inference_steps": 2}
    off = SamplingParams(**size, true_cfg_scale=1.0, guidance_scale=1.0)
    on = replace(off, true_cfg_scale=3.0, guidance_scale=3.0, negative_prompt=LONG_PROMPT)
    requests = [family.resolve("off", "storm", off), family.resolve("on", LONG_PROMPT, on)]
    outputs = family.draw(requests)
    cut = tokens_beyond_limits(family, LONG_PROMPT)
    assert cut > 0
    image = (side // family.capabilities.patch_pixels) ** 2
    for name, branches, truncated in (("off", 1, 0), ("on", 2, 2 * cut)):
        metrics = outputs[name].metrics
        assert (metrics.cfg_active, metrics.steps_run) == (branches == 2, 2)
        assert metrics.truncated_tokens == truncated
        assert metrics.num_tokens == branches * (image + metrics.prompt_tokens)
        assert 0 < metrics.prompt_tokens <= sum(family.capabilities.prompt_limits.values())


def tokens_beyond_limits(family: Subject, text: str) -> int:
    """Counted with the pipeline's tokenizers, whose limits are those of its call."""
    pipeline = family.pipeline
    names = [name for name in ("tokenizer", "tokenizer_2", "tokenizer_3") if hasattr(pipeline, name)]
    taken = inspect.signature(pipeline.__call__).parameters
    longest = taken["max_sequence_length"].default if "max_sequence_length" in taken else 0
    total = 0
    for name in names:
        tokenizer = getattr(pipeline, name)
        limit = 77 if "CLIP" in type(tokenizer).__name__ else longest
        total += max(0, len(tokenizer(text, verbose=False)["input_ids"]) - limit)
    return total


# --- a whole job ---------------------------------------------------------------------------------------


def test_a_jobs_records_draw_its_images_again(family: Subject, tmp_path: Path) -> None:
    """Stopped in mid-denoise and gone on with; then every image by what is recorded of it, by diffusers."""
    rows = []
    for index, (prompt, params) in enumerate(family.rows(71, 4)):
        given = {name: value for name, value in asdict(params).items() if value is not None}
        rows.append({"id": f"r{index}", "prompt": prompt} | given)
    manifest, out = write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out"
    runner, stop = Runner(family.model), StopFlag()
    runner.on_step = at_step(2, lambda: stop.request("SIGTERM"))
    options = {"model": str(family.folder), "device": "cpu"}
    assert runner.run(manifest, out, stop=stop, **options).interrupted
    runner.on_step = lambda engine: None
    summary = runner.run(manifest, out, **options)
    assert (summary.num_ok, summary.num_failed) == (4, 0)
    metrics = {row["id"]: row for row in read_table(out, "metrics")}
    for image in read_table(out, "images"):
        params = SamplingParams(**{name: image[name] for name in RECORDED})
        expected = family.case.draw_alone(family.pipeline, image["prompt"], params)
        difference = np.abs(decode(image["image"]).astype(int) - expected.astype(int))
        assert difference.max() <= 1, image["id"]
        assert metrics[image["id"]]["steps_run"] == image["num_inference_steps"]
        has_negative = image["negative_prompt"] is not None or family.capabilities.guides_from_nothing
        active = image["true_cfg_scale"] > 1 and has_negative
        assert metrics[image["id"]]["cfg_active"] is active


# --- faults -------------------------------------------------------------------------------------------


def test_a_nan_stays_with_its_request(family: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = family.requests(41, 4)
    expected = family.draw(requests)
    bad = requests[1]
    prepare_latents = family.model.prepare_latents

    def poisoned(request: Request) -> torch.Tensor:
        latents = prepare_latents(request)
        return latents * float("nan") if request == bad else latents

    monkeypatch.setattr(family.model, "prepare_latents", poisoned)
    outputs = family.draw(requests)
    assert (outputs["1"].status, outputs["1"].error_type) == ("failed", "nan")
    assert_untouched(outputs, expected, but="1")


def test_a_prompt_that_cannot_be_encoded_fails_alone(
    family: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = family.requests(42, 4)
    expected = family.draw(requests)
    bad = family.model.tokenize(LONG_PROMPT)
    requests[2] = replace(requests[2], prompt=LONG_PROMPT)
    prepare_encode = family.model.prepare_encode

    def failing(prompts: Any) -> Any:
        if bad in prompts:
            raise ValueError("no such word")
        return prepare_encode(prompts)

    monkeypatch.setattr(family.model, "prepare_encode", failing)
    outputs = family.draw(requests)
    assert (outputs["2"].status, outputs["2"].error) == ("failed", "ValueError: no such word")
    assert_untouched(outputs, expected, but="2")


def assert_untouched(
    outputs: dict[str, RequestOutput], expected: dict[str, RequestOutput], *, but: str
) -> None:
    assert outputs.keys() == expected.keys()
    for name, output in outputs.items():
        if name != but:
            assert output.status == "ok"
            assert np.array_equal(output.pixels, expected[name].pixels)  # type: ignore[arg-type]


# --- capabilities -------------------------------------------------------------------------------------


def test_capabilities_are_those_of_the_checkpoint(family: Subject) -> None:
    capabilities, pipeline = family.capabilities, family.pipeline
    checkpoint = find_checkpoint(str(family.folder))
    assert checkpoint.capabilities == capabilities
    assert checkpoint.family.pipeline == type(pipeline).__name__
    assert checkpoint.family.batch_kind is capabilities.batch_kind
    multiple = capabilities.size_multiple
    assert multiple % pipeline.vae_scale_factor == 0
    assert capabilities.check_size(multiple, 3 * multiple) is None
    assert "multiple of" in (capabilities.check_size(multiple + 1, multiple) or "")
    assert capabilities.prompt_limits
    assert max(capabilities.prompt_limits.values()) == capabilities.max_prompt_tokens
    assert capabilities.forward_flops(200) > 2 * capabilities.forward_flops(100)  # attention is quadratic
    assert capabilities.step_bytes(0, 1) == capabilities.num_parameters


# --- other formats -------------------------------------------------------------------------------------


def test_bfloat16_draws_what_the_pipeline_draws_in_bfloat16(family: Subject) -> None:
    """Not to the level: ours keeps latents in float32 between steps. Mean difference over a picture."""
    model = load_model(EngineConfig(model=str(family.folder), device="cpu", dtype="bfloat16"))
    assert model.dtype == torch.bfloat16
    prompt, params = family.rows(61, 1)[0]
    request = family.resolve("a", prompt, params)
    (output,) = Engine(model, EngineConfig()).generate([request])
    expected = family.case.draw_alone(family.case.load(family.folder, torch.bfloat16), prompt, params)
    assert output.pixels is not None
    assert np.abs(output.pixels - expected.astype(float)).mean() < 6


def test_quantized_blocks_draw_nearly_the_same(family: Subject) -> None:
    requests = family.requests(51, 2)
    expected = family.draw(requests)
    pipeline = family.case.load(family.folder)
    model = model_from_pipeline(pipeline, find_checkpoint(str(family.folder)), CPU)
    apply_quantization(model, "int8")
    outputs = {own.request_id: own for own in Engine(model, EngineConfig()).generate(requests)}
    for name, output in outputs.items():
        assert output.pixels is not None
        difference = np.abs(output.pixels.astype(int) - expected[name].pixels.astype(int))  # type: ignore[union-attr]
        assert 0 < difference.mean() < 10
