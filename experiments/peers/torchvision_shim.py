"""Import it before torchvision: a torchvision built for CUDA cannot be imported with a torch without CUDA.

Nothing here uses its compiled operators; it is enough that their names exist. The same as
``rayfl/torchvision_shim.py``, for environments without rayfl.
"""

import importlib.util
from pathlib import Path

import torch

_spec = importlib.util.find_spec("torchvision")
try:
    for _path in Path(_spec.origin).parent.glob("_C.*"):
        torch.ops.load_library(_path)
except OSError:
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
