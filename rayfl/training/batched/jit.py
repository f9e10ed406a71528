"""Numba, set up once: compiled code is cached on disk and shared by all worker processes.

Numba's own cache compares the source of the kernel that is called with the cached one, but not the sources of
the kernels that it calls in turn, whose code is compiled into it: after an upgrade that changes only these it
would go on running the old code. Here a change in any kernel's source leads to another cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock, Timeout

from rayfl.training.ahead import cache, kernels, sources

# Before numba is imported: the package's own folder may be read-only.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache()))

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, _CacheLocator
from numba.core.compiler_lock import global_compiler_lock

PATIENCE = 60.0
"""Seconds to wait for another process that compiles the same function, before it is compiled here too."""

_CHECK_INTERVAL = 0.1
"""Seconds between two checks of whether the other process has compiled what is needed here."""


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Where Numba keeps the code of a kernel, and what the code depends on besides its own lines."""

    def __init__(self, line: int) -> None:
        self._line = line

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator | None:
        locator = cls(function.__code__.co_firstlineno)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None  # then nothing is cached
        return locator

    def get_cache_path(self) -> str:
        return str(kernels())

    def get_source_stamp(self) -> str:
        return sources()

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes: ClassVar[list[type]] = [_Locator]


class _Cache(FunctionCache):  # type: ignore[misc]
    """The cached code of a kernel."""

    _impl_class = _Implementation

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        base, stamp = self._impl.filename_base, self._impl.locator.get_source_stamp()
        self._cache_file = _VerifiedFile(self.cache_path, base, stamp)
        self.lock = Path(self.cache_path, f"{base}.lock")

    def has(self, signature: Any, target: Any) -> bool:
        """Whether there is code for a signature and a kind of CPU; it may be damaged."""
        key = self._index_key(signature, target.codegen())
        name = self._cache_file._load_index().get(key)  # the index is written first
        return name is not None and Path(self._cache_file._data_path(name)).exists()


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
                stamp, overloads = _load_verified(file.read())
        except Exception:  # there is no file, or it is damaged: not a pickle
            return {}
        return dict(overloads) if (version, stamp) == (self._version, self._source_stamp) else {}

    def _load_data(self, name: str) -> Any:
        with open(self._data_path(name), "rb") as file:
            return _load_verified(file.read())  # Numba treats an OSError as a missing file

    def save(self, key: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk, a home that became read-only
            super().save(key, data)


def _load_verified(data: bytes) -> Any:
    digest, content = data[:32], data[32:]
    if hashlib.sha256(content).digest() != digest:
        raise OSError("a damaged cache file")
    return pickle.loads(content)


def _by_one_process(
    compile_for: Callable[[Any], Any], lock: Path, cached: Callable[[Any], bool]
) -> Callable[[Any], Any]:
    """Let one process compile a function, and the others on the machine take it from the cache.

    Args:
        compile_for: compiles for a signature, or takes the code from the cache.
        lock: is held by the process that compiles the function, for any signature.
        cached: whether there is code for a signature, for which no other process need be waited for.
    """

    def compile_once(signature: Any) -> Any:
        # In this order: kernels compile others under Numba's lock.
        with global_compiler_lock, _held(lock, lambda: cached(signature)):
            return compile_for(signature)

    return compile_once


@contextlib.contextmanager
def _held(path: Path, needless: Callable[[], bool]) -> Iterator[None]:
    """Hold a lock, unless it is needless, or that takes too long or is impossible; it only saves work."""
    lock, until = FileLock(path), time.monotonic() + PATIENCE
    with contextlib.suppress(OSError, NotImplementedError):
        path.parent.mkdir(parents=True, exist_ok=True)
        while not (needless() or lock.is_locked or time.monotonic() > until):
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=_CHECK_INTERVAL)
    try:
        yield
    finally:
        lock.release()


def jit(*, fastmath: bool | set[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that compiles a function at its first call with new types, and caches the code on disk.

    Args:
        fastmath: let sums be reordered for vector units, and NaN be ignored; or names of LLVM's flags:
            "contract" only lets a product and a sum be one operation.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"fastmath": fastmath, "error_model": "numpy", "nogil": True, "boundscheck": False}
        compiled: Any = numba.njit(**options)(function)
        with contextlib.suppress(RuntimeError, OSError):  # the folder cannot be written to
            compiled._cache = _Cache(function)
            cached = partial(compiled._cache.has, target=compiled.targetctx)
            compiled.compile = _by_one_process(compiled.compile, compiled._cache.lock, cached)
        kernel: Callable[..., Any] = compiled
        return kernel

    return decorate
