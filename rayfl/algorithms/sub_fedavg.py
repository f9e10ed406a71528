"""Sub-FedAvg: FedAvg among clients that each prune a subnetwork of their own (thesis chapter 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class SubFedAvg(Algorithm):
    """FedAvg with the local objective ``sub_fedavg``, whose settings are in ``local``.

    Everything is decided by the clients (see :class:`rayfl.local.sub_fedavg.SubFedAvg`), so the same
    objective also works within clusters: ``algorithm=pacfl local=sub_fedavg``.
    """

    name: Literal["sub_fedavg"] = "sub_fedavg"
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "sub_fedavg"}}
    objectives: ClassVar[tuple[str, ...] | None] = ("sub_fedavg",)
