"""File systems of a test's own, where it may mount some: as root, outside of most containers."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def mount(*arguments: str | Path) -> None:
    """Mounts a file system, or changes how it is mounted; skips the test where that is not allowed."""
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def memory_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """An empty file system of that size in a new folder."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder)
    try:
        yield
    finally:
        unmount(folder)


def make_image(path: Path, num_bytes: int) -> None:
    """An empty file system in a file, with a journal, to be mounted with ``-o loop``."""
    if (program := shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin")) is None:
        pytest.skip("no mkfs.ext4 here")
    with path.open("wb") as file:
        file.truncate(num_bytes)
    subprocess.run([program, "-q", str(path)], check=True)
