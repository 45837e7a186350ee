"""``offdiff models``."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from offline_diffusion.cli.main import main
from offline_diffusion.cli.run import command as run_command
from offline_diffusion.config import EngineConfig
from offline_diffusion.models.capabilities import BatchKind
from offline_diffusion.models.modes import execution_mode


def test_json_says_what_the_checkpoints_own_files_say(tiny_model: Path) -> None:
    result = CliRunner().invoke(main, ["models", "--model", str(tiny_model), "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    index = json.loads((tiny_model / "model_index.json").read_text())
    transformer = json.loads((tiny_model / "transformer/config.json").read_text())
    capabilities = report["capabilities"]
    assert capabilities["pipeline"] == index["_class_name"]
    assert capabilities["batch_kind"] == "packed"
    assert capabilities["num_layers"] == transformer["num_layers"]
    assert [family["name"] for family in report["families"]] == ["qwen_image", "flux", "sd3", "sdxl"]
    assert list(report["built_in"]) == ["shapes", "tiny"]


def test_every_mode_of_every_family_is_there(tiny_model: Path) -> None:
    report = json.loads(CliRunner().invoke(main, ["models", "--model", str(tiny_model), "--json"]).stdout)
    modes = {"serial", "request_batch", "single_step", "same_shape", "packed", "previews"}
    assert set(report["execution_modes"]) == modes
    *packed, stacked = (family["modes"] for family in report["families"])
    assert packed == 3 * [dict.fromkeys(modes)]  # None: nothing speaks against it
    assert {mode for mode, fault in stacked.items() if fault} == {"packed", "previews"}


def test_the_options_of_a_mode_are_options(tiny_model: Path) -> None:
    """As they stand in the table, they make the mode."""
    report = json.loads(CliRunner().invoke(main, ["models", "--model", str(tiny_model), "--json"]).stdout)
    assert report["execution_modes"].pop("previews") == "--diffusion-streaming-output"
    for mode, options in report["execution_modes"].items():
        arguments = ["a.txt", *options.replace(" N", " 4").split()]
        with run_command.make_context("run", arguments) as ctx:
            given = {name: value for name, value in ctx.params.items() if name in EngineConfig.model_fields}
        config = EngineConfig(**{name: value for name, value in given.items() if value is not None})
        assert execution_mode(config, BatchKind.PACKED).value == mode


def test_every_backend_works_or_says_why_not(tiny_model: Path) -> None:
    result = CliRunner().invoke(main, ["models", "--model", str(tiny_model), "--json"])
    statuses = {status["name"]: status for status in json.loads(result.stdout)["attention_backends"]}
    assert set(statuses) == {"fa3", "flash_attn", "torch_varlen", "sdpa"}
    assert statuses["sdpa"]["works"]
    assert all(status["works"] or (status["why_not"] and status["hint"]) for status in statuses.values())


def test_text_for_people(tiny_model: Path) -> None:
    result = CliRunner().invoke(main, ["models", "--model", str(tiny_model)])
    assert result.exit_code == 0
    assert "QwenImagePipeline" in result.stdout
    assert "sdpa          works" in result.stdout
    assert "qwen_image         yes     yes            yes          yes         yes     yes" in result.stdout
    assert result.stderr == ""


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["models", "--model", str(tmp_path)])
    assert result.exit_code == 1
    assert "model_index.json" in result.stderr
    assert "\nhint: " in result.stderr
