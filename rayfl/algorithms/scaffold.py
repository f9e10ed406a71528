"""SCAFFOLD: FedAvg with the local objective of that name. Karimireddy et al., ICML 2020."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class Scaffold(Algorithm):
    """FedAvg with control variates against client drift.

    The same as ``algorithm: fedavg`` with ``local: scaffold``, where its settings are; other algorithms take
    the same objective, for instance ``algorithm: pacfl`` with ``local: scaffold``.
    """

    name: Literal["scaffold"] = "scaffold"
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "scaffold"}}
