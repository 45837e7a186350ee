"""``offdiff validate``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offline_diffusion.cli.main import main

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "a cup"},
    {"id": "b", "prompt": "  ", "seed": -1},
    {"id": "c", "prompt": "a hat", "height": 1.5},
    {"id": "a", "prompt": "a cup again"},
    {"id": "e", "prompt": "a bad size", "height": 50, "width": 64},
]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def invoke(*args: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["validate", *map(str, args)], input=stdin)


def test_each_fault_has_file_line_column_and_value(manifest: Path) -> None:
    result = invoke(manifest, "--json")
    assert result.exit_code == 3
    faults = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(fault["line"], fault["row"], fault["column"]) for fault in faults] == [
        (2, 1, "prompt"), (2, 1, "seed"), (3, 2, "height"), (5, 4, "height"), (4, 3, "id"),
    ]  # fmt: skip
    assert {fault["file"] for fault in faults} == {str(manifest)}
    assert faults[1]["value"] == "-1"
    assert "5 faults in 4 rows" in result.stderr
    assert set(faults[0]) == {"file", "line", "row", "id", "column", "value", "reason"}


def test_text_is_a_fault_a_line(manifest: Path) -> None:
    result = invoke(manifest)
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{manifest}:{line}" for line in (2, 2, 3, 5, 4)]
    assert ": seed=-1: " in lines[1]


@pytest.mark.parametrize("named", [False, True])
def test_what_the_model_cannot_draw_is_a_fault(tmp_path: Path, tiny_model: Path, named: bool) -> None:
    path = tmp_path / "m.jsonl"
    rows = [{"prompt": "a"}, {"prompt": "b", "height": 50}, {"prompt": "c", "lora": "x"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = ("--model", tiny_model) if named else ()
    result = invoke(path, *model, "--json")
    faults = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(fault["line"], fault["column"]) for fault in faults] == [(2, "height"), (3, "lora")]
    rounded = invoke(path, *model, "--json", "--on-bad-size", "round")
    assert [json.loads(line)["column"] for line in rounded.stdout.splitlines()] == ["lora"]


def test_good_rows_exit_with_0(manifest: Path) -> None:
    result = invoke(manifest, "--limit", "1")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "1 row, 1 image: no faults" in result.stderr


def test_standard_input(manifest: Path) -> None:
    result = invoke("-", stdin=manifest.read_text())
    assert result.exit_code == 3
    assert len(result.stdout.splitlines()) == 5


def test_mapped_columns(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"beschreibung": "eine Tasse"}\n')
    assert invoke(path, "--map", "beschreibung=prompt").exit_code == 0
    without = invoke(path)
    assert without.exit_code == 1
    assert "hint: " in without.stderr


def test_a_column_mapped_to_nothing_is_no_option(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"prompt": "a", "n": "many"}\n')
    assert invoke(path).exit_code == 3
    assert invoke(path, "--map", "n=").exit_code == 0


@pytest.mark.parametrize("content", [None, "", "\x00\x01\x02"])
def test_files_that_cannot_be_used_exit_with_1_and_name_the_file(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "m.jsonl"
    if content is not None:
        path.write_text(content)
    result = invoke(path)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "m.jsonl" in result.stderr
    assert result.stdout == ""


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"prompt": "a"}\n' + '{"prompt": ""}\n' * 20_000)
    command = f"{sys.executable} -m offline_diffusion.cli.main validate {path} | head -1"
    done = subprocess.run(command, shell=True, check=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_validate_loads_no_torch(manifest: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from offline_diffusion.cli.main import main\n"
        f"code = main(['validate', {str(manifest)!r}], standalone_mode=False)\n"
        "print(code, *sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))\n"
    )
    # An empty cache: no model is made.
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ
    )
    assert done.stdout.splitlines()[-1] == "3"
    assert not (tmp_path / "cache").exists()
