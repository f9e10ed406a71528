"""FedProx: FedAvg with the local objective of that name. Li et al., MLSys 2020."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class FedProx(Algorithm):
    """FedAvg with a proximal term that keeps local models near the global one.

    The same as ``algorithm: fedavg`` with ``local: fedprox``, where its settings are; other algorithms take
    the same objective, for instance ``algorithm: pacfl`` with ``local: fedprox``.
    """

    name: Literal["fedprox"] = "fedprox"
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "fedprox"}}
