"""Compiles the kernels in a separate process while a run still imports, starts Ray and reads its data.

When rayfl runs for the first time on a machine, Numba compiles the kernels, which takes some seconds of one
core. A process that needs a kernel in the meantime waits for it (:mod:`rayfl.training.batched.jit`). The code
is the same regardless of which process compiles it, so no result depends on it. ``python -m
rayfl.training.batched.compile_all`` compiles them by hand, for example for a container image.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import pickletools
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

_KERNELS = Path(__file__).parent / "batched"
"""The folder of the kernels' sources; the folder of their compiled code is named after it."""


def cache() -> Path:
    """The folder of compiled code: ``NUMBA_CACHE_DIR``, or one in the user's cache folder."""
    home = os.path.expanduser("~")
    home = tempfile.gettempdir() if home == "~" else home  # a user in a container may have none
    return Path(os.environ.get("NUMBA_CACHE_DIR") or Path(home, ".cache", "rayfl", "numba"))


@functools.cache
def sources() -> str:
    """A digest of the kernels' sources.

    Raises:
        OSError: if they cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(_KERNELS.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def kernels() -> Path:
    """The folder of the kernels' compiled code, named by their sources' contents and the compiler's version.

    Raises:
        OSError: if the kernels' sources cannot be read.
    """
    digest = hashlib.sha256(f"{sources()}{_compiler_version()}".encode())
    return cache() / f"{_KERNELS.name}_{digest.hexdigest()[:16]}"


@functools.cache
def _compiler_version() -> str:
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numba", "llvmlite"))


def sound(path: Path) -> bool:
    """Whether the contents of a cache file (``.nbi``, ``.nbc``) match its digest."""
    try:
        content = path.read_bytes()
        if path.suffix == ".nbi":  # it begins with Numba's version, as a pickle, which is not loaded
            content = content[1 + max(position or 0 for _, _, position in pickletools.genops(content)) :]
    except Exception:  # the file is gone, or damaged: not a pickle
        return False
    return hashlib.sha256(content[32:]).digest() == content[:32]


def damaged(folder: Path) -> int:
    """Number of cache files of rayfl's kernels that do not match their digests.

    UMAP's code is in this folder too; it has no digests.
    """
    return sum(not sound(path) for path in folder.glob(f"{_KERNELS.name}_*/*.nb[ci]"))


def begin() -> bool:
    """Start compiling, unless it has been done on this kind of machine or is being done by another process;
    returns whether it was started.
    """
    try:
        if stamp().exists():
            return False
        cache().mkdir(parents=True, exist_ok=True)
        if not os.access(cache(), os.W_OK):  # other processes would not find the code
            return False
        with _lock() as lock:
            return not stamp().exists() and _start(lock)
    except OSError:
        return False


def _start(lock: tuple[int, ...]) -> bool:
    """Start a process that compiles, and has the lock as long as it lives, however it ends."""
    command = [sys.executable, "-m", "rayfl.training.batched.compile_all"]
    devnull = subprocess.DEVNULL
    try:
        child = subprocess.Popen(
            command, stdin=devnull, stdout=devnull, stderr=devnull, start_new_session=True, pass_fds=lock
        )
    except OSError:  # no memory or too many processes: the run compiles what it needs
        return False
    threading.Thread(target=child.wait, name="rayfl-ahead", daemon=True).start()
    return True


@contextlib.contextmanager
def _lock() -> Iterator[tuple[int, ...]]:
    """A file descriptor of the lock on compiling for this kind of machine, to be inherited; none where there
    are no locks, as on some network file systems: it only saves work.

    Raises:
        BlockingIOError: if another process has the lock.
        OSError: if the kernels' source cannot be read.
    """
    path = stamp()
    descriptors: tuple[int, ...] = ()
    try:
        with contextlib.suppress(OSError):
            descriptors = (os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666),)
        for descriptor in descriptors:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:
                pass
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def stamp() -> Path:
    """The file that marks the kernels as compiled; it differs by version and CPU.

    Raises:
        OSError: if the kernels' source cannot be read.
    """
    environment = f"{sys.version}{_compiler_version()}{_cpu()}{sources()}"
    digest = hashlib.sha256(environment.encode())
    return cache() / f"compiled-{digest.hexdigest()[:16]}"


def _cpu() -> str:
    """The CPU's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return os.uname().machine
    prefixes = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(prefixes)}))
