"""Manifests with one of every fault: every good row is drawn, every bad one is set aside with its reason."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from job_fakes import Runner, decode, pixels_by_key, read_table, write_jsonl

from offline_diffusion.cli.main import main
from offline_diffusion.data.verify import verify
from offline_diffusion.errors import ManifestError

BASE = {"prompt": "a red cup", "height": 32, "width": 32, "num_inference_steps": 2}
MISSING = object()


def fault(column: str, value: Any, *words: str, shown: str | None = None) -> tuple[Any, ...]:
    """A row whose ``column`` holds ``value``, and what its failure must show and say."""
    return (
        column,
        value,
        words,
        shown if shown is not None else value if isinstance(value, str) else json.dumps(value),
    )


ANY_TYPE = [
    fault("prompt", "  \t ", "blank", shown="  \\t "),
    fault("height", "abc", "integer"),
    fault("height", -16, "integer", "from 1"),
    fault("width", 50, "multiple of 16"),
    fault("width", 2**31, "integer"),
    fault("num_inference_steps", 0, "integer", "from 1"),
    fault("num_inference_steps", 1.5, "integer"),
    fault("num_inference_steps", "1e99", "integer"),
    fault("true_cfg_scale", -1, "at least 0"),
    fault("true_cfg_scale", "nan", "finite"),
    fault("guidance_scale", "inf", "finite"),
    fault("seed", 2**64, "integer", str(2**64 - 1)),
    fault("seed", -1, "integer", "from 0"),
    fault("num_images_per_prompt", 0, "integer", "from 1"),
    fault("lora", "style", "lora", "not supported"),
]
ONLY_TYPED = [
    fault("prompt", None, "no prompt", shown=""),
    fault("prompt", MISSING, "no prompt", shown=""),
    fault("prompt", 5, "text"),
    fault("prompt", ["a", "b"], "text"),
    fault("prompt", {"a": 1}, "text"),
    fault("prompt", True, "text"),
    fault("height", True, "integer"),
    fault("height", [64], "integer"),
    fault("id", 1.5, "integer"),
    fault("id", "a\nb", "control", shown="a\\nb"),
    fault("negative_prompt", 5, "text"),
    fault("seed", 2.0**60, "2**53"),
]
BROKEN_LINES = {
    '{"prompt": "half': "not valid JSON",
    '{"prompt": "a", "prompt": "b"}': "twice",
    '["a list"]': "object",
    '"text"': "object",
    '{"prompt": "a", "seed": NaN}': "NaN",
    '{"prompt": "\\ud800"}': "surrogate",
}


def rows_with_faults(faults: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """A good row, then each faulty one followed by a good one; the last repeats an id."""
    rows = [{"id": "good-0", **BASE}]
    for number, (column, value, _, _) in enumerate(faults):
        row = {"id": f"bad-{number}", **BASE, column: value}
        rows += [
            {name: cell for name, cell in row.items() if cell is not MISSING},
            {"id": f"good-{number + 1}", **BASE},
        ]
    return [*rows, {"id": "good-0", **BASE}]


def invoke(manifest: Path, out: Path, *options: str, runner: Runner | None = None) -> Result:
    command = ["run", str(manifest), "--model=tiny", "--out", str(out), *options]
    return CliRunner().invoke(main, command, obj=(runner or Runner()).run_task)


def check(out: Path, manifest: Path, faults: list[tuple[Any, ...]], first_line: int) -> None:
    """Every good row is drawn, every faulty one is told with file, row, column, value and reason."""
    images, failures = read_table(out, "images"), read_table(out, "failures")
    assert [row["id"] for row in images] == [f"good-{number}" for number in range(len(faults) + 1)]
    assert [row["row"] for row in images] == list(range(0, 2 * len(faults) + 1, 2))
    *others, duplicate = failures
    for number, ((column, _, words, shown), row) in enumerate(zip(faults, others, strict=True)):
        told = (row["row"], row["file"], row["line"], row["column"], row["value"])
        assert told == (2 * number + 1, str(manifest), 2 * number + 1 + first_line, column, shown), row
        assert all(word in row["reason"] for word in words), row
        assert (row["error_type"], row["image_index"]) == ("invalid_row", None)
    assert (duplicate["id"], duplicate["column"], duplicate["value"]) == ("good-0", "id", "good-0")
    assert "same id" in duplicate["reason"]
    metrics = read_table(out, "metrics")
    assert [row["row"] for row in metrics] == list(range(2 * len(faults) + 2))
    assert [row["status"] for row in metrics] == ["ok", "failed"] * (len(faults) + 1)
    assert verify(out).problems == []


def check_told(result: Result, num_good: int, num_bad: int) -> None:
    assert result.exit_code == 3, result.output
    assert "Traceback" not in result.output
    assert f"done: {num_good} of {num_good} images" in result.stderr
    assert f"{num_bad} rows quarantined" in result.stderr


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> Path:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Columns with a faulty text are text as a whole, as a careless export would have them."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    arrays = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        mixed = len(kinds) > 1 or any(isinstance(value, int) and value >= 2**63 for value in values)
        arrays[name] = pa.array(
            [None if value is None else str(value) for value in values] if mixed else values
        )
    pq.write_table(pa.table(arrays), path)
    return path


def test_jsonl(tmp_path: Path) -> None:
    faults = ANY_TYPE + ONLY_TYPED
    manifest = write_jsonl(tmp_path / "m.jsonl", rows_with_faults(faults))
    result = invoke(manifest, tmp_path / "out", "--shard-size", "9")
    check_told(result, len(faults) + 1, len(faults) + 1)
    check(tmp_path / "out", manifest, faults, first_line=1)


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_csv_and_tsv(tmp_path: Path, delimiter: str) -> None:
    # In text every number is shown as it is written.
    faults = [(column, value, words, str(value).replace("\t", "\\t")) for column, value, words, _ in ANY_TYPE]
    faults[0] = fault("prompt", "   ", "blank")
    name = "m.csv" if delimiter == "," else "m.tsv"
    manifest = write_csv(tmp_path / name, rows_with_faults(faults), delimiter)
    result = invoke(manifest, tmp_path / "out")
    check_told(result, len(faults) + 1, len(faults) + 1)
    check(tmp_path / "out", manifest, faults, first_line=2)


def test_parquet(tmp_path: Path) -> None:
    faults = [(column, value, words, str(value).replace("\t", "\\t")) for column, value, words, _ in ANY_TYPE]
    rows = rows_with_faults([*faults, fault("prompt", None, "no prompt", shown="")])
    manifest = write_parquet(tmp_path / "m.parquet", rows)
    result = invoke(manifest, tmp_path / "out", "--shard-size", "4")
    check_told(result, len(faults) + 2, len(faults) + 2)
    check(tmp_path / "out", manifest, [*faults, fault("prompt", None, "no prompt", shown="")], first_line=1)


def test_broken_lines(tmp_path: Path) -> None:
    lines: list[Any] = [BASE]
    for line in BROKEN_LINES:
        lines += [line, BASE]
    manifest = write_jsonl(tmp_path / "m.jsonl", lines)
    with manifest.open("ab") as stream:
        stream.write(b'{"prompt": "\xff"}\n')
    result = invoke(manifest, tmp_path / "out")
    check_told(result, len(BROKEN_LINES) + 1, len(BROKEN_LINES) + 1)
    failures = read_table(tmp_path / "out", "failures")
    for number, (row, word) in enumerate(zip(failures, [*BROKEN_LINES.values(), "UTF-8"], strict=True)):
        assert word in row["reason"], row
        assert (row["row"], row["line"], row["id"]) == (
            2 * number + 1,
            2 * number + 2,
            f"{2 * number + 1:08d}",
        )
    assert datasets.load_dataset(str(tmp_path / "out"), "failures", split="train").num_rows == len(failures)


def test_csv_rows_of_another_width(tmp_path: Path) -> None:
    manifest = tmp_path / "m.csv"
    manifest.write_text('id,prompt\na,a cup\nb,a,b,c\nc\nd,"open\ne,"a" b\nf,a sea\n', encoding="utf-8")
    result = invoke(
        manifest, tmp_path / "out", "--height", "32", "--width", "32", "--num-inference-steps", "2"
    )
    assert result.exit_code == 3
    assert "Traceback" not in result.output
    assert [row["id"] for row in read_table(tmp_path / "out", "images")] == ["a", "f"]
    failures = read_table(tmp_path / "out", "failures")
    assert [row["line"] for row in failures] == [3, 4, 5, 6]
    assert all(row["reason"] for row in failures)


def test_a_job_of_faulty_rows_only_still_opens(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", [BASE | {"prompt": " "}] * 5)
    result = invoke(manifest, tmp_path / "out", "--shard-size", "2")
    assert result.exit_code == 3
    assert "5 rows quarantined" in result.stderr
    assert len(read_table(tmp_path / "out", "failures")) == 5
    assert verify(tmp_path / "out").problems == []
    metrics = datasets.load_dataset(str(tmp_path / "out"), "metrics", split="train")
    assert set(metrics["status"]) == {"failed"}
    again = Runner()
    assert invoke(manifest, tmp_path / "out", "--shard-size", "2", runner=again).exit_code == 3
    assert again.engine is None


@pytest.mark.parametrize(
    ("how", "height", "width", "drawn"),
    [("round", 48, 64, (48, 64)), ("crop", 42, 57, (48, 64))],
)
def test_sizes_the_model_cannot_draw(
    tmp_path: Path, how: str, height: int, width: int, drawn: tuple[int, int]
) -> None:
    """42 x 57: the nearest multiples of 16 and those that hold it are 48 x 64 both ways."""
    row = BASE | {"height": 42, "width": 57, "seed": 3}
    manifest = write_jsonl(tmp_path / "m.jsonl", [row, row | {"height": drawn[0], "width": drawn[1]}])
    summary = Runner().run(manifest, tmp_path / "out", on_bad_size=how)
    assert (summary.num_ok, summary.num_quarantined_rows) == (2, 0)
    fitted, exact = read_table(tmp_path / "out", "images")
    asked = read_table(tmp_path / "out", "metrics")[0]
    assert (asked["requested_height"], asked["requested_width"]) == (42, 57)
    assert (fitted["height"], fitted["width"]) == (height, width)
    whole, part = decode(exact["image"]), decode(fitted["image"])
    top, left = (drawn[0] - height) // 2, (drawn[1] - width) // 2
    assert (part == whole[top : top + height, left : left + width]).all()
    pixels_by_key(tmp_path / "out")
    assert verify(tmp_path / "out").problems == []


def test_bad_sizes_are_faults_by_default(tmp_path: Path) -> None:
    rows = [BASE | {"height": 42}, BASE, BASE | {"width": 2**30}]
    summary = Runner().run(write_jsonl(tmp_path / "m.jsonl", rows), tmp_path / "out")
    assert (summary.num_ok, summary.num_images, summary.num_quarantined_rows) == (1, 1, 2)
    small, large = read_table(tmp_path / "out", "failures")
    assert (small["column"], small["value"]) == ("height", "42")
    assert "multiple of 16" in small["reason"]
    assert (large["column"], large["value"]) == ("width", str(2**30))
    assert "at most" in large["reason"]


def test_a_manifest_that_shrinks_while_the_job_runs(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", [BASE] * 40)
    runner = Runner()
    make_engine = runner.make_engine

    def cut(*args: Any) -> Any:
        write_jsonl(manifest, [BASE] * 10)
        return make_engine(*args)

    runner.make_engine = cut  # type: ignore[method-assign]
    with pytest.raises(ManifestError, match="has changed since this run began"):
        runner.run(manifest, tmp_path / "out", shard_size=4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ("m.jsonl", "is empty")),
        ("\n\n", ("m.jsonl", "is empty")),
        ('{"colour": "red"}\n', ("no prompt column", "colour", "--map")),
        ('{"propmt": "a cup"}\n', ("no prompt column", "did you mean --map propmt=prompt?")),
        ("not json\n" * 3, ("m.jsonl", "line 1")),
    ],
)
def test_faults_of_a_whole_file_stop_before_any_work(
    tmp_path: Path, content: str, words: tuple[str, ...]
) -> None:
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(content, encoding="utf-8")
    runner = Runner()
    result = invoke(manifest, tmp_path / "out", runner=runner)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert all(word in result.stderr for word in words), result.stderr
    assert runner.engine is None
    assert not (tmp_path / "out").exists()
