"""The available memory of the machine, or of the control group (a container) if that has less.

Also settings for whether this process keeps freed memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")

MEMBERSHIP = Path("/proc/self/cgroup")
"""The groups of this process, a line each: ``number:controllers:path``; of version 2 ``0::path``."""

_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of both versions of control groups: the limit, the memory in use, and the key of the part of it that
can be reclaimed."""


def total_memory(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """The largest amount of memory that this process could have, in bytes."""
    total = int(psutil.virtual_memory().total)
    for folder, (limit, _, _) in _groups(cgroup, membership):
        try:
            total = min(total, int((folder / limit).read_text()))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    return total


def free_memory(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Bytes that this process could still get."""
    free = int(psutil.virtual_memory().available)
    for folder, (limit, used, reclaimable) in _groups(cgroup, membership):
        try:
            allowed, in_use = (int((folder / name).read_text()) for name in (limit, used))
            stat = (folder / "memory.stat").read_text().split()
            free = min(free, allowed - in_use + int(stat[stat.index(reclaimable) + 1]))
        except (OSError, ValueError):
            continue
    return max(free, 0)


def _groups(cgroup: Path, membership: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of the groups of this process and of all groups around them, and the names of their files.

    In a container its own group is at the root; the job of a batch system is a group far below it.
    """
    unified = own = ""
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            if not controllers:
                unified = path
            elif "memory" in controllers.split(","):
                own = path
    for root, path, names in zip((cgroup, cgroup / "memory"), (unified, own), _CGROUP_FILES, strict=True):
        below = Path(path.lstrip("/"))
        if ".." in below.parts:  # outside of what this container sees
            below = Path()
        yield from ((root / folder, names) for folder in (below, *below.parents))


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
