"""How much memory there is: the machine's, or that of the control group (a container) if it has less."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")

_VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of both versions of control groups: the limit, what is used, and what can be reclaimed of it."""


def total_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that this process could get at most."""
    total = int(psutil.virtual_memory().total)
    for limit, _, _ in _VERSIONS:
        try:
            total = min(total, int((cgroup / limit).read_text()))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    return total


def free_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that this process could still get."""
    free = int(psutil.virtual_memory().available)
    for limit, used, reclaimable in _VERSIONS:
        try:
            most, now = (int((cgroup / name).read_text()) for name in (limit, used))
            stat = (cgroup / limit).with_name("memory.stat").read_text().split()
            free = min(free, most - now + int(stat[stat.index(reclaimable) + 1]))
        except (OSError, ValueError):
            continue
    return max(free, 0)


def resident() -> int:
    """Bytes of memory that this process holds, what it shares with others among them; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
