"""Versions and machine, for ``environment.json`` and ``rayfl doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from functools import cache
from typing import Any

from rayfl.memory import free_memory, total_memory

PACKAGES = ("rayfl", "ray", "torch", "torchvision", "numpy", "scipy", "scikit-learn", "umap-learn", "pandas")


def versions() -> dict[str, str]:
    """Versions of the packages that results may depend on; ``missing`` where one is not installed."""
    return {name: _version(name) for name in PACKAGES}


@cache  # cached, because a process may make many runs
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def machine() -> dict[str, Any]:
    """Python, operating system, cores, memory in GB, GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory_gb": round(total_memory() / 1e9, 1),
        "memory_free_gb": round(free_memory() / 1e9, 1),
        "gpus": gpus,
    }
