"""Folders and special files made to trap a reader, and ids that look like paths."""

from __future__ import annotations

import glob
import os
import socket
from pathlib import Path

import pytest
from manifest_fakes import good_rows, items, opened, prompts, write_jsonl

from offline_diffusion.errors import ManifestError


def test_a_link_that_leads_back_is_followed_once(tmp_path: Path) -> None:
    """Would catch walking on until the system counts too many links, with every file 40 times."""
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "sub" / "b.jsonl", [{"prompt": "b"}])
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    (tmp_path / "here").symlink_to(tmp_path)
    manifest = opened(tmp_path)
    assert [row.prompt for row in manifest.read()] == ["a", "b"]  # type: ignore[union-attr]
    assert [note for note in manifest.notes if "here: it is read already" in note]


def test_folders_linked_many_times_over_end(tmp_path: Path) -> None:
    """Thirty folders with two links each to the next: a billion paths, one file."""
    for level in range(30):
        (tmp_path / f"d{level}").mkdir()
    for level in range(29):
        for name in ("x", "y"):
            (tmp_path / f"d{level}" / name).symlink_to(tmp_path / f"d{level + 1}")
    write_jsonl(tmp_path / "d29" / "a.jsonl", [{"prompt": "a"}])
    assert prompts(tmp_path / "d0") == ["a"]


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "**", "sub/**/*.jsonl"])
def test_a_glob_over_links_in_a_loop_ends(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    write_jsonl(tmp_path / "sub" / "deep" / "b.jsonl", [{"prompt": "b"}])
    for name in ("x", "y", "z"):
        (tmp_path / "sub" / "deep" / name).symlink_to(tmp_path / "sub")
    assert prompts(tmp_path / pattern) == ["b"]


def test_a_recursive_glob_finds_what_the_standard_library_finds(tmp_path: Path) -> None:
    for name in (
        "a.jsonl",
        "s/b.jsonl",
        "s/t/c.jsonl",
        "s/t/d.txt",
        ".h/e.jsonl",
        "s/.f.jsonl",
        "u/t/g.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / name, [{"prompt": name}])
    for pattern in (
        "**/*.jsonl",
        "s/**/*.jsonl",
        "**/t/*.jsonl",
        "*/**/[ab]*",
        "**/t/**/*.jsonl",
        "**/.h/*.jsonl",
    ):
        expected = sorted(
            path for path in glob.glob(f"{tmp_path}/{pattern}", recursive=True) if os.path.isfile(path)
        )
        assert [reader.name for reader in opened(tmp_path / pattern).files] == expected


def test_pipes_sockets_and_devices_in_a_folder_are_left_out(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    os.mkfifo(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "d.jsonl"))
        assert prompts(tmp_path) == ["a"]
        assert prompts(tmp_path / "*.jsonl") == ["a"]


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(name: str) -> None:
    """Would catch copying /dev/zero until the disk is full."""
    with pytest.raises(ManifestError, match=rf"{name}: is a device or a socket\nhint: name a file"):
        opened(name)


def test_a_link_to_nowhere_is_told(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(ManifestError, match=r"b\.jsonl: cannot be read"):
        opened(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_told(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(ManifestError, match="closed: cannot be listed"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "name", ["a\0b", "x" * 5000, "/" * 5000 + "x", "\ud800", "~nobody-here/x", "**" * 50]
)
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ManifestError):
        opened(name)


def test_prompt_files_of_any_size_cost_their_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with (tmp_path / "b.txt").open("wb") as stream:
        stream.truncate(3 * 2**30)  # a hole: it takes no room
    first, second = items(tmp_path)
    assert first.prompt == "a"  # type: ignore[union-attr]
    assert "at most 1048576 are allowed" in second.reason  # type: ignore[union-attr]


def test_an_id_is_text_and_nothing_else(tmp_path: Path) -> None:
    ids = [
        "../../etc/passwd",
        "/etc/passwd",
        "C:\\x",
        "a/b/../c",
        ".",
        "..",
        "~",
        "$(touch x)",
        "😀",
        "-rf",
        "con",
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"id": name, "prompt": "a"} for name in ids])
    assert [row.id for row in good_rows(path)] == ids
