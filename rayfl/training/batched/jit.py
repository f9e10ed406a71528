"""Numba, set up once: compiled code is cached on disk and shared by all worker processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before numba is imported: the package's own folder may be read-only.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "rayfl" / "numba"))

import numba
from numba.core.caching import IndexDataCacheFile


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
            cache = compiled._cache
            own = cache._cache_file
            cache._cache_file = _VerifiedFile(cache.cache_path, cache._impl.filename_base, own._source_stamp)
        except RuntimeError:  # no place for the cache can be written to
            compiled = numba.njit(**options)(function)
        found: Callable[..., Any] = compiled
        return found

    return decorate
