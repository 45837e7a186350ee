"""Kills for want of memory: the kernel's counters, where either version of control groups has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from offline_diffusion.launch.memory_kills import MemoryKills, num_memory_kills

FIRST = "5:cpu,cpuacct:/a\n4:memory:/jobs/7\n0::/\n"
SECOND = "0::/jobs/7\n"


@pytest.mark.parametrize(
    ("groups", "place"),
    [
        (FIRST, "memory/jobs/7/memory.oom_control"),
        (FIRST, "memory/memory.oom_control"),
        (SECOND, "jobs/7/memory.events"),
        (SECOND, "memory.events"),
    ],
)
def test_counters_are_found(tmp_path: Path, groups: str, place: str) -> None:
    (tmp_path / "cgroup").write_text(groups)
    counter = tmp_path / "fs" / place
    counter.parent.mkdir(parents=True)
    before = "low 5\noom 9\n" if "events" in place else "oom_kill_disable 3\nunder_oom 4\n"
    counter.write_text(f"{before}oom_kill 2\noom_group_kill 8\n")
    assert num_memory_kills(tmp_path / "cgroup", tmp_path / "fs") == 2


def test_nothing_is_known_elsewhere(tmp_path: Path) -> None:
    assert num_memory_kills(tmp_path / "none", tmp_path) == 0
    (tmp_path / "cgroup").write_text(FIRST)
    assert num_memory_kills(tmp_path / "cgroup", tmp_path) == 0


def test_a_kill_is_the_reason_of_one_death() -> None:
    count = 3
    kills = MemoryKills(lambda: count)
    assert not kills.explain_one()
    count = 5
    assert [kills.explain_one() for _ in range(3)] == [True, True, False]
