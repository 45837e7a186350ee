"""Whether the kernel has killed a process for want of memory, as the counters of our control group tell.

A process that is killed so leaves nothing but its SIGKILL, which a preemption sends as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

CAUSE = "killed by the system for want of memory"

_GROUPS, _TREE = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def num_memory_kills(groups: Path = _GROUPS, tree: Path = _TREE) -> int:
    """Processes of this process's control group that were killed for want of memory; 0 where nobody says.

    Args:
        groups: Which group we are in.
        tree: Where the groups are mounted; a container may see its own group there as the uppermost one.
    """
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return 0
    files = [
        folder / "memory.oom_control"  # of the first version of control groups
        for _, controllers, path in lines
        if "memory" in controllers.split(",")
        for folder in (tree / "memory" / path.lstrip("/"), tree / "memory")
    ]
    files += [
        folder / "memory.events"
        for _, controllers, path in lines
        if not controllers
        for folder in (tree / path.lstrip("/"), tree)
    ]
    for file in files:
        try:
            if (count := _COUNT.search(file.read_text())) is not None:
                return int(count[1])
        except OSError:
            continue
    return 0


class MemoryKills:
    """Finds a reason for deaths by SIGKILL; each such kill is the reason of one death."""

    def __init__(self, count: Callable[[], int] = num_memory_kills) -> None:
        self._count, self._num_explained = count, count()

    def explain_one(self) -> bool:
        """Whether there was such a kill that has explained no death yet."""
        if self._count() <= self._num_explained:
            return False
        self._num_explained += 1
        return True
