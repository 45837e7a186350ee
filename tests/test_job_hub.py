"""A job whose output is on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hub_server import REPO, HubServer
from job_fakes import SMALL, Runner, contents, make_rows, write_jsonl

URL = f"hf://datasets/{REPO}"
OPTIONS: dict[str, Any] = {"shard_size": 2, "device": "cpu", **SMALL}

# The Hub's library calls its HTTP client in an old way when it uploads large files without Xet.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def test_a_job_is_there_as_on_a_disk_and_tasks_are_warned(hub: HubServer, tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(5))
    runner = Runner()
    said: list[str] = []
    for task in range(2):
        where = {"work_dir": tmp_path / "work", "num_tasks": 2, "task_index": task}
        runner.run(manifest, URL, say=said.append, **where, **OPTIONS)
    (warning, _) = (line for line in said if line.startswith("warning: "))
    assert warning.startswith(f"warning: {URL} keeps no claims")
    assert warning.endswith("give it one machine at a time")
    runner.run(manifest, tmp_path / "whole", **OPTIONS)
    assert contents(hub.download(tmp_path / "copy")) == contents(tmp_path / "whole")
    shards = [commit.message for commit in hub.commits if commit.message.startswith("shard")]
    assert sorted(shards) == ["shard 0: 2 rows", "shard 1: 2 rows", "shard 2: 1 rows"]
    assert b"| shards done | 3 of 3 |" in hub.files()["README.md"]


def test_one_task_is_not_warned(hub: HubServer, tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.jsonl", make_rows(1))
    said: list[str] = []
    Runner().run(manifest, URL, work_dir=tmp_path / "work", say=said.append, **OPTIONS)
    assert not [line for line in said if "warning" in line]
