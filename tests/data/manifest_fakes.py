"""Small helpers for tests of manifests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offline_diffusion.data.manifest import Manifest, open_manifest
from offline_diffusion.data.rows import ManifestRow, RowFault

ROOT = Path(__file__).resolve().parents[2]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def opened(*sources: str | Path, **options: Any) -> Manifest:
    return open_manifest([str(source) for source in sources], **options)


def items(*sources: str | Path, **options: Any) -> list[ManifestRow | RowFault]:
    return list(opened(*sources, **options).read())


def good_rows(*sources: str | Path, **options: Any) -> list[ManifestRow]:
    found = items(*sources, **options)
    assert all(isinstance(item, ManifestRow) for item in found), found
    return [item for item in found if isinstance(item, ManifestRow)]


def prompts(*sources: str | Path, **options: Any) -> list[str]:
    return [row.prompt for row in good_rows(*sources, **options)]


def only_fault(*sources: str | Path, **options: Any) -> RowFault:
    """The single fault of a manifest whose other rows are good."""
    [fault] = [item for item in items(*sources, **options) if isinstance(item, RowFault)]
    return fault


def prompt_set(name: str) -> Path:
    """A real prompt set that lies beside the project; the test is skipped without it."""
    shared = Path(os.environ.get("OFFDIFF_SHARED", ROOT.parent / "shared"))
    path = shared / "prompts" / name
    if not path.exists():
        pytest.skip(f"needs {path}")
    return path


_SCAN = """
import sys
from offline_diffusion.data.manifest import open_manifest
from offline_diffusion.data.scan import scan
index = scan(open_manifest([sys.argv[1]]))
assert index.num_rows == int(sys.argv[2]), index
# Not getrusage: its peak is inherited from the process that started this one.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def scan_peak_mib(path: Path, num_rows: int) -> int:
    """Peak memory of a process of its own that scans ``path``."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    command = [sys.executable, "-c", _SCAN, str(path), str(num_rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout) // 1024
