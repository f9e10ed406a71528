"""The one place that imports torchvision, and only when it is needed.

Importing torchvision takes a second, and a torchvision that was built for CUDA cannot be imported with a
CPU-only torch, because its compiled operators cannot be loaded ("operator torchvision::nms does not
exist"). Its datasets and models need none of these operators, so it is enough that their names exist.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_OPERATORS = ("nms", "qnms")
# The names vanish when their library object is collected.
_declared_libraries: list[Any] = []


@functools.cache
def _make_importable() -> None:
    """Load torchvision's compiled operators or, where they do not fit this torch, declare their names."""
    spec = importlib.util.find_spec("torchvision")
    if "torchvision" in sys.modules or spec is None or spec.origin is None:
        return
    import torch

    library_of: Any = torch.library.Library  # torch does not say its types
    load: Any = torch.ops.load_library
    try:
        for path in Path(spec.origin).parent.glob("_C.*"):
            load(path)
    except OSError:
        library = library_of("torchvision", "DEF")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared_libraries.append(library)


def torchvision_datasets() -> ModuleType:
    """The module ``torchvision.datasets``."""
    _make_importable()
    return importlib.import_module("torchvision.datasets")


def torchvision_models() -> ModuleType:
    """The module ``torchvision.models``."""
    _make_importable()
    return importlib.import_module("torchvision.models")
