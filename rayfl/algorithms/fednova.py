"""FedNova: FedAvg with the local objective of that name. Wang et al., NeurIPS 2020."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class FedNova(Algorithm):
    """FedAvg that takes account of how many local steps each client made.

    The same as ``algorithm: fedavg`` with ``local: fednova``, where its settings are; other algorithms take
    the same objective, for instance ``algorithm: pacfl`` with ``local: fednova``.
    """

    name: Literal["fednova"] = "fednova"
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "fednova"}}
