"""The checks of ``rayfl doctor`` besides versions: disks, memory and folders that can make runs fail."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayfl.errors import ConfigError
from rayfl.memory import free_memory
from rayfl.runtime.connection import object_store, short_folder
from rayfl.training.ahead import cache, damaged
from rayfl.units import counted, size

_LEAST_DISK = 1e9
"""Free bytes below which a disk may fill up during a run."""

_LEAST_SHARED_MEMORY = 256e6
"""Shared memory below which Ray keeps its objects on a disk, which is slow."""

_LEAST_OBJECT_STORE = 500e6
"""Bytes of the object store below which the data and models of ordinary runs are written to disk."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        found: its state.
        remedy: how to repair it; empty if all is well.
    """

    name: str
    found: str
    remedy: str = ""


def checks() -> Iterator[Check]:
    """Disks, folders, shared memory, the object store, caches, the token."""
    yield _disk("disk for runs", Path.cwd())
    yield _temporary()
    yield _shared_memory(Path("/dev/shm"))
    yield _object_store(object_store(free_memory()))
    yield _cache(cache())
    yield _token(Path.home() / ".ray" / "auth_token")


def _disk(name: str, folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    remedy = "" if free > _LEAST_DISK else "free some space, or set output.root to a folder on another disk"
    return Check(name, f"{size(free)} free in {folder}", remedy)


def _temporary() -> Check:
    temporary_folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        folder = short_folder() or temporary_folder
    except ConfigError as error:
        return Check("temporary folder", temporary_folder, str(error))
    where = (
        temporary_folder
        if folder == temporary_folder
        else f"{temporary_folder}; Ray gets {folder}, as its sockets need a short ASCII path"
    )
    free = shutil.disk_usage(temporary_folder).free
    remedy = "" if free > _LEAST_DISK else "free some space, or set RAY_TMPDIR"
    return Check("temporary folder", f"{where}, {size(free)} free", remedy)


def _shared_memory(folder: Path) -> Check:
    if not folder.is_dir():
        return Check("shared memory", "none", "Ray keeps its objects on a disk, which is slow")
    usage = shutil.disk_usage(folder)
    remedy = "" if usage.free > _LEAST_SHARED_MEMORY else "Ray needs more (docker run --shm-size), or is slow"
    return Check("shared memory", f"{size(usage.free)} of {size(usage.total)} free", remedy)


def _object_store(available: float) -> Check:
    remedy = (
        ""
        if available > _LEAST_OBJECT_STORE
        else "larger runs write to disk, which is slow: free some memory"
    )
    return Check("object store", f"{size(available)} in a Ray that is started here", remedy)


def _cache(folder: Path) -> Check:
    name = "compiled code"
    if not folder.is_dir():
        return Check(
            name, f"nothing in {folder} yet: the first run compiles for some seconds while it starts"
        )
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    remedy = (
        ""
        if os.access(folder, os.W_OK)
        else "it is not writable, so every run compiles again: set NUMBA_CACHE_DIR to a writable folder"
    )
    count = damaged(folder)
    if count:
        files = f"{counted(count, 'damaged file')}"
        remedy = remedy or f"{files}: the next run compiles their code again; you may also delete the folder"
    return Check(name, f"{size(written)} in {folder}", remedy)


def _token(path: Path) -> Check:
    name = "Ray's token"
    if not path.is_file():
        return Check(name, "none yet")
    mode = stat.S_IMODE(path.stat().st_mode)
    remedy = "" if not mode & 0o077 else f"others can read it: chmod 600 {path}"
    return Check(name, f"{path}, mode {mode:o}", remedy)
