"""CSV and TSV."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifest_fakes import good_rows, items, only_fault, opened, prompt_set

from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.errors import ManifestError


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".csv", ";"), (".tsv", "|")]
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_delimiters_and_endings(tmp_path: Path, suffix: str, delimiter: str, ending: str) -> None:
    table = [["prompt", "seed", "note"], ["a cat", "7", "x"], ["a dog", "", ""]]
    text = ending.join(delimiter.join(row) for row in table)
    first, second = good_rows(write(tmp_path / f"rows{suffix}", text + ending))
    assert (first.prompt, first.params.seed, first.carried) == ("a cat", 7, {"note": "x"})
    assert (second.prompt, second.params.seed, second.carried) == ("a dog", None, {"note": None})
    assert (first.line, second.line) == (2, 3)


def test_every_carried_cell_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", "prompt,score\na,1\nb,2.5\n")
    assert [row.carried for row in good_rows(path)] == [{"score": "1"}, {"score": "2.5"}]


def test_bom_spaces_in_the_header_and_compression(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress("\ufeffPrompt, seed\r\na, 3\r\n".encode()))
    [row] = good_rows(path)
    assert (row.prompt, row.params.seed) == ("a", 3)


def test_quoted_cells_with_delimiters_quotes_and_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    cells = ["a, b", 'say "hi"', "two\nlines", '"', "two\r\nlines", "", "plain"]
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["prompt", "note"])
        writer.writerows([f"prompt {index}", cell] for index, cell in enumerate(cells))
    found = good_rows(path)
    assert [row.carried["note"] for row in found] == [cell or None for cell in cells]
    assert [row.line for row in found] == [2, 3, 4, 6, 7, 9, 10]


@given(
    st.lists(st.lists(st.text("ab,\"'\n\t ;é", min_size=1), min_size=2, max_size=2), min_size=1, max_size=6)
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_the_csv_module_writes_is_read_back(tmp_path: Path, rows: list[list[str]]) -> None:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([["prompt", "note"], *rows])
    path = write(tmp_path / "rows.csv", buffer.getvalue())
    found = items(path)
    assert len(found) == len(rows)
    for item, (prompt, note) in zip(found, rows, strict=True):
        if prompt.strip():
            assert isinstance(item, ManifestRow)
            assert (item.prompt, item.carried["note"]) == (prompt, note)
        else:
            assert isinstance(item, RowFault)


def test_ragged_lines_cost_only_their_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", "prompt,seed\na,1\nb\n\nc,2,3\nd,4\n")
    found = items(path)
    assert [isinstance(item, RowFault) for item in found] == [False, True, True, False]
    assert [item.line for item in found] == [2, 3, 5, 6]
    assert isinstance(found[2], RowFault)
    assert "3 cells where the header has 2" in found[2].reason


def test_a_stray_quote_in_csv_costs_only_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", 'prompt,seed\n"open,1\nb,2\n"x" y,3\nc,4\n')
    found = items(path)
    assert [isinstance(item, RowFault) for item in found] == [True, False, True, False]
    assert [item.line for item in found] == [2, 3, 4, 5]


def test_a_tsv_without_quoting_keeps_its_quotes(tmp_path: Path) -> None:
    lines = ['"G I G" in paint\tx', 'a "b" c\ty', '"open\tz', '"whole"\tw', '"tab\tinside"\tv']
    path = write(tmp_path / "rows.tsv", "Prompt\tCategory\n" + "\n".join(lines) + "\n")
    found = good_rows(path)
    assert [(row.prompt, row.carried["Category"]) for row in found] == [
        ('"G I G" in paint', "x"),
        ('a "b" c', "y"),
        ('"open', "z"),
        ("whole", "w"),
        ("tab\tinside", "v"),
    ]


def test_a_line_that_is_not_utf8_costs_only_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'prompt,note\na,b\ncaf\xe9,x\n"caf\xe9",y\nc,d\n')
    assert [isinstance(item, RowFault) for item in items(path)] == [False, True, True, False]


def test_a_long_cell(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", 'prompt,note\n"a","' + "x" * 300_000 + '"\n')
    [row] = good_rows(path)
    assert len(row.carried["note"]) == 300_000


def test_null_and_blank_prompts(tmp_path: Path) -> None:
    assert only_fault(write(tmp_path / "a.csv", "prompt,seed\n,1\nx,2\n")).column == "prompt"
    assert only_fault(write(tmp_path / "b.csv", "prompt,seed\n  ,1\nx,2\n")).column == "prompt"


def test_an_empty_negative_prompt_is_null_and_a_blank_one_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", "prompt,negative_prompt\na,\nb, \n")
    assert [row.params.negative_prompt for row in good_rows(path)] == [None, " "]


def test_faults_of_the_header(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="'seed' occurs twice"):
        opened(write(tmp_path / "twice.csv", "prompt,seed,seed\na,1,2\n"))
    with pytest.raises(ManifestError, match=r"its columns are: promt, seed\nhint: did you mean"):
        opened(write(tmp_path / "typo.csv", "promt,seed\na,1\n"))
    with pytest.raises(ManifestError, match="holds no rows"):
        opened(write(tmp_path / "empty.csv", "prompt,seed\n"))


def test_a_nameless_column_gets_a_name(tmp_path: Path) -> None:
    [row] = good_rows(write(tmp_path / "rows.csv", ",prompt\n0,a\n"))
    assert row.carried == {"column_1": "0"}


def test_a_table_of_one_column(tmp_path: Path) -> None:
    assert [r.prompt for r in good_rows(write(tmp_path / "rows.csv", "prompt\na\n\nb\n"))] == ["a", "b"]


def test_a_tsv_with_another_suffix_is_known_by_its_header(tmp_path: Path) -> None:
    for name in ("rows.txt", "rows", "rows.dat"):
        [row] = good_rows(write(tmp_path / name, "Prompt\tCategory\na cat\tanimal\n"))
        assert (row.prompt, row.carried) == ("a cat", {"Category": "animal"})


def test_ranges_skip_over_quoted_records(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", 'prompt,note\n"a\nb",1\nc,2\n"d\n\ne",3\nf,4\n')
    found = [item for item in opened(path).read([range(2, 4)]) if isinstance(item, ManifestRow)]
    assert [(row.row, row.line, row.prompt) for row in found] == [(2, 5, "d\n\ne"), (3, 8, "f")]


def test_partiprompts_as_it_is() -> None:
    path = prompt_set("PartiPrompts.tsv")
    with path.open(newline="", encoding="utf-8") as stream:
        expected = list(csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    header, *rows = expected
    found = good_rows(path)
    assert [[row.prompt, *(cell or "" for cell in row.carried.values())] for row in found] == rows
    assert list(found[0].carried) == header[1:]
    assert opened(path).notes == ["column 'Prompt' is read as prompt"]
