"""The available memory of the machine, or of the control group (a container) if that has less.

Also settings for whether this process keeps freed memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")

_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of both versions of control groups: the limit, the memory in use, and the key of the part of it that
can be reclaimed."""


def total_memory(cgroup: Path = CGROUP) -> int:
    """The largest amount of memory that this process could have, in bytes."""
    total = int(psutil.virtual_memory().total)
    for limit, _, _ in _CGROUP_FILES:
        try:
            total = min(total, int((cgroup / limit).read_text()))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    return total


def free_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that this process could still get."""
    free = int(psutil.virtual_memory().available)
    for limit, used, reclaimable in _CGROUP_FILES:
        try:
            allowed, in_use = (int((cgroup / name).read_text()) for name in (limit, used))
            stat = (cgroup / limit).with_name("memory.stat").read_text().split()
            free = min(free, allowed - in_use + int(stat[stat.index(reclaimable) + 1]))
        except (OSError, ValueError):
            continue
    return max(free, 0)


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Numbers of three parameters of ``mallopt`` in the GNU C library."""

_DEFAULT_MMAP_MAX = 1 << 16
"""Default of the maximum number of allocations with a mapping of their own."""

_LARGEST_KEPT, _MOST_KEPT = 1 << 25, 1 << 28
"""Bytes of the largest allocation that is kept when freed (glibc's maximum), and of all that are kept."""


def keep_freed(all_of_it: bool = False) -> None:
    """Make this process keep freed memory for later allocations (with the GNU C library).

    By default the memory of tensors of some megabytes is returned to the system when they are freed. Every
    training step then gets it again page by page, which takes a quarter of the training time of a small
    network with a large vocabulary.

    Args:
        all_of_it: also allocations of more than 32 MB, for processes that copy large models: getting new
            pages takes much longer than the copy. The process then stays as large as it has ever been, until
            it calls :func:`give_back`.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, -1 if all_of_it else _MOST_KEPT)
        if all_of_it:
            mallopt(_MMAP_MAX, 0)


def give_back() -> None:
    """Return freed memory to the system; from now on, return large allocations as soon as they are freed."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)
        library.mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
        library.malloc_trim(0)


def resident() -> int:
    """Resident memory of this process in bytes, including pages shared with others; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
