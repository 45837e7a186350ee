"""One cluster for all tests here, or a skip with the reason."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, missing_programs


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if missing := missing_programs():
        pytest.skip(f"needs {', '.join(missing)}: tests/slurm/install.sh installs them")
    if os.geteuid() != 0:
        pytest.skip("needs root: Slurm's daemons start jobs as their users")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    found = Cluster(folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)
