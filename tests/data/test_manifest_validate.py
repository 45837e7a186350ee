"""Every fault of every row."""

from __future__ import annotations

from pathlib import Path

from manifest_fakes import opened, write_jsonl

from offline_diffusion.data.rows import RowDefaults
from offline_diffusion.data.validate import validate
from offline_diffusion.models.capabilities import Capabilities

MODEL = Capabilities(family="toy", pipeline="Toy", size_multiple=16, max_size=2048)

ROWS = [
    {"prompt": "a", "id": "x", "n": 2},
    {"prompt": "", "seed": "abc", "id": "y"},
    {"prompt": "b", "width": 100},
    {"prompt": "c", "id": "x", "n": 3},
    {"prompt": "d", "height": 4096},
    {"prompt": "e", "lora": "style"},
    {"prompt": "f", "width": 512, "height": 768},
    {"prompt": "g", "width": 100, "id": "x"},
]


def test_faults_of_a_row_come_together_and_repeated_ids_last(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    found = validate(opened(path), capabilities=None, defaults=RowDefaults())
    assert [(fault.row, fault.column) for fault in found] == [
        (1, "prompt"),
        (1, "seed"),
        (3, "id"),
        (7, "id"),
    ]
    assert (found.num_rows, found.num_faulty_rows, found.num_images) == (8, 3, 6)


def test_with_a_model_what_it_cannot_draw_is_a_fault_too(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    found = validate(opened(path), capabilities=MODEL, defaults=RowDefaults())
    assert [(fault.row, fault.column) for fault in found] == [
        (1, "prompt"),
        (1, "seed"),
        (2, "width"),
        (4, "height"),
        (5, "lora"),
        (7, "width"),
        (3, "id"),
        (7, "id"),
    ]
    assert (found.num_rows, found.num_faulty_rows, found.num_images) == (8, 6, 3)


def test_the_job_s_size_rule_counts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    found = validate(opened(path), capabilities=MODEL, defaults=RowDefaults(on_bad_size="round"))
    assert (2, "width") not in [(fault.row, fault.column) for fault in found]


def test_faults_are_given_while_the_files_are_read(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": ""}] + [{"prompt": "a"}] * 5000)
    found = validate(opened(path), capabilities=MODEL, defaults=RowDefaults())
    assert next(iter(found)).row == 0
    assert found.num_rows == 1
    assert list(found) == []
    assert (found.num_rows, found.num_images, found.num_faulty_rows) == (5001, 5000, 1)
