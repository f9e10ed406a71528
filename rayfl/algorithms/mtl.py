"""MTL: FedAvg's rounds, in which every client keeps a model of its own. Smith et al., NeurIPS 2017."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rayfl.algorithms.base import Algorithm


class MTL(Algorithm):
    """Multi-task learning: the clients' models are different and pulled towards their mean.

    The same as ``algorithm: fedavg`` with ``local: mtl``, where its settings are (see
    :class:`rayfl.local.mtl.MTL`); ``algorithm: pacfl`` with ``local: mtl`` pulls towards the means of
    clusters.
    """

    name: Literal["mtl"] = "mtl"
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "mtl"}}
    objectives: ClassVar[tuple[str, ...] | None] = ("mtl",)
