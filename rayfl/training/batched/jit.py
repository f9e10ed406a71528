"""Numba, set up once: compiled code is cached on disk and shared by all worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before numba is imported: the package's own folder may be read-only.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "rayfl" / "numba"))

import numba


def jit(*, fastmath: bool | set[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile for the types it is called with, at the first call, and keep the result on disk if possible.

    Args:
        fastmath: let sums be reordered for vector units, and NaN be ignored; or names of LLVM's flags:
            "contract" only lets a product and a sum be one operation.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"fastmath": fastmath, "error_model": "numpy", "nogil": True, "boundscheck": False}
        try:
            compiled: Callable[..., Any] = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no place for the cache can be written to
            compiled = numba.njit(**options)(function)
        return compiled

    return decorate
