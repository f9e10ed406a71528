"""Has the kernels compiled by a process of its own, while a run still imports, starts Ray and reads its data.

On a machine on which rayfl runs for the first time Numba compiles them, which takes one core some seconds.
What needs a kernel in the meantime waits until it is there (:mod:`rayfl.training.batched.jit`): the code is
the same whoever compiles it, so that no result depends on it. ``python -m
rayfl.training.batched.compile_all`` does it by hand, such as for the image of a container.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path


def cache() -> Path:
    """The folder of compiled code: ``NUMBA_CACHE_DIR``, or one in the user's folder of caches."""
    home = os.path.expanduser("~")
    home = tempfile.gettempdir() if home == "~" else home  # a container's user may have none
    return Path(os.environ.get("NUMBA_CACHE_DIR") or Path(home, ".cache", "rayfl", "numba"))


def begin() -> bool:
    """Start compiling, unless it has been done on this kind of machine; returns whether it was started."""
    try:
        if stamp().exists():
            return False
        cache().mkdir(parents=True, exist_ok=True)
        if not os.access(cache(), os.W_OK):  # nobody would find the code
            return False
    except OSError:
        return False
    command = [sys.executable, "-m", "rayfl.training.batched.compile_all"]
    nothing = subprocess.DEVNULL
    try:
        child = subprocess.Popen(
            command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )
    except OSError:  # no memory, no processes: the run will compile what it needs
        return False
    threading.Thread(target=child.wait, name="rayfl-ahead", daemon=True).start()
    return True


def stamp() -> Path:
    """The file that says that the kernels are compiled: another version or CPU has another one.

    Raises:
        OSError: if the kernels' source cannot be read.
    """
    digest = hashlib.sha256(f"{sys.version}{importlib.metadata.version('numba')}{_cpu()}".encode())
    for path in sorted((Path(__file__).parent / "batched").glob("*.py")):
        digest.update(path.read_bytes())
    return cache() / f"compiled-{digest.hexdigest()[:16]}"


def _cpu() -> str:
    """The CPU's model and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return os.uname().machine
    about = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(about)}))
