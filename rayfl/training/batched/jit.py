"""Numba, set up once: compiled code is cached on disk and shared by all worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before numba is imported: the package's own folder may be read-only.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "rayfl" / "numba"))

import numba


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for the types it is called with, at the first call; sums may be reordered for vector units."""
    compiled: Callable[..., Any] = numba.njit(
        cache=True, fastmath=True, error_model="numpy", nogil=True, boundscheck=False
    )(function)
    return compiled
