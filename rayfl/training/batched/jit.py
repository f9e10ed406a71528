"""Numba, set up once: compiled code is cached on disk and shared by all worker processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rayfl.training.ahead import cache

# Before numba is imported: the package's own folder may be read-only.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache()))

import numba
from numba.core.caching import IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock

PATIENCE = 60.0
"""Seconds to wait for another process that compiles the same function, before it is compiled here too."""


class _VerifiedFile(IndexDataCacheFile):  # type: ignore[misc]
    """A function's cache with a checksum, which also tolerates a disk that cannot be written.

    Numba's own cache raises arbitrary pickle errors for a truncated file, and would run machine code with a
    flipped bit. Here a damaged file counts as missing: the function is compiled and the file written again.
    """

    def _dump(self, value: Any) -> bytes:
        data: bytes = super()._dump(value)
        return hashlib.sha256(data).digest() + data

    def _load_index(self) -> dict[Any, str]:
        try:
            with open(self._index_path, "rb") as file:
                version = pickle.load(file)
                stamp, overloads = _verified(file.read())
        except Exception:  # there is none, or pickle meets any bytes
            return {}
        return dict(overloads) if (version, stamp) == (self._version, self._source_stamp) else {}

    def _load_data(self, name: str) -> Any:
        with open(self._data_path(name), "rb") as file:
            return _verified(file.read())  # an OSError is taken for a file that is gone

    def save(self, key: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk, a home that became read-only
            super().save(key, data)


def _verified(data: bytes) -> Any:
    digest, content = data[:32], data[32:]
    if hashlib.sha256(content).digest() != digest:
        raise OSError("a damaged cache file")
    return pickle.loads(content)


def _by_one_process(compile_for: Callable[[Any], Any], lock: Path) -> Callable[[Any], Any]:
    """Let one process compile a function, and the others on the machine take it from the cache."""

    def compile_once(signature: Any) -> Any:
        with global_compiler_lock, _held(lock):  # in the order in which Numba would take a second one
            return compile_for(signature)

    return compile_once


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold a lock, unless that takes too long or is impossible: it saves work, nothing depends on it."""
    lock = FileLock(path)
    with contextlib.suppress(OSError, NotImplementedError, Timeout):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=PATIENCE)
    try:
        yield
    finally:
        lock.release()


def jit(*, fastmath: bool | set[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile for the types it is called with, at the first call, and keep the result on disk if possible.

    Args:
        fastmath: let sums be reordered for vector units, and NaN be ignored; or names of LLVM's flags:
            "contract" only lets a product and a sum be one operation.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"fastmath": fastmath, "error_model": "numpy", "nogil": True, "boundscheck": False}
        try:
            compiled: Any = numba.njit(cache=True, **options)(function)
            files = compiled._cache
            stamp = files._cache_file._source_stamp
            files._cache_file = _VerifiedFile(files.cache_path, files._impl.filename_base, stamp)
            lock = Path(files.cache_path, f"{files._impl.filename_base}.lock")
            compiled.compile = _by_one_process(compiled.compile, lock)
        except RuntimeError:  # no place for the cache can be written to
            compiled = numba.njit(**options)(function)
        found: Callable[..., Any] = compiled
        return found

    return decorate
