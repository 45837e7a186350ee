"""Options: defaults of the contract, refusals with a suggestion, job files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pydantic
import pytest

from offline_diffusion.config import (
    LAYOUT_OPTIONS,
    PIXEL_OPTIONS,
    EngineConfig,
    JobConfig,
    make_engine_config,
    make_job_config,
)
from offline_diffusion.errors import ConfigError
from offline_diffusion.job_yaml import read_job_file


def job(**values: Any) -> JobConfig:
    return make_job_config({"manifests": ["a.jsonl"], "out": "out", **values})


def test_defaults() -> None:
    config = job()
    assert config.step_execution
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (128, None)
    assert (config.scheduling_policy, config.attention_backend, config.quantization) == (
        "pack",
        "auto",
        "none",
    )
    assert (config.seed, config.num_tasks, config.task_index) == (0, 1, 0)
    assert (config.image_format, config.on_bad_size) == ("png", "error")
    assert config.manifests == ("a.jsonl",)
    assert config.out == Path("out")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(90, 90), ("90", 90), ("1.5", 1.5), ("00:01:30", 90), ("36:00:00", 129_600), ("1-12:00:00", 129_600)],
)
def test_a_time_limit_is_seconds_or_a_clock(given: Any, seconds: float) -> None:
    assert job(time_limit=given).time_limit == seconds


@pytest.mark.parametrize("given", ["0", "-5", "00:00:00", "1:60:00", "12:30", "nan", "inf", "soon", True])
def test_other_time_limits_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="time_limit"):
        job(time_limit=given)


def test_a_checkpoint_interval_of_0_is_allowed_and_below_not() -> None:
    assert (job().checkpoint_interval, job(checkpoint_interval=0).checkpoint_interval) == (60, 0)
    for value in (-1, "nan", "inf"):
        with pytest.raises(ConfigError, match="checkpoint_interval"):
            job(checkpoint_interval=value)


def test_one_manifest_may_be_a_string() -> None:
    assert make_job_config({"manifests": "a.jsonl", "out": "o"}).manifests == ("a.jsonl",)


def test_none_means_not_given() -> None:
    assert job(max_num_seqs=None, model=None) == job()


def test_options_cannot_be_changed() -> None:
    with pytest.raises(pydantic.ValidationError):
        job().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_num_seqs", 0, "max_num_seqs: Input should be greater than or equal to 1, got 0"),
        ("max_num_batched_tokens", "many", "max_num_batched_tokens: Input should be a valid integer"),
        (
            "scheduling_policy",
            "best",
            "scheduling_policy: Input should be 'fifo', 'pack', 'shortest' or 'deadline'",
        ),
        ("quantization", "fp4", "quantization: Input should be 'none', 'fp8' or 'int8', got 'fp4'"),
        ("request_batch_max_wait_ms", -1, "request_batch_max_wait_ms: Input should be greater"),
        ("seed", 2**64, "seed: Input should be less than or equal to 18446744073709551615"),
        ("seed", -1, "seed: Input should be greater than or equal to 0"),
        ("seed", 1.5, "seed: Input should be a valid integer"),
        ("true_cfg_scale", float("nan"), "true_cfg_scale: Input should be a finite number"),
        ("shard_size", 0, "shard_size: Input should be greater"),
        (
            "max_failures",
            "some",
            "must be a count such as 10 or a share such as 5%, got 'some'",
        ),
        ("max_failures", "-1", "max_failures: must be a count"),
        ("max_failures", "500%", "max_failures: a share must be at most 100%, got '500%'"),
        ("manifests", [], "manifests: Tuple should have at least 1 item"),
    ],
)
def test_values_that_are_not_allowed_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_job_config({"manifests": ["a"], "out": "o"} | {name: value}, source="job.yaml")
    assert str(caught.value).startswith("job.yaml: ")
    assert message in str(caught.value)


def test_all_faults_are_told_at_once_in_the_users_spelling() -> None:
    with pytest.raises(ConfigError) as caught:
        make_job_config(
            {"out": "o", "max_num_seqs": 0, "seed": -1},
            spelling={"max_num_seqs": "--max-num-seqs", "seed": "--seed", "manifests": "MANIFEST"},
        )
    message = str(caught.value)
    assert all(part in message for part in ("--max-num-seqs: ", "--seed: ", "MANIFEST is required"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_num_seq", "did you mean 'max_num_seqs'?"),
        ("heigth", "did you mean 'height'?"),
        ("zzz", "known: "),
    ],
)
def test_unknown_options_get_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{name}'") as caught:
        job(**{name: 1})
    assert (caught.value.hint or "").startswith(hint)


def test_a_tasks_index_is_below_the_number_of_tasks() -> None:
    assert job(num_tasks=3, task_index=2).task_index == 2
    with pytest.raises(ConfigError, match="task_index: must be below the number of tasks, 3, got 3"):
        job(num_tasks=3, task_index=3)
    with pytest.raises(ConfigError, match="task_index: must be below the number of tasks, 1, got 1"):
        job(task_index=1)
    with pytest.raises(ConfigError, match=r"^options: num_tasks: [^;]*$"):
        job(num_tasks=0, task_index=0)


@pytest.mark.parametrize(
    ("image_format", "default", "lowest", "highest"),
    [("png", 1, 1, 9), ("jpeg", 95, 1, 100), ("webp", 1, 0, 6)],
)
def test_levels_are_those_of_the_format(image_format: str, default: int, lowest: int, highest: int) -> None:
    assert job(image_format=image_format).image_level == default
    for level in (lowest, highest):
        assert job(image_format=image_format, image_level=level).image_level == level
    for level in (lowest - 1, highest + 1):
        message = f"image_level: must be {lowest} to {highest} for {image_format}, got {level}"
        with pytest.raises(ConfigError, match=message):
            job(image_format=image_format, image_level=level)


def test_a_faulty_format_is_the_only_fault() -> None:
    with pytest.raises(ConfigError, match=r"^options: image_format: [^;]*$"):
        job(image_format="bmp", image_level=500)


TRUTH_VALUES = {
    "step_execution",
    "diffusion_streaming_output",
    "retry_failed",
    "allow_manifest_change",
    "profile",
}


@pytest.mark.parametrize("name", sorted(set(JobConfig.model_fields) - TRUTH_VALUES))
@pytest.mark.parametrize("value", [True, False])
def test_a_truth_value_is_no_number_or_name(name: str, value: bool) -> None:
    with pytest.raises(ConfigError, match=f"^options: {name}: must not be a truth value .* got {value}$"):
        job(**{name: value})


@pytest.mark.parametrize("word", ["yes", "on", "true", "no"])
def test_yaml_words_for_truth_are_no_limit(tmp_path: Path, word: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"manifests: a.jsonl\nout: o\nlimit: {word}\n")
    with pytest.raises(ConfigError, match="limit: must not be a truth value"):
        make_job_config(read_job_file(path))
    path.write_text(f"manifests: a.jsonl\nout: o\nretry_failed: {word}\n")
    assert make_job_config(read_job_file(path)).retry_failed is (word != "no")


@pytest.mark.parametrize("value", ["0", "10", "5%", "0.5%", "100%", 3])
def test_max_failures_is_a_count_or_a_share(value: str | int) -> None:
    assert job(max_failures=value).max_failures == str(value)


def test_an_engine_knows_no_option_of_a_job() -> None:
    assert make_engine_config({"max_num_seqs": 3}) == EngineConfig(max_num_seqs=3)
    with pytest.raises(ConfigError, match="unknown option 'shard_size'"):
        make_engine_config({"shard_size": 3})
    with pytest.raises(ConfigError, match=r"engine: max_num_seqs: .* got 0"):
        make_engine_config({"max_num_seqs": 0}, source="engine")


def test_options_that_a_resume_compares_exist() -> None:
    assert set(PIXEL_OPTIONS) | set(LAYOUT_OPTIONS) <= set(JobConfig.model_fields)
    assert not set(PIXEL_OPTIONS) & set(LAYOUT_OPTIONS)


def test_options_that_cannot_change_a_pixel_may_differ_on_resume() -> None:
    free = set(JobConfig.model_fields) - set(PIXEL_OPTIONS) - set(LAYOUT_OPTIONS)
    assert {"max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "step_execution"} <= free
    assert {"batching", "diffusion_streaming_output", "preview_interval"} <= free
    assert {"num_tasks", "task_index", "device", "max_failures", "retry_failed", "profile"} <= free


def test_a_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("manifests: [a.jsonl]\nout: o\nmax-num-seqs: 3\nseed: 18446744073709551615\n")
    values = read_job_file(path)
    assert values == {"manifests": ["a.jsonl"], "out": "o", "max_num_seqs": 3, "seed": 2**64 - 1}
    assert make_job_config(values).seed == 2**64 - 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "must hold a mapping of options, got list"),
        (b"", "must hold a mapping of options, got NoneType"),
        (b"a: [", "is not YAML"),
        (b"\xff\xfe\x00", "job.yaml"),
        (b"a: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_a_file_that_is_no_job_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_job_file(path)


def test_a_job_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        read_job_file(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limit: 1\nout: o\nlimit: 2\n", "'limit' is given twice, in lines 1 and 3"),
        ("max-num-seqs: 1\nmax_num_seqs: 1\n", "'max_num_seqs' is given twice, in lines 1 and 2"),
        ("map:\n  p: prompt\n  p: seed\n", "'p' is given twice, in lines 2 and 3"),
    ],
)
def test_a_job_file_that_says_something_twice(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_job_file(path)
    assert str(path) in caught.value.message


def test_columns_of_a_map_are_told_apart_by_every_character(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("map: {my-p: prompt, my_p: seed}\n")
    assert read_job_file(path) == {"map": {"my-p": "prompt", "my_p": "seed"}}


# --- job files made to do harm ----------------------------------------------------------------

_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghij")
)
"""A kilobyte that stands for ten billion values, and for as many characters when it is shown."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_LAUGHS + "out: *j\n", "holds over 262144 characters, its aliases resolved"),
        (f"a: &a {'x' * 50_000}\nout: [{', '.join(['*a'] * 9)}]\n", "holds over 262144 characters"),
        ("a: &a {x: 1}\n" + "<<: [" + "*a, " * 200_000 + "]\n", "holds over 262144 characters"),
        ("# " + "x" * 300_000, "holds over 262144 characters"),
        ("out: " + "[" * 100_000, "is nested in over 20 levels"),
        ("out: " + "{a: " * 50_000, "is nested in over 20 levels"),
        ("".join(f"{'- ' * n}x\n" for n in (50,)), "is nested in over 20 levels"),
        ("out: &a [*a]\n", "'a' holds itself"),
        ("out: *nobody\n", "is not YAML: found undefined alias"),
        ("seed: 2026-13-45\n", "is not YAML: month must be in 1..12"),
        ("seed: " + "9" * 5000 + "\n", "is not YAML"),
        ("seed: !!timestamp abc\n", "is not YAML"),
        ("seed: !!bool perhaps\n", "is not YAML"),
        ("? [a]\n: 1\n", "is not YAML"),
        ("a: 1\n---\nb: 2\n", "is not YAML: expected a single document"),
        ("1: 2\n", "unknown option '1'"),
        ("~: 2\n", "unknown option 'None'"),
        ("out: 2026-01-01\nmanifests: [2026-01-01]\n", "manifests.0: Input should be a valid string"),
        ("seed: .inf\ntrue_cfg_scale: .nan\n", "true_cfg_scale: Input should be a finite number"),
        ('out: "a\\0b"\n', "out: must not hold a NUL or half of a surrogate pair"),
        ('manifests: ["\\ud800"]\n', "manifests: must not hold a NUL or half of a surrogate pair"),
        ("seed: [" + "x, " * 5_000 + "]\n", "seed: Input should be a valid integer"),
    ],
)
def test_a_job_file_made_to_do_harm(tmp_path: Path, text: str, message: str) -> None:
    """Each is told in a short line, at once, and in little memory."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        make_job_config(read_job_file(path))
    assert message in caught.value.message
    assert len(caught.value.message) < 1200


def test_an_alias_of_a_value_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("base: &base {p: prompt}\nmap: *base\nheight: &side 512\nwidth: *side\n")
    assert read_job_file(path) == {
        "base": {"p": "prompt"},
        "map": {"p": "prompt"},
        "height": 512,
        "width": 512,
    }


def test_a_job_file_without_end() -> None:
    with pytest.raises(ConfigError, match="/dev/zero holds over 262144 characters"):
        read_job_file(Path("/dev/zero"))


@pytest.mark.parametrize("out", ["s3://bucket/set", "gs://bucket/a b/set/", "memory://x"])
def test_an_output_on_object_storage_has_a_working_folder_of_its_own(out: str, tmp_path: Path) -> None:
    config = make_job_config({"manifests": "a.jsonl", "out": out, "work_dir": tmp_path})
    assert config.out == out
    assert config.folder.parent == tmp_path
    other = make_job_config({"manifests": "a.jsonl", "out": f"{out}2", "work_dir": tmp_path})
    assert config.folder != other.folder
    assert make_job_config(config.model_dump(mode="json", exclude_none=True)) == config


def test_an_output_on_a_disk_is_its_own_working_folder() -> None:
    for out, folder in (
        ("out/a", Path("out/a")),
        ("file:///tmp/a", Path("/tmp/a")),
        ("s3:/x", Path("s3:/x")),
    ):
        config = make_job_config({"manifests": "a.jsonl", "out": out})
        assert config.out == config.folder == folder


def test_a_chain_of_urls_is_no_output() -> None:
    with pytest.raises(ConfigError, match=r"out: must be a folder or one URL"):
        make_job_config({"manifests": "a.jsonl", "out": "simplecache::s3://bucket/set"})
