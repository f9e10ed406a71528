"""Versions and machine, for ``environment.json`` and ``rayfl doctor``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

from rayfl.memory import free_memory, total_memory
from rayfl.version import __version__

PACKAGES = ("ray", "torch", "torchvision", "numpy", "numba", "scipy", "scikit-learn", "umap-learn", "pandas")


def versions() -> dict[str, str]:
    """Versions of the packages that results may depend on; ``missing`` where one is not installed."""
    return {"rayfl": __version__, **{name: _version(name) for name in PACKAGES}}


@cache  # cached, because a process may make many runs
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def machine() -> dict[str, Any]:
    """Python, operating system, processor, cores, memory in GB, GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(total_memory() / 1e9, 1),
        "memory_free_gb": round(free_memory() / 1e9, 1),
        "gpus": gpus,
    }


def _processor() -> str:
    """The processor's name, as Linux gives it; elsewhere what Python knows, which may be nothing."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
